"""RULER over HTTP: its samples at the right length, scores, intervals, and runs that go on where they stopped."""

import gzip
import json
import random
import re
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.models import ModelError
from benchmarks.quality.ruler import __main__ as ruler_main
from benchmarks.quality.ruler import asking
from benchmarks.quality.ruler import tasks as ruler_tasks
from benchmarks.quality.ruler.__main__ import app
from benchmarks.quality.ruler.answers import Answer, AnswerFile, read_answers
from benchmarks.quality.ruler.asking import ask_all, seed_of
from benchmarks.quality.ruler.configurations import CONFIGURATIONS, needs_codes
from benchmarks.quality.ruler.prompts import Prompt, Renderer, make_prompts, read_prompts, write_prompts
from benchmarks.quality.ruler.report import AVERAGE, scores_of, table
from benchmarks.quality.ruler.scoring import interval, paired_differences, score
from benchmarks.quality.ruler.server import ServerError, check_rows
from benchmarks.quality.ruler.tasks import TASKS, load_task
from benchmarks.quality.texts import data_wheel, ruler_wheel
from vllm_santa.policy import load_policy
from vllm_santa.policy.parameters import parse

# Samples


class Words:
    """A tokenizer of words and marks, with a chat template or without."""

    def __init__(self, chat: bool = True):
        self.chat_template = "a template" if chat else None

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> Any:
        return SimpleNamespace(input_ids=[0] * add_special_tokens + re.findall(r"\w+|[^\w\s]", text))

    def apply_chat_template(self, turns: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"<{turn['role']}>{turn['content']}</{turn['role']}>" for turn in turns) + "<assistant>\n"


@pytest.fixture(scope="module")
def wheels() -> None:
    try:
        ruler_wheel()
        data_wheel(ruler_tasks.WORDS)
    except ModelError as error:
        pytest.skip(f"RULER's package is not at hand: {error}")


ALL_TASKS = (*TASKS, "niah_single_1", "niah_multikey_3", "niah_multivalue", "niah_multiquery")


CLASH = 1212
"""A sample of vt at 2,500 tokens whose solved example gets two variables of one name, of which RULER makes an IndexError."""


@pytest.fixture(scope="module")
def prompts(wheels: None) -> dict[tuple[str, int], Prompt]:
    made = make_prompts(Renderer(Words()), ALL_TASKS, [2500], 3)
    return {(prompt.task, prompt.index): prompt for prompt in made}


@pytest.mark.parametrize("task", ALL_TASKS)
def test_prompts_fill_the_length_and_leave_room_for_the_answer(prompts: dict[tuple[str, int], Prompt], task: str) -> None:
    for index in range(3):
        prompt = prompts[task, index]
        assert prompt.tokens == len(Words()(prompt.text, False, False).input_ids)
        assert 0.8 * 2500 < prompt.tokens + prompt.max_tokens <= 2500


@pytest.mark.parametrize("task", ALL_TASKS)
def test_the_answer_is_in_the_prompt(prompts: dict[tuple[str, int], Prompt], task: str) -> None:
    for index in range(3):
        prompt = prompts[task, index]
        question, _, begun = prompt.text.rpartition("</user><assistant>\n")
        assert question.startswith("<user>") and begun.startswith(("The special magic", "Answer:"))
        assert prompt.answers and all(answer in question or answer in ("yes", "no") for answer in prompt.answers)
        assert not any(answer in begun for answer in prompt.answers)


def test_samples_differ_and_are_the_same_every_time(prompts: dict[tuple[str, int], Prompt]) -> None:
    assert len({prompt.text for prompt in prompts.values()}) == len(prompts)
    random.seed(9)
    again = make_prompts(Renderer(Words()), ["niah_multikey_2", "vt"], [2500], 2)
    assert all(prompt == prompts[prompt.task, prompt.index] for prompt in again)


