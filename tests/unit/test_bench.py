"""`vllm-santa bench`: what it runs, and what it says where it cannot."""

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from vllm_santa import bench, tune
from vllm_santa.bench import machine, programs
from vllm_santa.bench.cli import Part, program
from vllm_santa.cli import app
from vllm_santa.doctor.finding import error, ok
from vllm_santa.doctor.gpus import DriverError, Gpu
from vllm_santa.tune.shape import ModelShape

GPU = Gpu("NVIDIA H200", (9, 0), "580.1", 143771)


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_gpus", list)
    monkeypatch.setattr(bench.cli, "run_program", lambda *_: pytest.fail("nothing must run"))
    done = run("bench")
    assert done.exit_code == 1 and "GPU: none" in done.output and "cure: Run it on a machine with an NVIDIA GPU" in done.output


def test_a_driver_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> list[Gpu]:
        raise DriverError("it does not answer")

    monkeypatch.setattr(machine, "find_gpus", fails)
    assert [finding.found for finding in machine.missing()] == ["it does not answer"]


@pytest.mark.parametrize("vllm", [True, False])
def test_only_what_the_part_needs_must_be_there(monkeypatch: pytest.MonkeyPatch, vllm: bool) -> None:
    monkeypatch.setattr(machine, "find_gpus", lambda: [GPU])
    monkeypatch.setattr(machine, "check_torch", lambda _: (ok("torch", "2"), "13.0"))
    monkeypatch.setattr(machine, "check_flashinfer", lambda _: error("FlashInfer", "not installed", "install it"))
    monkeypatch.setattr(machine, "check_vllm", lambda _: error("vLLM", "not installed", "install it"))
    assert [finding.check for finding in machine.missing(vllm)] == ["FlashInfer"] + ["vLLM"] * vllm


def test_parts_run_in_order_and_failures_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[tuple[str, list[str]]] = []

    def runs(name: str, arguments: list[str]) -> int:
        ran.append((name, arguments))
        return int(name == "kernels.ssa")

    monkeypatch.setattr(bench.cli, "missing", lambda vllm: [])
    monkeypatch.setattr(bench.cli, "run_program", runs)
    done = run("bench", "--quick", "--results", tmp_path)
    assert done.exit_code == 1 and "failed: ssa" in done.output
    assert [name for name, _ in ran] == ["kernels.santa", "kernels.ssa", "e2e"]
    assert all("--results" in arguments for _, arguments in ran)
    ran.clear()
    done = run("bench", "--only", "e2e", "--only", "santa", "--model", "folder", "--results", tmp_path)
    assert done.exit_code == 0 and f"results in {tmp_path}" in done.output
    assert [name for name, _ in ran] == ["kernels.santa", "e2e"] and "--quick" not in ran[0][1] and "folder" in ran[1][1]


@pytest.mark.parametrize("part", Part)
def test_the_programs_take_these_arguments(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, part: Part
) -> None:
    """Each is started as `bench` would from any folder, with one option too many: that one is all it complains of."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    name, arguments = program(part, True, tmp_path if part is Part.e2e else None, tmp_path)
    assert programs.run_program(name, [*arguments, "--none-such"]) == 2
    said = capfd.readouterr().err
    assert "unrecognized arguments: --none-such\n" in said or "No such option: --none-such" in said, said


def test_the_measuring_of_tune_takes_its_arguments(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune.cli, "run_program", lambda name, arguments: programs.run_program(name, [*arguments, "--none-such"]))
    with pytest.raises(typer.Exit):
        tune.cli._measure(ModelShape(32, 8, 128), [4096, 8192], [1, 8], ["pps 512", "ssa 2%"])
    assert "unrecognized arguments: --none-such\n" in capfd.readouterr().err


def test_benchmarks_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(programs, "PACKAGE", tmp_path / "site" / "vllm_santa")
    with pytest.raises(FileNotFoundError, match="the benchmarks are missing"):
        programs.run_program("e2e", [])


def test_installed_benchmarks_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "vllm_santa"
    (package / "benchmarks").mkdir(parents=True)
    monkeypatch.setattr(programs, "PACKAGE", package)
    commands: list[list[str]] = []
    monkeypatch.setattr(programs.subprocess, "run", lambda command, env: commands.append(command) or type("Done", (), {"returncode": 4}))
    assert programs.run_program("kernels.ssa", ["--quick"]) == 4
    assert commands == [[sys.executable, "-m", "vllm_santa.benchmarks.kernels.ssa", "--quick"]]
