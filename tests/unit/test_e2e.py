"""What the end-to-end benchmark asks for and reports; the engines themselves need a GPU."""

import json
from pathlib import Path

import pytest
import typer

from benchmarks.e2e import LLAMA_8B, Case, Run, Shape, rows_of
from benchmarks.engine import EngineSpec
from vllm_santa.methods import Method
from vllm_santa.policy.budget import Budget


@pytest.fixture
def shape(tmp_path: Path) -> Shape:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return Shape.of(tmp_path)


def test_cases() -> None:
    case = Case.parse("300x4")
    assert case == Case(300, 4)
    prompts = case.prompts()
    assert [len(prompt) for prompt in prompts] == [300] * 4 and prompts == case.prompts()
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 4, "no two share a block"
    for text in ("300", "x4", "300x", "a x b"):
        with pytest.raises(typer.BadParameter, match="is not a case; allowed"):
            Case.parse(text)


def test_runs() -> None:
    assert Run.parse("FLASHINFER") == Run("FLASHINFER") and Run.parse("FLASHINFER").santa == {}
    pps = Run.parse("santa pps 512")
    assert (pps.method, pps.budget, pps.name) == (Method.pps, Budget(512), "santa pps 512")
    assert pps.santa == {"santa_method": "pps", "santa_budget": "512"}
    assert Run.parse("santa dense").santa == {"santa_method": "dense"}
    assert Run.parse("santa ssa 2%").budget == Budget.parse("2%")


def test_bytes_are_those_of_the_model(shape: Shape) -> None:
    assert shape.weight_bytes == pytest.approx(2 * 7.5e9, rel=0.01)  # Llama-3.1-8B without its input embedding
    case = Case(10_000, 3)
    dense = shape.bytes_read(case, Run("FLASHINFER")) - shape.weight_bytes
    assert dense == 32 * 8 * 3 * 10_000 * 128 * 2 * 2
    pps = shape.bytes_read(case, Run.parse("santa pps 500")) - shape.weight_bytes
    assert pps == 32 * 8 * 3 * (10_000 + 500) * 256
    ssa = shape.bytes_read(case, Run.parse("santa ssa 2%")) - shape.weight_bytes
    assert ssa == 32 * 8 * 3 * (10_000 * 16 + (200 + 256) * 512)


def test_rows_compare_medians_with_flashinfer(shape: Shape) -> None:
    pps = Run.parse("santa pps 512")
    rows = rows_of(Case(1000, 2), {Run("FLASHINFER"): (1.5, [100.0, 120.0, 90.0]), pps: (None, [50.0, 52.0, 49.0])}, shape, 4e12)
    assert [(row.method, row.time_us, row.speedup) for row in rows] == [("FLASHINFER", 100.0, 1.0), ("santa pps 512", 50.0, 2.0)]
    assert rows[0].prefill_s == 1.5 and rows[1].tokens_per_second == pytest.approx(2 / 50e-6)


def test_engine_arguments(tmp_path: Path) -> None:
    plain = EngineSpec("santa", tmp_path, 0.5, 4096, 6).arguments()
    assert plain["load_format"] == "dummy" and "kv_transfer_config" not in plain
    assert plain["compilation_config"] == {"cudagraph_capture_sizes": [1, 2, 4, 6]}
    (tmp_path / "model.safetensors").touch()
    filled = EngineSpec("FLASH_ATTN", tmp_path, 0.5, 4096, 8, filled=True, options={"dtype": "float16"}).arguments()
    assert "load_format" not in filled and filled["dtype"] == "float16"
    assert filled["kv_transfer_config"]["kv_connector"] == "DecodeBenchConnector"
