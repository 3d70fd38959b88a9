"""RULER's own sample generators, run from its wheel (texts.RULER); nothing of them is kept here.

Each script of the wheel defines `generate_input_output`. What it imports and we lack is replaced while it loads: the tokenizer and the
writer, which we do without; NLTK's sentence splitter, by a regular expression (needles go between sentences); and the word lists of
wonderwords, read from that package's wheel, whose 9 million pairs RULER would otherwise write out to draw one.
"""

import random
import re
import runpy
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml  # type: ignore[import-untyped]

from benchmarks.quality.texts import RULER, data_wheel, ruler_wheel

WORDS = "wonderwords==3.0.1"
TASKS = ("fwe", "niah_single_2", "niah_multikey_2", "vt", "qa_1", "qa_2")
"""The tasks asked by default. Any other of RULER's synthetic.yaml but `cwe` can be named."""

_LEAST = {"niah": 4, "variable_tracking": 6, "freq_words_extraction": 40, "qa": 10}
_FEW_SHOT_TOKENS = 500
_UNLIMITED = 1 << 30

Script = dict[str, Any]
Sampler = Callable[[int, int], tuple[str, list[str]]]


@dataclass(frozen=True)
class Task:
    """One task at one length.

    name: as RULER's. tokens: to generate. least: the smallest haystack that gives a sound sample. answer_prefix: how the answer part of
    the prompt begins. The unit of a haystack's size is the task's: words, sentences or documents.
    """

    name: str
    tokens: int
    least: int
    answer_prefix: str
    sampler: Sampler
    key: str

    def sample(self, size: int, index: int) -> tuple[str, str, list[str]]:
        """Question, beginning of the answer, and the answers of a sample; the same every time, and much the same at any size."""
        key = f"{self.key}-{index}"
        random.seed(key)
        np.random.seed(zlib.crc32(key.encode()))
        text, answers = self.sampler(size, index)
        cut = text.rindex(self.answer_prefix)
        return text[:cut], text[cut:], answers


def load_task(name: str, length: int, count_tokens: Callable[[str], int], wheels: Path | None = None) -> Task:
    """Read a task from the wheel. length: tokens of the prompt and the answer. wheels: folder with the wheels (default: the cache).

    Raises:
        ValueError: an unknown task.
    """
    data = _unpacked(wheels)
    configurations = yaml.safe_load((data.parent / "synthetic.yaml").read_text())
    known = [task for task, config in configurations.items() if config["task"] in _SAMPLERS]
    if name not in known:
        raise ValueError(f"task: {name!r} is not one of RULER's; allowed: {', '.join(known)}")
    kind, arguments = configurations[name]["task"], configurations[name]["args"]
    base = runpy.run_path(str(data / "synthetic" / "constants.py"))["TASKS"][kind]
    common = {
        "save_dir": ".", "save_name": name, "tokenizer_path": "none", "max_seq_length": length, "num_samples": 0,
        "tokens_to_generate": base["tokens_to_generate"], "template": base["template"] + base["answer_prefix"],
    }  # fmt: skip
    script = _run(data / "synthetic" / f"{kind}.py", common | arguments)
    sampler = _SAMPLERS[kind](script, length, count_tokens, wheels)
    least = 1 if arguments.get("dataset") == "squad" else _LEAST[kind]
    return Task(name, base["tokens_to_generate"], least, base["answer_prefix"].split("{")[0], sampler, f"{name}-{length}")


def _unpacked(wheels: Path | None) -> Path:
    """The wheel's folder of generators and data, beside the wheel: the scripts open their data as files."""
    wheel = ruler_wheel(wheels)
    folder = wheel.parent / RULER
    if not folder.exists():
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.startswith(("long_context_eval/data/", "long_context_eval/synthetic"))]
            archive.extractall(folder.with_suffix(".part"), members)
        folder.with_suffix(".part").rename(folder)
    return folder / "long_context_eval" / "data"


def _run(path: Path, arguments: dict[str, Any]) -> Script:
    """Run a generator's module level as the script it is, without its main. Returns its globals."""
    stand_ins = {
        "wonderwords": {"random_word": _module("random_word", _get_words_from_text_file=lambda name: [name])},
        "nltk": {},
        "nltk.tokenize": {"sent_tokenize": _sentences},
        "tokenizer": {"select_tokenizer": lambda *_: _Tokens()},
        "long_context_eval": {},
        "long_context_eval.data": {},
        "long_context_eval.data.tokenizer": {"select_tokenizer": lambda *_: _Tokens()},
        "long_context_eval.pred": {},
        "long_context_eval.pred.nemo_utils": {"write_manifest": None},
    }
    modules = {name: _module(name, **content) for name, content in stand_ins.items()}
    modules["constants"] = _module("constants", **runpy.run_path(str(path.with_name("constants.py"))))
    argv = [str(path), *(f"--{name}={value}" for name, value in arguments.items())]
    with patch.dict(sys.modules, modules), patch.object(sys, "argv", argv), patch.object(sys, "path", list(sys.path)):
        script = runpy.run_path(str(path), run_name="ruler")
    return script["generate_input_output"].__globals__


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


class _Tokens:
    """Stands for the tokenizer where a generator would shorten a sample; we fit samples ourselves."""

    def text_to_tokens(self, text: str) -> list[str]:
        return []


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def _needles(script: Script, _length: int, _count: Callable[[str], int], wheels: Path | None) -> Sampler:
    with zipfile.ZipFile(data_wheel(WORDS, wheels)) as wheel:
        adjectives, nouns = (wheel.read(f"wonderwords/assets/{kind}list.txt").decode().split() for kind in ("adjective", "noun"))
    script["generate_random_word"] = lambda: f"{random.choice(adjectives)}-{random.choice(nouns)}"
    return lambda size, _index: script["generate_input_output"](size)


def _variables(script: Script, _length: int, count_tokens: Callable[[str], int], _wheels: Path | None) -> Sampler:
    chains, hops = script["args"].num_chains, script["args"].num_hops

    def generate(noises: int, is_icl: bool = False) -> tuple[str, list[str]]:
        while True:
            try:
                return script["generate_input_output"](noises, chains, hops, is_icl=is_icl)
            except IndexError:  # two variables were given one name, which RULER does not survive: draw again
                continue

    def example() -> str:
        """RULER's one solved example, of at most 500 tokens, its names and numbers drawn anew."""
        for noises in range(40, 0, -1):
            text, answers = generate(noises, is_icl=True)
            solved = f"{text} {' '.join(answers)}\n\n"
            if count_tokens(solved) <= _FEW_SHOT_TOKENS:
                break
        return solved

    def sample(size: int, _index: int) -> tuple[str, list[str]]:
        solved = example()
        text, answers = generate(size)
        return f"{solved}\n\n{text}", answers

    return sample


def _frequent_words(script: Script, length: int, _count: Callable[[str], int], _wheels: Path | None) -> Sampler:
    args = script["args"]
    return lambda size, _index: script["generate_input_output"](_UNLIMITED, size, args.coded_wordlen, length // 50, 1, args.alpha)[:2]


def _questions(script: Script, _length: int, _count: Callable[[str], int], _wheels: Path | None) -> Sampler:
    return lambda size, index: script["generate_input_output"](index, size)


_SAMPLERS: dict[str, Callable[[Script, int, Callable[[str], int], Path | None], Sampler]] = {
    "niah": _needles,
    "variable_tracking": _variables,
    "freq_words_extraction": _frequent_words,
    "qa": _questions,
}
