"""Prompts for a model: RULER's samples at full length in the model's chat template, kept in a file of their own (gzipped JSON lines)."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.quality.ruler.tasks import Task, load_task
from benchmarks.quality.texts import RULER

MAX_SIZE = 1 << 20


@dataclass(frozen=True)
class Prompt:
    """text: as the server gets it. tokens: of the text. max_tokens: of the answer; both together are at most `length`.
    answers: what RULER looks for."""

    task: str
    length: int
    index: int
    text: str
    answers: list[str]
    tokens: int
    max_tokens: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.task, self.length, self.index


@dataclass(frozen=True)
class PromptSet:
    """tokenizer: the model's name. chat: whether its chat template is in the texts, so that a server must not add special tokens."""

    tokenizer: str
    chat: bool
    prompts: list[Prompt]


class Renderer:
    """Puts questions into the tokenizer's chat template, where it has one, and counts tokens as the server will."""

    def __init__(self, tokenizer: Any, chat: bool | None = None):
        """tokenizer: of transformers. chat: None for as the tokenizer has it."""
        self._tokenizer = tokenizer
        self.chat = bool(tokenizer.chat_template) if chat is None else chat

    def render(self, question: str, answer_prefix: str) -> str:
        """The question as the user's turn, and the model's turn begun with RULER's words."""
        if not self.chat:
            return question + answer_prefix
        turn = [{"role": "user", "content": question}]
        return self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + answer_prefix.lstrip()

    def count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=not self.chat, verbose=False).input_ids)


def make_prompts(
    renderer: Renderer, tasks: Iterable[str], lengths: Iterable[int], samples: int, wheels: Path | None = None
) -> Iterator[Prompt]:
    """Samples 0 to `samples` of each task at each length.

    Raises:
        ValueError: an unknown task, or a length that the smallest sample of a task does not fit.
    """
    for length in lengths:
        for name in tasks:
            task = load_task(name, length, renderer.count, wheels)
            first, size = fit(task, 0, length, renderer)
            yield first
            for index in range(1, samples):
                yield fit(task, index, length, renderer, size)[0]


def fit(task: Task, index: int, length: int, renderer: Renderer, guess: int | None = None) -> tuple[Prompt, int]:
    """The sample with the largest haystack that leaves room for the answer, and the size of that haystack.

    guess: the size that fitted another sample; it is only made smaller, as RULER does. Without it, the size is found by bisection.
    """
    room = length - task.tokens

    def make(size: int) -> Prompt:
        question, answer_prefix, answers = task.sample(size, index)
        text = renderer.render(question, answer_prefix)
        return Prompt(task.name, length, index, text, answers, renderer.count(text), task.tokens)

    if guess is None:
        return _largest(make, task, room)
    prompt, size = make(guess), guess
    while prompt.tokens > room and size > task.least:
        size = max(task.least, min(size - 1, size * 98 // 100))
        prompt = make(size)
    if prompt.tokens > room:
        raise _too_short(task, length, prompt)
    return prompt, size


def _largest(make: Callable[[int], Prompt], task: Task, room: int) -> tuple[Prompt, int]:
    low, best = task.least, make(task.least)
    if best.tokens > room:
        raise _too_short(task, best.length, best)
    high = 2 * low
    while (prompt := make(high)).tokens <= room and high < MAX_SIZE:
        low, best, high = high, prompt, 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        prompt = make(middle)
        if prompt.tokens <= room:
            low, best = middle, prompt
        else:
            high = middle
    return best, low


def _too_short(task: Task, length: int, prompt: Prompt) -> ValueError:
    return ValueError(f"length: {length} is too short for {task.name}; allowed: from {prompt.tokens + task.tokens} tokens for this sample")


def write_prompts(path: Path, tokenizer: str, chat: bool, prompts: Iterable[Prompt]) -> None:
    """Write a prompt file; only a whole one gets its name. The same prompts give the same bytes."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as out:
        for line in chain([{"ruler": RULER, "tokenizer": tokenizer, "chat": chat}], map(asdict, prompts)):
            out.write(json.dumps(line).encode() + b"\n")
    part.rename(path)


def read_prompts(path: Path) -> PromptSet:
    """Read a prompt file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        header = json.loads(next(lines))
        return PromptSet(header["tokenizer"], header["chat"], [Prompt(**json.loads(line)) for line in lines])
