"""Sends jobs over HTTP, many at a time, and collects what came back; some clients leave early."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from jobs import Job

T = TypeVar("T")
AT_A_TIME = 12
SECONDS = 300
"""An answer that takes longer is lost."""


@dataclass
class Choice:
    """One of the n answers of a request."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None


@dataclass
class Outcome:
    """What a job got. status: of HTTP; 0 where the client left before the end. prompt_tokens: as the server counts them."""

    job: Job
    status: int = 0
    error: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int = 0


def send(url: str, jobs: Sequence[Job]) -> list[Outcome]:
    """All jobs, AT_A_TIME of them together; outcomes in their order."""
    return asyncio.run(_send_all(url, jobs, _send))


def send_until_lost(url: str, jobs: Sequence[Job]) -> list[int | None]:
    """The same from clients that expect the server to fail: HTTP statuses, None where the connection broke."""

    async def one(http: httpx.AsyncClient, job: Job) -> int | None:
        try:
            return (await _send(http, job)).status
        except httpx.TransportError:
            return None

    return asyncio.run(_send_all(url, jobs, one))


async def _send(http: httpx.AsyncClient, job: Job) -> Outcome:
    outcome = Outcome(job)
    if job.stream:
        async with http.stream("POST", job.path(), json=job.body()) as response:
            if response.status_code != 200:
                outcome.status, outcome.error = response.status_code, (await response.aread()).decode()
                return outcome
            chunks = 0
            async for event in _events(response):
                _add(outcome, event)
                chunks += 1
                if chunks == job.leaves_after:
                    return outcome  # closes the connection
        outcome.status = 200
        return outcome
    try:
        response = await asyncio.wait_for(http.post(job.path(), json=job.body()), job.leaves_within)
    except asyncio.TimeoutError:
        return outcome
    outcome.status = response.status_code
    if response.status_code == 200:
        _add(outcome, response.json())
    else:
        outcome.error = response.text
    return outcome


async def _send_all(url: str, jobs: Sequence[Job], one: Callable[[httpx.AsyncClient, Job], Awaitable[T]]) -> list[T]:
    limit = asyncio.Semaphore(AT_A_TIME)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=httpx.Limits(max_connections=None)) as http:

        async def limited(job: Job) -> T:
            async with limit:
                return await one(http, job)

        return await asyncio.gather(*map(limited, jobs))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Events end with an empty line. Only "\\n" ends a line: httpx's own lines end at U+0085 and others as well, which JSON may hold."""
    rest = ""
    async for text in response.aiter_text():
        *events, rest = (rest + text).split("\n\n")
        for event in events:
            if event.startswith("data: ") and event != "data: [DONE]":
                yield json.loads(event.removeprefix("data: "))


def _add(outcome: Outcome, body: dict[str, Any]) -> None:
    """Add a whole answer, or one event of a stream. An error in the middle of a stream stays in `error`."""
    outcome.error += json.dumps(body["error"]) if "error" in body else ""
    if body.get("usage"):
        outcome.prompt_tokens = body["usage"]["prompt_tokens"]
    for part in body.get("choices", []):
        choice = outcome.choices.setdefault(part["index"], Choice())
        said = part.get("delta") or part.get("message") or part
        choice.text += said.get("content") or said.get("text") or ""
        choice.tokens += part.get("token_ids") or []
        choice.finish = part.get("finish_reason") or choice.finish
        choice.logprobs += _logprobs(part.get("logprobs") or {})


def _logprobs(logprobs: dict[str, Any]) -> list[float]:
    if "content" in logprobs:
        return [token["logprob"] for token in logprobs["content"] or []]
    return logprobs.get("token_logprobs") or []
