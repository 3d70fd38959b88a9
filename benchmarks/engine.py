"""A vLLM engine in a process of its own, for measurements: several can live side by side and take turns."""

import multiprocessing as mp
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class EngineSpec:
    """How an engine is started.

    backend: as --attention-backend takes it. memory: share of the GPU's memory. context, rows: the longest request and the most of them.
    filled: prompts count as computed and their KV cache holds random numbers (vLLM's DecodeBenchConnector), so that only decoding runs.
    options: any other argument of vLLM's LLM class. environment: variables of its process.
    """

    backend: str
    model: Path
    memory: float
    context: int
    rows: int
    filled: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of LLM."""
        sizes = sorted({*(1 << power for power in range(self.rows.bit_length())), self.rows})
        arguments: dict[str, Any] = {
            "model": str(self.model), "attention_backend": self.backend, "gpu_memory_utilization": self.memory,
            "max_model_len": self.context, "max_num_seqs": self.rows, "skip_tokenizer_init": True, "disable_log_stats": False,
            "compilation_config": {"cudagraph_capture_sizes": sizes},
        }  # fmt: skip
        if not any(self.model.glob("*.safetensors")):
            arguments["load_format"] = "dummy"
        if self.filled:
            extra = {"fill_mean": 0.0, "fill_std": 1.0, "startup_fill": True}
            arguments["kv_transfer_config"] = {
                "kv_connector": "DecodeBenchConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
            }  # fmt: skip
        return arguments | dict(self.options)


@dataclass(frozen=True)
class Timing:
    """first_token_s: from the first request's scheduling to the last request's first token. decode_s: from there to the last token.
    steps: decode steps in between. tokens: the answers. rows: decoding rows by method, where the backend is santa."""

    first_token_s: float
    decode_s: float
    steps: int
    tokens: list[list[int]]
    rows: dict[str, float]

    @property
    def step_ms(self) -> float:
        return 1000 * self.decode_s / self.steps


class Engine:
    """`with Engine(spec) as engine: engine.generate(...)`."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec

    def __enter__(self) -> "Engine":
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self.spec, theirs))
        self._process.start()
        theirs.close()
        self._receive()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ends the engine with all its processes. At once: nothing of it is kept."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()

    def generate(self, prompts: list[list[int]], tokens: int, santa: Mapping[str, Any] | None = None) -> Timing:
        """Greedy answers of exactly `tokens` tokens to all prompts at once. santa: the requests' santa_* parameters."""
        self._pipe.send((prompts, tokens, dict(santa or {})))
        return self._receive()

    def rpc(self, method: str) -> list[Any]:
        """Call a method of the workers, as the option `worker_extension_cls` adds them; one result a worker, in the order of ranks."""
        self._pipe.send(method)
        return self._receive()

    def _receive(self) -> Any:
        try:
            result = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the engine with {self.spec.backend} ended; its output says why") from None
        return result


def _serve(spec: EngineSpec, pipe: Connection) -> None:
    os.setsid()  # a group of its own, for __exit__
    os.environ.update(spec.environment)
    from vllm import LLM, SamplingParams

    from vllm_santa.engine_id import engine_id
    from vllm_santa.metrics import rows_by_method

    engine = LLM(**spec.arguments())
    instance = engine_id(engine.llm_engine.vllm_config)
    pipe.send("ready")
    while True:
        asked = pipe.recv()
        if isinstance(asked, str):
            pipe.send(engine.collective_rpc(asked))
            continue
        prompts, tokens, santa = asked
        sampling = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=santa)
        before = rows_by_method(instance)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        metrics = [output.metrics for output in outputs]
        first = max(metric.first_token_ts for metric in metrics)
        pipe.send(
            Timing(
                first - min(metric.scheduled_ts for metric in metrics),
                max(metric.last_token_ts for metric in metrics) - first,
                tokens - 1,
                [list(output.outputs[0].token_ids) for output in outputs],
                {
                    method: count - before.get(method, 0)
                    for method, count in rows_by_method(instance).items()
                    if count > before.get(method, 0)
                },
            )
        )
