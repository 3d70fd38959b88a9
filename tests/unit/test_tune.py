"""From recorded times to break-even points, rules, a file and a picture; without a GPU."""

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_santa import bench, tune
from vllm_santa.cli import app
from vllm_santa.policy import RowContext
from vllm_santa.policy.file import parse_policy, read_policy
from vllm_santa.tune import rules
from vllm_santa.tune.break_even import Curve, Span, chosen, spans
from vllm_santa.tune.shape import ModelShape
from vllm_santa.tune.times import Times, parse_plan, read_times

EXAMPLES = Path(__file__).parents[2] / "examples" / "tuned"
CONTEXTS = [2048, 8192, 32768, 131072]


def times_of(model: dict[str, tuple[float, float]], batches: tuple[int, ...] = (1, 8), contexts: list[int] = CONTEXTS) -> Times:
    """Times that are a fixed part and a part for each token of the batch: by plan, in µs and µs per 1,024 tokens."""
    points = [
        {
            "context": context,
            "batch": batch,
            "microseconds": {plan: fixed + each * batch * context / 1024 for plan, (fixed, each) in model.items()},
        }
        for batch in batches
        for context in contexts
    ]
    plans = [plan for plan in model if plan != "dense"]
    return Times.model_validate(
        {"shape": "32/8/128", "dtype": "bfloat16", "gpu": "a GPU", "versions": {"torch": "2"}, "date": "2026-01-01", "plans": plans,
         "points": points}
    )  # fmt: skip


MODEL = {"dense": (5.0, 1.0), "pps 512": (13.0, 0.5), "ssa 2%": (40.0, 0.1)}
"""pps passes dense at 16 K tokens of the batch, and ssa passes pps at 68 K."""


@pytest.mark.parametrize(
    ("speeds", "margin", "plan"),
    [
        ({"a": 1.0, "b": 1.0}, 0, "dense"),
        ({"a": 1.04, "b": 1.0}, 0.05, "dense"),
        ({"a": 1.06, "b": 1.1}, 0.05, "a"),
        ({"a": 1.06, "b": 1.12}, 0.05, "b"),
        ({"a": 1.0, "b": 1.06}, 0.05, "b"),
        ({"a": 2.0, "b": 1.9}, 0, "a"),
    ],
)
def test_what_is_less_exact_must_be_faster_by_the_margin(speeds: dict[str, float], margin: float, plan: str) -> None:
    assert chosen(speeds, margin) == plan


def test_break_even_points_of_known_speeds() -> None:
    """Speeds that are powers of the context, for which the interpolation is exact: a passes dense at 4,000, b passes a at 16,000."""
    contexts = [1000, 8000, 64000]
    speeds = {
        "a": [(context / 4000) ** 0.5 for context in contexts],
        "b": [(context / 4000) ** 0.5 * (context / 16000) for context in contexts],
    }
    found = spans(Curve(contexts, speeds), 0.0)
    assert [span.plan for span in found] == ["dense", "a", "b"]
    assert found[1].start == pytest.approx(4000, abs=1) and found[2].start == pytest.approx(16000, abs=1)
    later = spans(Curve(contexts, speeds), 0.1)  # a must gain 10 %, b another 10 %
    assert later[1].start == pytest.approx(4000 * 1.1**2, abs=1) and later[2].start == pytest.approx(16000 * 1.1, abs=1)


def test_edges_of_what_was_measured() -> None:
    assert spans(Curve([1000], {"a": [2.0]}), 0.05) == [Span(0, "dense"), Span(1000, "a")], "nothing is known below"
    assert spans(Curve([1000, 2000], {"a": [0.5, 0.6]}), 0.05) == [Span(0, "dense")]
    gone = spans(Curve([1000, 4000, 16000], {"a": [0.5, 2.0, 0.5]}), 0.0)
    assert [span.plan for span in gone] == ["dense", "a", "dense"] and gone[1].start == 2000 and gone[2].start == 8000


speed = st.floats(0.1, 20)


