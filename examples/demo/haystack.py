"""A long prompt with one fact in it: prose from the standard library's docstrings, and RULER's question (Hsieh et al., 2024)."""

import ast
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer


@dataclass(frozen=True)
class Needle:
    """One hidden number.

    Args:
        key: what the number is said to belong to.
        value: the number.
        depth: where in the prose it stands, from 0 (start) to 1 (end).
    """

    key: str
    value: str
    depth: float

    @property
    def sentence(self) -> str:
        return f"One of the special magic numbers for {self.key} is: {self.value}."

    @property
    def answer_prefix(self) -> str:
        """The words the assistant has already said: a small model then only has to find the number."""
        return f"The special magic number for {self.key} mentioned in the provided text is"


def messages(needle: Needle, prose: list[str]) -> list[dict[str, str]]:
    """The chat that asks for `needle` in `prose` (paragraphs); its last message is to be continued."""
    place = round(needle.depth * len(prose))
    text = "\n\n".join([*prose[:place], needle.sentence, *prose[place:]])
    question = (
        "A special magic number is hidden within the following text. "
        "Make sure to memorize it. I will quiz you about the number afterwards.\n"
        f"{text}\nWhat is the special magic number for {needle.key} mentioned in the provided text?"
    )
    return [{"role": "user", "content": question}, {"role": "assistant", "content": needle.answer_prefix}]


def docstring_prose(tokenizer: Tokenizer, tokens: int) -> list[str]:
    """Paragraphs of plain English from the standard library's docstrings, at most `tokens` tokens together."""
    chosen: dict[str, None] = {}  # in order, and each once
    for paragraph in _paragraphs():
        if paragraph not in chosen:
            tokens -= len(tokenizer.encode(paragraph).ids) + 1
            if tokens < 0:
                break
            chosen[paragraph] = None
    return list(chosen)


def _paragraphs() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for block in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                    paragraph = " ".join(block.split())
                    if _is_prose(paragraph):
                        yield paragraph


def _is_prose(paragraph: str) -> bool:
    """Whole sentences of some length: no code, no lists of parameters."""
    return len(paragraph) >= 200 and re.fullmatch(r"[A-Z][A-Za-z0-9 ,;.'\"()/_-]*\.", paragraph) is not None and " - " not in paragraph
