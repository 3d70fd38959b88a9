"""Asking a server every prompt by every configuration, from several threads, with a progress bar."""

import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.quality.ruler.answers import AnswerFile
from benchmarks.quality.ruler.configurations import CONFIGURATIONS, needs_codes
from benchmarks.quality.ruler.prompts import Prompt
from benchmarks.quality.ruler.server import Server, ServerError, check_rows


def ask_all(
    server: Server,
    prompts: Sequence[Prompt],
    configurations: Sequence[str],
    answers: AnswerFile,
    concurrency: int,
    console: Console,
    seconds: float = float("inf"),
) -> None:
    """Ask what the file of answers lacks.

    `concurrency` prompts are on their way at a time. Of each, the first configuration goes alone, because it pays for the prefill; then
    all others go together, out of the server's prefix cache. So a run that is cut off has all answers to almost every prompt it began.
    After `seconds`, the prompts on their way are the last.

    Raises:
        ServerError: the server cannot run a configuration, or did not do what it was asked.
        openai.OpenAIError: a request failed; the answers so far are kept.
    """
    todo = {prompt.key: [name for name in configurations if (name, *prompt.key) not in answers.done] for prompt in prompts}
    open_ = [prompt for prompt in prompts if todo[prompt.key]]
    if longest := max((prompt.length for prompt in open_ if prompt.length > server.max_model_len), default=0):
        raise ServerError(f"{server.url}: prompts of {longest} tokens, and a server with max_model_len {server.max_model_len}")
    asked = {name for names in todo.values() for name in names}
    sparse = {name for name in asked if name != "dense"}
    if sparse and not server.runs_santa():
        raise ServerError(f"{server.url}: shows no santa metrics; {', '.join(sorted(sparse))} need --attention-backend santa")
    if any(map(needs_codes, asked)):
        with console.status("the server's codebooks: asking prompts until they are there"):
            server.await_codebooks(open_)
    # A server on another backend knows no santa parameters, and needs none for dense attention.
    parameters = {name: CONFIGURATIONS[name] for name in asked} if server.runs_santa() else {"dense": {}}
    before, expected, stop, deadline = server.counters(), 0, threading.Event(), time.monotonic() + seconds

    def ask_one(prompt: Prompt, name: str) -> int:
        """Returns how many tokens of the answer should have been decoded sparsely."""
        if stop.is_set():
            return 0
        try:
            answer = server.ask(prompt, name, parameters[name] | ({"seed": seed_of(prompt)} if name in sparse else {}))
        except BaseException:
            stop.set()  # before another thread takes the next request
            raise
        answers.add(answer)
        progress.advance(bar)
        return max(answer.tokens - 1, 0) if name in sparse else 0

    def ask_prompt(prompt: Prompt) -> int:
        if time.monotonic() >= deadline:
            return 0
        first, *others = todo[prompt.key]
        return ask_one(prompt, first) + sum(together.map(partial(ask_one, prompt), others))

    with (
        _progress(console) as progress,
        ThreadPoolExecutor(concurrency * len(configurations)) as together,
        ThreadPoolExecutor(concurrency) as pool,
    ):
        total = len(prompts) * len(configurations)
        bar = progress.add_task("answers", total=total, completed=total - sum(map(len, todo.values())))
        futures = [pool.submit(ask_prompt, prompt) for prompt in open_]
        try:
            for future in as_completed(futures):
                expected += future.result()
        finally:  # an error ends the run; what other threads still wait for is kept
            stop.set()
            pool.shutdown(cancel_futures=True)
    if sparse:
        check_rows(before, server.counters(), expected)


def seed_of(prompt: Prompt) -> int:
    """One seed for all configurations of a prompt, 32 bits, the same in every run."""
    return zlib.crc32(repr(prompt.key).encode())


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console)