@settings(deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.sampled_from([0.0, 0.05, 0.3]))
def test_spans_are_the_choice_at_every_context(data: st.DataObject, count: int, plans: int, margin: float) -> None:
    """Against a plain search along the interpolated speeds, away from the break-even points themselves."""
    contexts = sorted(data.draw(st.lists(st.integers(256, 10**6), min_size=count, max_size=count, unique=True)))
    speeds = {f"plan{i}": data.draw(st.lists(speed, min_size=count, max_size=count)) for i in range(plans)}
    found = spans(Curve(contexts, speeds), margin)
    assert found[0] == Span(0, "dense") and all(one.start <= two.start and one.plan != two.plan for one, two in pairwise(found))
    for i, (left, right) in enumerate(pairwise(contexts)):
        for step in range(1, 20):
            part = step / 20
            context = left * (right / left) ** part
            at = {plan: values[i] ** (1 - part) * values[i + 1] ** part for plan, values in speeds.items()}
            ratios = [one / other for one in (1.0, *at.values()) for other in (1.0, *at.values())]
            if any(abs(math.log(ratio / (1 + margin))) < 1e-6 for ratio in ratios) or any(abs(span.start - context) < 2 for span in found):
                continue
            assert [span.plan for span in found if span.start <= context][-1] == chosen(at, margin), context
    if count > 1 and not any(abs(span.start - contexts[-1]) < 2 for span in found):
        assert found[-1].plan == chosen({plan: values[-1] for plan, values in speeds.items()}, margin)


@pytest.mark.parametrize("by_batch", [True, False])
def test_the_policy_decides_what_was_measured_fastest(by_batch: bool) -> None:
    times = times_of(MODEL)
    policy = parse_policy(rules.policy_text(times, 0.05, by_batch), "p")
    slowest = rules.slowest_curve(times)
    for point in times.points:
        speeds = {plan: point.speed(plan) for plan in times.plans}
        if not by_batch:
            speeds = {plan: values[slowest.contexts.index(point.context)] for plan, values in slowest.speeds.items()}
        decision = policy.decide(RowContext(point.context, batch=point.batch))
        plan = chosen(speeds, 0.05)
        assert decision.method.name == plan.split()[0], point
        if plan != "dense":
            assert decision.budget == parse_plan(plan)[1].rows(point.context)
    methods = {policy.decide(RowContext(context, batch=batch)).method.name for context in CONTEXTS for batch in (1, 5, 8, 200)}
    assert methods == {"dense", "pps", "ssa"}


def test_batches_between_measured_ones_follow_the_smaller() -> None:
    policy = parse_policy(rules.policy_text(times_of(MODEL), 0.05, True), "p")
    for context in range(256, 140_000, 997):
        rows = {batch: policy.decide(RowContext(context, batch=batch)).method for batch in (1, 7, 8, 100)}
        assert rows[1] == rows[7] and rows[8] == rows[100]


def test_where_dense_is_fastest_again() -> None:
    """A rule has to say it, as does one for the larger of two batches that gains nothing."""
    times = times_of({"dense": (1.0, 1.0), "pps 512": (0.5, 1.0)}, batches=(1,))
    for point, dense in zip(times.points, (1, 3, 1, 1), strict=True):
        point.microseconds.update({"dense": dense, "pps 512": 1.5})
    policy = parse_policy(rules.policy_text(times, 0.05, True), "p")
    assert [policy.decide(RowContext(context)).method.name for context in CONTEXTS] == ["dense", "pps", "dense", "dense"]
    both = times.model_copy(update={"points": times.points + [p.model_copy(update={"batch": 4}) for p in times_of(MODEL, (1,)).points]})
    policy = parse_policy(rules.policy_text(both.model_copy(update={"points": _slow(both)}), 0.05, True), "p")
    assert policy.decide(RowContext(8192, batch=1)).method.name == "pps" and policy.decide(RowContext(8192, batch=4)).method.name == "dense"


def _slow(times: Times) -> list:
    """The same, where batch 4 gains nothing."""
    slow = {"dense": 1.0, "pps 512": 2.0}
    return [point if point.batch == 1 else point.model_copy(update={"microseconds": slow}) for point in times.points]


