"""A real `vllm serve` in a process group of its own, driven over HTTP."""

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from examples.demo.process import ServerEnded, ServerProcess, free_port, tail

HERE = Path(__file__).parent
START_SECONDS, STOP_SECONDS = 500, 20
MODEL = "tiny"
NOISE = 1e-3
"""Differences of log-probabilities below this are rounding; other seeds and budgets make 0.1 and more."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
}
"""What every vLLM process of the tests runs with: little memory, one thread each, nothing from the network, and this folder's modules.

Connections stay open longer than clients hold on to idle ones (5 s): vLLM's own 5 s end now and then just as a request comes in on one.
"""


@dataclass(frozen=True)
class Ask:
    """A text completion at temperature 0. santa: its parameters without their prefix."""

    prompt: Sequence[int]
    tokens: int
    santa: dict[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        extra = {"ignore_eos": True, "return_token_ids": True, "vllm_xargs": {f"santa_{name}": value for name, value in self.santa.items()}}
        return {
            "model": MODEL, "prompt": list(self.prompt), "max_tokens": self.tokens, "temperature": 0, "logprobs": 0, "extra_body": extra,
        }  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What came back: token ids and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]

    def agreement(self, other: "Answer") -> int:
        """Leading steps with the same token and, to NOISE, the same log-probability."""
        steps = zip(self.tokens, other.tokens, self.logprobs, other.logprobs, strict=True)
        return next((i for i, (a, b, p, q) in enumerate(steps) if a != b or not abs(p - q) <= NOISE), len(self.tokens))


def assert_same(asks: Sequence[Ask], answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """The answers of each method are the expected ones.

    Batches of other sizes round matrix products differently, by about 1e-6 here. Once in some hundred answers that moves a draw that falls
    on the border between two tokens, and the answer goes its own way from there. So of two answers of a method one may part anywhere;
    wrong numbers, rows or parameters make all of them part at the first steps.
    """
    for method in {ask.santa.get("method") for ask in asks}:
        chosen = [i for i, ask in enumerate(asks) if ask.santa.get("method") == method]
        steps = sum(len(expected[i].tokens) for i in chosen)
        agreed = sum(answers[i].agreement(expected[i]) for i in chosen)
        assert agreed > 0.45 * steps, f"{method}: {agreed} of {steps} steps agree: {[(answers[i], expected[i]) for i in chosen]}"


class Metrics:
    """One reading of /metrics."""

    def __init__(self, text: str):
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name which carry these labels; 0 where there are none."""
        return sum(s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items())

    def names(self) -> set[str]:
        return {sample.name for sample in self._samples}


class Server:
    """`with Server(model, log, "--option", "value", VARIABLE="x") as server:` waits until it serves, and ends every process of it."""

    def __init__(self, model: Path, log: Path, *options: str, **environment: str):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SANTA_")}
        options = ("--dtype", "float32", "--enforce-eager", "--generation-config", "vllm", *options)
        self._process = ServerProcess(model, MODEL, free_port(), log, options, inherited | ENVIRONMENT | environment)
        self.url = self._process.address
        self.log = log
        self._http = httpx.Client(base_url=self.url, timeout=300)

    def run_to_failure(self, seconds: float = START_SECONDS) -> str:
        """Start a server that must not come up; returns what it said.

        Raises:
            AssertionError: it serves. ServerError: it has not given up after that many seconds.
        """
        try:
            self._process.start(seconds)
        except ServerEnded:
            return self.log.read_text()
        finally:
            self._stop()
        raise AssertionError(f"the server came up:\n{self.log_tail()}")

    def __enter__(self) -> "Server":
        try:
            self._process.start(START_SECONDS)
        except BaseException:
            self._stop()
            raise
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)
        return self

    def __exit__(self, *_error: object) -> None:
        self.client.close()
        self._stop()

    def _stop(self) -> None:
        self._process.end(STOP_SECONDS)
        self._http.close()

    def restart(self) -> None:
        """End what is left of it, and start it again on the same port."""
        self._process.end(STOP_SECONDS)
        self._process.start(START_SECONDS)

    @property
    def pid(self) -> int:
        """Of the first process; its group has the same number."""
        return self._process.pid

    def log_tail(self, lines: int = 60) -> str:
        return tail(self.log, lines)

    def healthy(self) -> bool:
        return self._http.get("/health").status_code == 200

    def metrics(self) -> Metrics:
        return Metrics(self._http.get("/metrics").raise_for_status().text)

    @contextlib.contextmanager
    def counting(self) -> Iterator["Delta"]:
        """What the counters gain inside the block, known after it."""
        delta = Delta(self.metrics())
        yield delta
        delta.after = self.metrics()

    def ask(self, ask: Ask) -> Answer:
        choice = self.client.completions.create(**ask.body()).choices[0]
        return Answer(choice.token_ids, choice.logprobs.token_logprobs)

    def ask_together(self, asks: Sequence[Ask]) -> list[Answer]:
        """All at the same time, answers in the order of the asks.

        From one thread, which sends all before it waits: threads that each send one get their turns seconds apart where the server leaves
        them little of the processor.
        """
        return asyncio.run(self._send_together([ask.body() for ask in asks]))

    async def _send_together(self, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=httpx.Limits(max_connections=None)) as http:
            # Over HTTP, what the OpenAI client calls extra is a field like the others.
            sent = [http.post("/v1/completions", json=body | body.pop("extra_body")) for body in bodies]
            choices = [answer.raise_for_status().json()["choices"][0] for answer in await asyncio.gather(*sent)]
        return [Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

    def rpc(self, method: str) -> list[Any]:
        """Call a method of the workers' extension (see cache_probe.py); one result a worker."""
        return self._http.post("/collective_rpc", json={"method": method}).raise_for_status().json()["results"]

    def reset_prefix_cache(self) -> None:
        self._http.post("/reset_prefix_cache").raise_for_status()


class Delta:
    """The difference between two readings of /metrics."""

    def __init__(self, before: Metrics):
        self.before = self.after = before

    def total(self, name: str, **labels: str) -> float:
        return self.after.total(name, **labels) - self.before.total(name, **labels)