def test_frequent_words_are_the_most_frequent(prompts: dict[tuple[str, int], Prompt]) -> None:
    words = prompts["fwe", 1].text.split()
    counts = sorted({word: words.count(word) for word in words if len(word) == 6 and word.islower()}.items(), key=lambda item: -item[1])
    assert [word for word, _ in counts[:3]] == prompts["fwe", 1].answers


def test_variables_of_one_name_are_drawn_again(wheels: None) -> None:
    task = load_task("vt", 2500, Renderer(Words()).count, None)
    text, _, answers = task.sample(20, CLASH)
    assert len(set(answers)) == 5 and all(f"VAR {name} = " in text for name in answers)


def test_variable_tracking_follows_one_solved_example(prompts: dict[tuple[str, int], Prompt]) -> None:
    text = prompts["vt", 0].text
    assert text.count("Memorize and track the chain(s)") == 2
    value = re.findall(r"assigned the value (\d+)", text)[-1]
    assert f"VAR {prompts['vt', 0].answers[0]} = {value}" in text


def test_a_length_that_no_sample_fits(wheels: None) -> None:
    with pytest.raises(ValueError, match=r"^length: 500 is too short for qa_2; allowed: from \d+ tokens"):
        list(make_prompts(Renderer(Words()), ["qa_2"], [500], 1))


def test_an_unknown_task(wheels: None) -> None:
    with pytest.raises(ValueError, match=r"^task: 'niah' is not one of RULER's; allowed: niah_single_1, .*qa_2$"):
        load_task("niah", 4096, len)


def test_without_a_chat_template_the_server_adds_its_special_tokens() -> None:
    plain = Renderer(Words(chat=False))
    assert plain.render("What?", " It is") == "What? It is" and plain.count("What?") == 3
    assert Renderer(Words()).render("What?", " It is") == "<user>What?</user><assistant>\nIt is"
    assert Renderer(Words(), chat=False).render("What?", " It is") == "What? It is"


def prompt(task: str = "fwe", index: int = 0, length: int = 512) -> Prompt:
    return Prompt(task, length, index, f"text of {task} {index}", ["one", "two"], 500, 12)


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl.gz"
    write_prompts(path, "words", True, [prompt(), prompt(index=1)])
    found = read_prompts(path)
    assert (found.tokenizer, found.chat, found.prompts) == ("words", True, [prompt(), prompt(index=1)])
    write_prompts(tmp_path / "again.jsonl.gz", "words", True, [prompt(), prompt(index=1)])
    assert (tmp_path / "again.jsonl.gz").read_bytes() == path.read_bytes(), "a run knows its prompts by their hash"


def test_a_prompt_file_that_was_cut_off_has_no_name(tmp_path: Path) -> None:
    def broken() -> Any:
        yield prompt()
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_prompts(tmp_path / "prompts.jsonl.gz", "words", True, broken())
    assert not (tmp_path / "prompts.jsonl.gz").exists()


# Scores


@pytest.mark.parametrize(
    ("task", "text", "answers", "expected"),
    [
        ("vt", " ABC, DEF and xyz", ["ABC", "DEF", "XYZ", "UVW"], 75.0),
        ("niah_single_2", "it is 1234567.", ["1234567"], 100.0),
        ("niah_single_2", "it is 123456.", ["1234567"], 0.0),
        ("qa_1", "in France", ["Normandy", "France"], 100.0),
        ("qa_1", "", ["Normandy", "France"], 0.0),
        ("qa_2", "The Big\tApple", ["big\napple"], 100.0),
        ("fwe", "", ["a"], 0.0),
    ],
)
def test_scores(task: str, text: str, answers: list[str], expected: float) -> None:
    assert score(task, text, answers) == expected


