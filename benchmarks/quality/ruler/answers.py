"""The answers of a run, a JSON line each, written as they come: a run that was cut off goes on where it stopped."""

import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

AnswerKey = tuple[str, str, int, int]


@dataclass(frozen=True)
class Answer:
    """What one configuration answered to one prompt. tokens: of the answer. seconds: of the whole request."""

    configuration: str
    task: str
    length: int
    index: int
    text: str
    tokens: int
    seconds: float
    answers: list[str]

    @property
    def key(self) -> AnswerKey:
        return self.configuration, self.task, self.length, self.index


class AnswerFile:
    """`run` says what was asked whom, the first line of the file."""

    def __init__(self, path: Path, run: dict[str, Any]):
        """Open the file to go on with, or begin it.

        Raises:
            ValueError: the file belongs to another run, or is none of ours.
        """
        self._path, self._lock = path, threading.Lock()
        self.done: dict[AnswerKey, Answer] = {}
        if path.exists():
            _drop_cut_line(path)
        if path.exists() and path.stat().st_size:
            before, answers = read_answers(path)
            for name, value in run.items():
                if (begun := before.get(name)) != value:
                    raise ValueError(f"{path}: was begun with {name} {begun!r}, not {value!r}; allowed: another file for another run")
            self.done = {answer.key: answer for answer in answers}
        else:
            path.write_text(json.dumps(run) + "\n", encoding="utf-8")

    def add(self, answer: Answer) -> None:
        """Append an answer, whole and at once; any thread may."""
        with self._lock, self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(answer)) + "\n")
            self.done[answer.key] = answer


def read_answers(path: Path) -> tuple[dict[str, Any], list[Answer]]:
    """What was run, and its answers; a last line that was not written to its end is not one."""
    try:
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        run, *answers = map(json.loads, whole.split("\n"))
        return run, [Answer(**answer) for answer in answers]
    except (json.JSONDecodeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is not a file of answers: {error}") from None


def _drop_cut_line(path: Path) -> None:
    """Cut off a last line that was not written to its end."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