def test_nothing_faster() -> None:
    text = rules.policy_text(times_of({"dense": (1.0, 1.0), "pps 512": (2.0, 2.0)}), 0.05, True)
    assert parse_policy(text, "p").rules == ()


def test_the_figures_are_in_the_comments() -> None:
    text = rules.policy_text(times_of(MODEL), 0.05, True)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert max(map(len, comments)) <= 150
    row = next(line for line in comments if line.split()[1:3] == ["8", "32,768"])
    assert row.split()[3:] == ["261.0", "141.0", "1.85x", "65.6", "3.98x"]


def test_the_example_follows_from_its_times() -> None:
    example = EXAMPLES / "h200-32-8-128.yaml"
    assert example.read_text() == rules.policy_text(read_times(example.with_suffix(".json")), 0.05, True)
    assert read_policy(example).decide(RowContext(65536, batch=4)).method.name == "ssa"


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("32/8/128", ModelShape(32, 8, 128)),
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}, ModelShape(9, 3, 64)),
        ({"num_attention_heads": 8, "head_dim": 128, "hidden_size": 8, "torch_dtype": "float16"}, ModelShape(8, 8, 128, "float16")),
        ({"text_config": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "dtype": "float32"}}, ModelShape(4, 1, 256)),
    ],
)
def test_shapes(tmp_path: Path, text: str | dict, shape: ModelShape) -> None:
    if isinstance(text, dict):
        (tmp_path / "config.json").write_text(json.dumps(text))
        assert ModelShape.parse(str(tmp_path)) == shape
        text = str(tmp_path / "config.json")
    assert ModelShape.parse(text) == shape


@pytest.mark.parametrize(
    ("text", "words"),
    [("32/8", "'32/8' is not a shape"), ("nowhere", "is not a shape"), ("32/0/128", "query heads for"), ("30/8/128", "query heads for"),
     ("64/2/128", "1 to 16"), ("32/8/96", "allowed: 64, 128, 256"), ("{}", "not the configuration"), ("[]", "not the configuration"),
     ("{", "not the configuration")],
)  # fmt: skip
def test_shapes_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    if text[0] in "{[":
        (tmp_path / "config.json").write_text(text)
        text = str(tmp_path)
    with pytest.raises(ValueError, match=words):
        ModelShape.parse(text)


@pytest.mark.parametrize("text", ["dense", "dense 4", "pps", "pps x", "psp 512", "", "ssa 2% 3"])
def test_plans_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="allowed|methods"):
        parse_plan(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"plans": []}, "plans"), ({"plans": ["pps 512"]}, "times of"), ({"points": []}, "points"), ({"more": 1}, "more"),
     ({"points": [{"context": 1, "batch": 1, "microseconds": {"pps 512": 1.0}}]}, "dense is missing"),
     ({"points": [{"context": 1, "batch": 1, "microseconds": {"dense": 0.0}}]}, "greater than 0")],
)  # fmt: skip
def test_damaged_times(tmp_path: Path, change: dict, words: str) -> None:
    file = tmp_path / "times.json"
    file.write_text(json.dumps(json.loads(times_of(MODEL).model_dump_json()) | change))
    with pytest.raises(ValueError, match=f"times.json: .*{words}"):
        read_times(file)


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_with_times(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "old.json").write_text(times_of(MODEL).model_dump_json())
    out = tmp_path / "tuned.yaml"
    done = run("tune", "32/8/128", "--times", tmp_path / "old.json", "--out", out)
    assert done.exit_code == 0, done.output
    assert {rule.method.name for rule in read_policy(out).rules} == {"pps", "ssa", "dense"}
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert read_times(out.with_suffix(".json")) == times_of(MODEL)
    fixed = run("tune", "32/8/128", "--times", tmp_path / "old.json", "--out", out, "--any-batch")
    assert fixed.exit_code == 0 and "batch" not in out.read_text().split("rules:")[1]