def test_scores_are_rulers(wheels: None) -> None:
    import zipfile

    with zipfile.ZipFile(ruler_wheel()) as wheel:
        source = wheel.read("long_context_eval/eval/synthetic/constants.py").decode()
    theirs: dict[str, Any] = {}
    exec(source, theirs)
    generator = random.Random(0)
    for _ in range(200):
        answers = ["".join(generator.choices("aB", k=2)) for _ in range(generator.randint(1, 4))]
        text = "".join(generator.choices("AbaB .", k=6))
        assert [score("vt", text, answers)] == pytest.approx(theirs["string_match_all_per_sample"]([text.strip()], [answers]))
        assert [score("qa_1", text, answers)] == pytest.approx(theirs["string_match_part_per_sample"]([text.strip()], [answers]))


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(300):
        low, high = interval([100.0 * (generator.random(80) < 0.6)], resamples=1000)
        held += low <= 60 <= high
    assert 0.90 < held / 300 < 0.99  # 95 %, a little less for percentiles of few samples; 4 standard errors are 0.05


def test_intervals_of_averages() -> None:
    tasks = [np.tile([0.0, 100.0], 30)] * 4
    low, high = interval(tasks[:1])
    mean_low, mean_high = interval(tasks)
    assert low < mean_low < 50 < mean_high < high
    assert (high - low) / (mean_high - mean_low) == pytest.approx(2, abs=0.15)  # four tasks: half the width
    assert high - low == pytest.approx(2 * 1.96 * 50 / 60**0.5, rel=0.1)
    assert interval(tasks) == interval(tasks) and interval([[40.0] * 5]) == (40.0, 40.0)


def test_differences_are_of_the_same_samples() -> None:
    assert paired_differences({0: 50.0, 1: 0.0, 3: 10.0}, {0: 100.0, 1: 0.0, 2: 70.0}) == [-50.0, 0.0]


# Answers

RUN = {"model": "tiny", "prompts_sha256": "abc"}


def answer(name: str = "dense", task: str = "fwe", index: int = 0, text: str = "one") -> Answer:
    return Answer(name, task, 512, index, text, 7, 0.5, ["one", "two"])


def test_answers_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    AnswerFile(path, RUN).add(answer())
    again = AnswerFile(path, RUN)
    assert again.done == {answer().key: answer()}
    again.add(answer("pps-64"))
    assert read_answers(path) == (RUN, [answer(), answer("pps-64")])


def test_a_copy_that_ends_in_a_line_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    file = AnswerFile(path, RUN)
    file.add(answer(index=0))
    file.add(answer(index=1))
    path.write_bytes(path.read_bytes()[:-3])
    assert read_answers(path) == (RUN, [answer(index=0)])


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_line_that_was_cut_off_is_asked_again(tmp_path: Path, kept: int) -> None:
    """Also if it is the first line, which says what was run."""
    path = tmp_path / "answers.jsonl"
    file = AnswerFile(path, RUN)
    file.add(answer(index=0))
    file.add(answer(index=1))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:kept]) + lines[kept][:-5])
    file = AnswerFile(path, RUN)
    assert len(file.done) == max(kept - 1, 0)
    file.add(answer(index=5))
    assert len(read_answers(path)[1]) == max(kept - 1, 0) + 1


def test_the_answers_of_another_run_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    AnswerFile(path, RUN)
    with pytest.raises(ValueError, match="was begun with model 'tiny', not 'other'; allowed: another file for another run"):
        AnswerFile(path, RUN | {"model": "other"})
    path.write_text("no JSON\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl: is not a file of answers"):
        AnswerFile(path, RUN)


# Asking


