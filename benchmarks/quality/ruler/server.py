"""The server that is asked: any vLLM server for dense attention, one with `--attention-backend santa` for the rest."""

import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.quality.ruler.answers import Answer
from benchmarks.quality.ruler.prompts import Prompt
from vllm_santa.counters import ROW_REASONS
from vllm_santa.policy import REASONS

FALLBACKS = tuple(reason for reason in ROW_REASONS if reason not in REASONS)
"""Reasons of rows that are dense against the wish of policy and request."""


class ServerError(RuntimeError):
    """The server cannot run what it is asked to, or did not."""


class Server:
    """`url`: of the server, without `/v1`. `timeout` in seconds, of one request."""

    def __init__(self, url: str, chat: bool, timeout: float = 3600.0):
        """chat: whether prompts carry their special tokens already."""
        self.url, self._chat = url.rstrip("/"), chat
        self._client = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=timeout, max_retries=2)
        model = self._client.models.list().data[0]
        self.model: str = model.id
        self.max_model_len: int = model.max_model_len  # type: ignore[attr-defined]  # vLLM's own field
        self.version: str = httpx.get(f"{self.url}/version", timeout=60).raise_for_status().json()["version"]
        self._tokens = lru_cache(maxsize=64)(self._tokenize)  # once for all configurations of a prompt

    def ask(self, prompt: Prompt, configuration: str, parameters: dict[str, Any], max_tokens: int | None = None) -> Answer:
        """One text completion at temperature 0. The seed is the sample's, so that a run can be repeated."""
        started = time.monotonic()
        # The client looks at every token of a `prompt` in Python, a third of a second for 16,384; it passes other fields on as they are.
        body: dict[str, Any] = {"prompt": self._tokens(prompt.text)}
        if parameters:
            body["vllm_xargs"] = {f"santa_{name}": value for name, value in parameters.items()}
        completion = self._client.completions.create(
            model=self.model,
            prompt="",
            max_tokens=max_tokens or prompt.max_tokens,
            temperature=0,
            extra_body=body,
        )
        tokens = completion.usage.completion_tokens if completion.usage else 0
        seconds = round(time.monotonic() - started, 3)
        return Answer(
            configuration, prompt.task, prompt.length, prompt.index, completion.choices[0].text, tokens, seconds, prompt.answers
        )  # fmt: skip

    def _tokenize(self, text: str) -> list[int]:
        """The text's tokens, by the server's own tokenizer."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": not self._chat}
        return httpx.post(f"{self.url}/tokenize", json=body, timeout=600).raise_for_status().json()["tokens"]

    def counters(self) -> dict[tuple[str, str, str], float]:
        """SANTA's samples on /metrics, by name, method and reason, summed over engines; empty on another backend."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).raise_for_status().text
        found: dict[tuple[str, str, str], float] = {}
        for family in text_string_to_metric_families(text):
            if family.name.startswith("santa_"):
                found[family.name, "", ""] = 0.0
                for sample in family.samples:
                    key = sample.name, sample.labels.get("method", ""), sample.labels.get("reason", "")
                    found[key] = found.get(key, 0.0) + sample.value
        return found

    def runs_santa(self) -> bool:
        return bool(self.counters())

    def await_codebooks(self, prompts: Iterable[Prompt]) -> None:
        """Ask prompts until the server has trained its codebooks, if it has none: rows of methods with codes are dense until then.

        Raises:
            ServerError: the prompts were not enough.
        """
        for prompt in prompts:
            if self._codebooks_ready():
                return
            self.ask(prompt, "warm-up", {"method": "dense"}, max_tokens=64)
        if not self._codebooks_ready():
            raise ServerError(f"{self.url}: no codebooks after all the prompts; give the server's policy a file of codebooks")

    def _codebooks_ready(self) -> bool:
        return self.counters().get(("santa_codebooks_ready", "", ""), 0.0) > 0


def check_rows(before: dict[tuple[str, str, str], float], after: dict[tuple[str, str, str], float], expected: int) -> None:
    """Check that the server decoded sparsely what it was asked to.

    expected: tokens of answers to sparse requests, without the first of each, which comes from the prompt.
    Raises ServerError if fewer rows did what their request asked, or if rows were dense because the server could do no better.
    """

    def gained(*reasons: str) -> float:
        return sum(value - before.get(key, 0.0) for key, value in after.items() if key[0] == "santa_rows_total" and key[2] in reasons)

    for reason in FALLBACKS:
        if missing := gained(reason):
            raise ServerError(f"{missing:.0f} rows were dense ({reason}): their answers are not those of their configuration")
    if (sparse := gained("request", "budget_covers_context")) < expected:
        raise ServerError(f"{sparse:.0f} rows followed their request, of {expected} that should have: is it the server's policy?")