def test_the_command_refuses(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(times_of(MODEL).model_dump_json())
    for arguments, words in (
        (("16/4/128", "--times", tmp_path / "old.json"), "measured for 32/8/128"),
        (("32/8/128", "--times", tmp_path / "none.json"), "No such file"),
        (("32/8/100",), "head_dim is 100"),
        (("32/8/128", "--plan", "dense"), "not a sparse method"),
    ):
        done = run("tune", *arguments, "--out", tmp_path / "no.yaml")
        assert done.exit_code == 1 and words in done.output, done.output
    assert not (tmp_path / "no.yaml").exists()


def test_measuring_runs_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measured(program: str, arguments: list[str]) -> int:
        asked.extend([program, *arguments])
        Path(arguments[arguments.index("--output") + 1]).write_text(times_of(MODEL).model_dump_json())
        return 0

    monkeypatch.setattr(tune.cli, "missing", list)
    monkeypatch.setattr(tune.cli, "run_program", measured)
    done = run("tune", "32/8/128", "--context", 4096, "--batch", 2, "--plan", "ssa 2%", "--out", tmp_path / "p.yaml")
    assert done.exit_code == 0 and (tmp_path / "p.yaml").exists()
    assert asked[:5] == ["kernels.tune", "--shape", "32/8/128", "--dtype", "bfloat16"]
    assert asked[7:] == ["--context", "4096", "--batch", "2", "--plan", "ssa 2%"]
    monkeypatch.setattr(tune.cli, "run_program", lambda *_: 3)
    assert run("tune", "32/8/128", "--out", tmp_path / "q.yaml").exit_code == 1
    assert not (tmp_path / "q.yaml").exists()


def test_what_the_benchmark_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program as a whole, with clocks and kernels that are not there replaced: 100 µs for FlashInfer's better kernel, 1 µs for every
    8 tokens of a budget."""
    torch = pytest.importorskip("torch")
    from benchmarks.kernels import tune as program

    def inputs(case, *_: object) -> SimpleNamespace:
        rows = SimpleNamespace(method=torch.zeros(case.batch, dtype=torch.int8), budget=torch.zeros(case.batch, dtype=torch.int32))
        return SimpleNamespace(query=torch.zeros(case.batch, case.query_heads, case.head_dim), rows=rows)

    made: list[tuple[str, int]] = []

    def decoder(case, method, rows: int, output):
        assert output.shape == (case.batch, 32, 128)
        made.append((method.name, rows))
        return lambda one: lambda: float(one.rows.budget[0]) / 8 + int(one.rows.method[0] != method)

    monkeypatch.setattr(program, "fits", lambda case: case.batch * case.context <= 2**16)
    monkeypatch.setattr(program, "make_inputs", inputs)
    monkeypatch.setattr(program, "flashinfer_decode", lambda case, one, output, cores: lambda: 100.0 + cores)
    monkeypatch.setattr(program, "decoder", decoder)
    monkeypatch.setattr(program, "time_us", lambda calls: max(call() for call in calls))
    monkeypatch.setattr(program, "versions", lambda: {"gpu": "a GPU", "torch": "2"})
    arguments = ["--context", "8192", "--context", "32768", "--batch", "1", "--batch", "4", "--plan", "pps 512", "--plan", "ssa 2%"]
    monkeypatch.setattr(sys, "argv", ["tune", "--shape", "32/8/128", *arguments, "--output", str(tmp_path / "times.json")])
    program.main()
    times = read_times(tmp_path / "times.json")
    assert [(point.batch, point.context) for point in times.points] == [(1, 8192), (1, 32768), (4, 8192)], "one does not fit"
    assert times.points[1].microseconds == {"dense": 100.0, "pps 512": 64.0, "ssa 2%": 82.0}
    assert made[:2] == [("pps", 512), ("ssa", 164)] and (times.gpu, times.versions) == ("a GPU", {"torch": "2"})


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.machine, "find_gpus", list)
    done = run("tune", "32/8/128", "--out", tmp_path / "p.yaml")
    assert done.exit_code == 1 and "GPU: none" in done.output and "cure:" in done.output
    assert not list(tmp_path.iterdir())