class FakeServer:
    """Notes what it is asked. santa: whether it runs our backend. fails_at: the request that breaks. obeys: whether rows do as asked."""

    url, max_model_len = "http://fake", 1024

    def __init__(self, santa: bool = True, fails_at: int | None = None, obeys: bool = True, codebooks: bool = True):
        self.santa, self.fails_at, self.obeys, self.codebooks = santa, fails_at, obeys, codebooks
        self.asked: list[tuple[tuple[str, int, int], str, dict[str, Any]]] = []
        self.answered: list[int] = []
        """How many requests had come when each was answered."""
        self.rows: dict[tuple[str, str, str], float] = defaultdict(float)
        self.together = self.most_together = self.warmed_up = 0
        self._lock = threading.Lock()

    def runs_santa(self) -> bool:
        return self.santa

    def counters(self) -> dict[tuple[str, str, str], float]:
        return dict(self.rows)

    def await_codebooks(self, prompts: list[Prompt]) -> None:
        self.warmed_up += 1

    def ask(self, prompt: Prompt, name: str, parameters: dict[str, Any]) -> Answer:
        with self._lock:
            if len(self.asked) == self.fails_at:
                self.fails_at = None  # only once: whatever is asked after it shows
                raise ConnectionError("gone")
            self.asked.append((prompt.key, name, parameters))
            self.together += 1
            self.most_together = max(self.most_together, self.together)
            reason = "no_codebook" if needs_codes(name) and not self.codebooks else "request"
            if name != "dense" and self.obeys:
                self.rows["santa_rows_total", parameters["method"], reason] += 6
        time.sleep(0.002)
        with self._lock:
            self.together -= 1
            self.answered.append(len(self.asked))
        return Answer(name, *prompt.key, "one", 7, 0.1, prompt.answers)


PROMPTS = [prompt(task, index) for task in ("fwe", "vt") for index in range(3)]
NAMES = ["dense", "pps-64", "ssa-20x"]


def ask(server: FakeServer, file: AnswerFile, names: list[str] = NAMES, concurrency: int = 1, prompts: list[Prompt] = PROMPTS) -> None:
    ask_all(server, prompts, names, file, concurrency, Console(quiet=True))  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> AnswerFile:
    return AnswerFile(tmp_path / "answers.jsonl", RUN)


def test_a_prompts_first_configuration_goes_alone_and_all_others_together(file: AnswerFile) -> None:
    server = FakeServer()
    ask(server, file)
    asked = [(key, name) for key, name, _ in server.asked]
    groups = [asked[at : at + 3] for at in range(0, 18, 3)]
    assert [group[0] for group in groups] == [(prompt.key, "dense") for prompt in PROMPTS]
    assert [set(group) for group in groups] == [{(prompt.key, name) for name in NAMES} for prompt in PROMPTS]
    assert server.answered[0::3] == [1, 4, 7, 10, 13, 16], "alone"
    assert server.answered[2::3] == [3, 6, 9, 12, 15, 18] and server.most_together == 2, "the others together"
    assert len(file.done) == 18 and server.warmed_up == 1
    for key, name, parameters in server.asked:
        seed = {} if name == "dense" else {"seed": seed_of(next(prompt for prompt in PROMPTS if prompt.key == key))}
        assert parameters == CONFIGURATIONS[name] | seed
    assert len({seed_of(prompt) for prompt in PROMPTS}) == len(PROMPTS)


def test_a_run_goes_on_where_it_broke(file: AnswerFile) -> None:
    with pytest.raises(ConnectionError):
        ask(first := FakeServer(fails_at=7), file)
    assert 7 <= len(file.done) == len(first.asked) <= 8, "nothing was asked after the error but what was on its way"
    second = FakeServer()
    ask(second, file)
    assert len(first.asked) + len(second.asked) == len(file.done) == 18
    ask(third := FakeServer(), file)
    assert third.asked == []


def test_an_error_ends_all_threads(file: AnswerFile) -> None:
    server = FakeServer(fails_at=4)
    with pytest.raises(ConnectionError):
        ask(server, file, concurrency=3)
    assert 4 <= len(file.done) == len(server.asked) <= 4 + 5, "only what was on its way"


def test_prompts_are_asked_together(file: AnswerFile) -> None:
    server = FakeServer()
    ask(server, file, concurrency=3)
    assert 2 < server.most_together <= 6
    assert len(file.done) == 18


def test_a_run_that_is_cut_off_has_whole_prompts(file: AnswerFile) -> None:
    with pytest.raises(ConnectionError):
        ask(FakeServer(fails_at=12), file, concurrency=2)
    whole = [prompt for prompt in PROMPTS if all((name, *prompt.key) in file.done for name in NAMES)]
    assert len(whole) >= 2 and len(file.done) - len(whole) * len(NAMES) <= 2 * len(NAMES), "all but those on their way"


