"""The attention-error study: its measure, its summary, its tables and pictures."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from benchmarks.quality.error import RESULTS, summary  # noqa: E402
from benchmarks.quality.estimates import DRAWS, FRACTIONS, Measured, Problem, measure  # noqa: E402
from benchmarks.quality.report import (  # noqa: E402
    SELECTIONS,
    VALUE_METHODS,
    Study,
    bernoulli_table,
    codebook_table,
    comparison_table,
    draw_selections,
    draw_value_methods,
    draws_table,
    drift_table,
    load,
    selection_table,
)


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, float], Measured]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 16, generator=generator) * 2
    key, value = torch.randn(2, 2, 600, 16, generator=generator)
    scores = query @ key.mT / 4
    problem = Problem(query, key, value, 0.25, scores + 0.3 * torch.randn(scores.shape, generator=generator), layer=1, position=599)
    return {(result.method, result.budget): result for result in measure(problem, repeats=3)}


def test_every_method_is_measured_at_every_budget(results: dict[tuple[str, float], Measured]) -> None:
    for method in VALUE_METHODS[:-1]:
        assert all((method, budget) in results for budget in DRAWS)
    for method in ("pps", *SELECTIONS):
        assert all((method, budget) in results for budget in FRACTIONS)
    assert all(result.errors.isfinite().all() and result.rows > 0 for result in results.values())
    assert results["topk", 0.01].errors.shape == (6,) and results["ssa", 0.01].errors.shape == (18,)


def test_error_falls_with_the_budget(results: dict[tuple[str, float], Measured]) -> None:
    for method in ("pps", *SELECTIONS):
        assert results[method, 0.2].errors.mean() < results[method, 0.005].errors.mean()
    for method in VALUE_METHODS[:-1]:
        assert results[method, 2048].errors.mean() < results[method, 16].errors.mean() / 4


def test_equal_rows_are_read(results: dict[tuple[str, float], Measured]) -> None:
    for method in SELECTIONS:
        assert results[method, 0.02].rows - 256 <= 0.02 * 600 + 1
    assert results["pps", 0.02].rows == pytest.approx(12, abs=1)


def test_exact_scores_are_the_better_proxy(results: dict[tuple[str, float], Measured]) -> None:
    assert results["oracle_topk", 0.1].errors.mean() <= results["topk", 0.1].errors.mean()


def test_summary() -> None:
    results = [
        Measured("pps", 0.1, rows, torch.arange(start, start + 50.0), (0.5, share)) for rows, start, share in ((4, 1, 0.6), (8, 51, 0.8))
    ]
    assert summary(results) == {
        "method": "pps",
        "budget": 0.1,
        "value_rows": 6.0,
        "mean": 50.5,
        "p95": 95.0,
        "key_features_per_head": 0.5,
        "key_features_per_group": 0.7,
        "errors": 100,
    }


def test_codebook_tables() -> None:
    def row(table: str, setting: str, subspaces: int | None, score: float) -> dict[str, object]:
        errors = {"0.01": 2 * score, "0.02": score}
        return {"table": table, "setting": setting, "subspaces": subspaces, "score_error": score, "output_error": errors}

    places = ("positions from 0", "positions from 512")
    rows = [row("transform", "exact", None, 0.0), row("transform", "plain", 8, 0.5), row("training text", "french", 16, 0.75)]
    rows += [row(place, setting, 16, score) for setting, score in (("as it is", 0.25), ("spread", 0.125)) for place in places]
    study = {"rows": rows}
    assert codebook_table("tiny, 4,096 tokens", study).splitlines() == [
        "| tiny, 4,096 tokens | bytes a key | score error, nats | 1% | 2% |", "|---|---|---|---|---|",
        "| exact | – | 0.00 | 0.000 | 0.000 |", "| plain | 8 | 0.50 | 1.000 | 0.500 |", "| trained on french | 16 | 0.75 | 1.500 | 0.750 |",
    ]  # fmt: skip
    assert drift_table("tiny", study).splitlines() == [
        "| tiny, codebook from | positions from 0 | positions from 512 |", "|---|---|---|",
        "| as it is | 0.250 (0.25) | 0.250 (0.25) |", "| spread | 0.125 (0.12) | 0.125 (0.12) |",
    ]  # fmt: skip


def test_tables_and_pictures(results: dict[tuple[str, float], Measured], tmp_path: Path) -> None:
    rows = [summary([result]) for result in results.values()]
    study = Study({"model": "tiny-1b", "context": 600, "codebook_text": "other-essays", "rows": rows})
    table = selection_table(study)
    ssa = next(row for row in rows if row["method"] == "ssa" and row["budget"] == 0.02)
    assert f"{ssa['mean']:.3f} / {ssa['p95']:.2f}" in table and "| 2.0% |" in table and "tiny-1b, 600 tokens" in table
    assert len(draws_table(study).splitlines()) == 6 and len(bernoulli_table(study).splitlines()) == 10
    oracle = next(row for row in rows if row["method"] == "oracle_topk" and row["budget"] == 0.02)
    last = next(line for line in comparison_table([study]).splitlines() if line.startswith("| ssa against oracle_topk | "))
    assert f"{ssa['mean'] / oracle['mean'] - 1:+.0%} |".replace("-", "−") in last
    draw_value_methods([study] * 6, tmp_path / "values.png")
    draw_selections([study], tmp_path / "selections.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("values.png", "selections.png"))


def test_the_studies_that_are_kept_are_read() -> None:
    """Nothing else may go by their name."""
    studies = load(RESULTS)
    assert len({study.title for study in studies}) == len(studies) >= 9
    for study in studies:
        assert selection_table(study) and draws_table(study)