def test_no_prompt_begins_after_its_time(file: AnswerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: len(server.asked)))  # an answer takes a second
    ask_all(server, PROMPTS, NAMES, file, 1, Console(quiet=True), seconds=len(NAMES) + 0.5)  # type: ignore[arg-type]
    assert len(file.done) == 2 * len(NAMES), "two prompts began in time, and got all their answers"
    ask_all(server, PROMPTS, NAMES, file, 1, Console(quiet=True), seconds=0)  # type: ignore[arg-type]
    assert len(file.done) == len(server.asked) == 2 * len(NAMES)


def test_codebooks_are_not_awaited_where_none_are_needed(file: AnswerFile) -> None:
    server = FakeServer()
    ask(server, file, ["dense", "prop-64"])
    assert server.warmed_up == 0


def test_another_backend_answers_densely_and_refuses_the_rest(file: AnswerFile) -> None:
    server = FakeServer(santa=False)
    with pytest.raises(ServerError, match="http://fake: shows no santa metrics; pps-64, ssa-20x need --attention-backend santa"):
        ask(server, file)
    assert server.asked == []
    ask(server, file, ["dense"])
    assert all(parameters == {} for _, _, parameters in server.asked)


def test_prompts_longer_than_the_server_takes(file: AnswerFile) -> None:
    with pytest.raises(ServerError, match="prompts of 2048 tokens, and a server with max_model_len 1024"):
        ask(FakeServer(), file, prompts=[prompt(length=2048)])


def test_rows_that_did_not_do_as_asked(file: AnswerFile) -> None:
    with pytest.raises(ServerError, match="0 rows followed their request, of 72 that should have"):
        ask(FakeServer(obeys=False), file)


def test_rows_that_were_dense_for_want_of_codebooks(file: AnswerFile) -> None:
    with pytest.raises(ServerError, match=r"36 rows were dense \(no_codebook\): their answers"):
        ask(FakeServer(codebooks=False), file)


def test_rows_of_others_and_of_before_are_no_excuse() -> None:
    rows = ("santa_rows_total", "pps", "request")
    check_rows({rows: 100.0}, {rows: 150.0, ("santa_rows_total", "dense", "budget_covers_context"): 10.0}, 60)
    with pytest.raises(ServerError, match="50 rows followed their request, of 51"):
        check_rows({rows: 100.0}, {rows: 150.0, ("santa_rows_total", "dense", "no_rule"): 10.0}, 51)


def test_a_server_with_the_default_policy_takes_every_configuration() -> None:
    limits = load_policy().requests
    for parameters in CONFIGURATIONS.values():
        assert parse({f"santa_{name}": value for name, value in parameters.items()}, limits).method is not None
    named = {
        "dense",
        "prop-64",
        "prop-128",
        "prop-256",
        "prop-1024",
        "flash-256",
        "flash-2048",
        "pps-64",
        "pps-512",
        "ssa-50x",
        "ssa_fixed-10x",
    }
    assert named | {"ssa_fixed-10x", "topk-20x", "uniform_tail-50x"} <= CONFIGURATIONS.keys()


# Report


def answers() -> list[Answer]:
    """Dense: fwe 100, 100, 100, 50; qa_1 100, 0. pps-64: fwe all 50; qa_1 as dense. ssa-20x: fwe only."""
    both, one = "one two", "one"
    found = [Answer("dense", "fwe", 512, i, one if i == 3 else both, 7, 0.1, ["one", "two"]) for i in range(4)]
    found += [Answer("pps-64", "fwe", 512, i, one, 7, 0.1, ["one", "two"]) for i in range(4)]
    found += [Answer("ssa-20x", "fwe", 512, i, both, 7, 0.1, ["one", "two"]) for i in range(2)]
    for name in ("pps-64", "dense"):
        found += [Answer(name, "qa_1", 512, i, both if i == 0 else "zero", 7, 0.1, ["one", "two"]) for i in range(2)]
    return found


def test_scores_of_answers() -> None:
    scores = {(entry.configuration, entry.task): entry for entry in scores_of(answers())}
    assert list(scores) == [
        ("dense", "fwe"), ("dense", "qa_1"), ("dense", AVERAGE), ("pps-64", "fwe"), ("pps-64", "qa_1"), ("pps-64", AVERAGE),
        ("ssa-20x", "fwe"),
    ]  # fmt: skip
    assert [scores["dense", task].score for task in ("fwe", "qa_1", AVERAGE)] == [87.5, 50.0, 68.75]
    assert scores["dense", "fwe"].difference is None
    pps = scores["pps-64", "fwe"]
    assert (pps.samples, pps.score, pps.low, pps.high, pps.difference) == (4, 50.0, 50.0, 50.0, -37.5)
    assert pps.difference_low == -50.0 and -50.0 < pps.difference_high <= 0.0
    assert scores["pps-64", "qa_1"][-3:] == (0.0, 0.0, 0.0), "the same answers differ by nothing"
    assert scores["pps-64", AVERAGE].score == 50.0 and scores["pps-64", AVERAGE].difference == -18.75
    assert scores["ssa-20x", "fwe"].difference == 0.0


def test_table() -> None:
    lines = table(scores_of(answers()), 512).splitlines()
    assert lines[0] == "| 512 tokens, 2 to 4 samples a task | fwe | qa_1 | average | against dense |"
    assert lines[2].startswith("| dense | 87.5 (") and lines[2].endswith(" |  |")
    assert "50.0 (50–50) ▼" in lines[3] and "-18.8 (" in lines[3]
    assert lines[4].startswith("| ssa-20x | 100.0 (100–100) | – | – |")


def test_report_command(tmp_path: Path) -> None:
    run = {"model": "org/tiny", "tokenizer": "words", "chat": True, "vllm": "1.2", "about": "a test", "prompts_sha256": "abc"}
    file = AnswerFile(tmp_path / "answers.jsonl", run)
    for one in answers():
        file.add(one)
    result = CliRunner().invoke(app, ["report", str(tmp_path / "answers.jsonl"), "--output", str(tmp_path), "--suffix=-x"])
    assert result.exit_code == 0 and "| pps-64 | 50.0 (50–50) ▼" in result.output
    written = json.loads((tmp_path / "ruler-tiny-x.json").read_text())
    assert written["about"] == "a test" and written["versions"]["ruler"].endswith("==26.3")
    assert written["scores"][0] == scores_of(answers())[0]._asdict()


def test_ask_takes_samples_of_all_tasks_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_prompts(tmp_path / "p.jsonl.gz", "words", True, PROMPTS)
    taken: list[tuple[str, int]] = []
    monkeypatch.setattr(ruler_main, "Server", lambda *_: SimpleNamespace(model="tiny", version="1.2"))
    monkeypatch.setattr(ruler_main, "ask_all", lambda _server, prompts, *_: taken.extend((prompt.task, prompt.index) for prompt in prompts))
    result = CliRunner().invoke(app, ["ask", str(tmp_path / "p.jsonl.gz"), "--out", str(tmp_path / "a.jsonl")])
    assert result.exit_code == 0
    assert taken == [(task, index) for index in range(3) for task in ("fwe", "vt")], "a run that is cut off is balanced"


def test_ask_refuses_an_unknown_configuration(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as out:
        out.write("{}\n")
    result = CliRunner().invoke(app, ["ask", str(tmp_path / "p.jsonl.gz"), "--out", str(tmp_path / "a.jsonl"), "--configuration", "pps"])
    assert result.exit_code == 2 and "configuration: pps; allowed: dense" in " ".join(result.output.replace("│", " ").split())


def test_scripts_of_the_wheel_leave_no_trace(wheels: None) -> None:
    import sys

    modules, path, argv = set(sys.modules), list(sys.path), list(sys.argv)
    load_task("niah_single_2", 2048, len)
    assert sys.path == path and sys.argv == argv
    assert not {"wonderwords", "nltk", "tokenizer", "constants"} & (set(sys.modules) - modules)
