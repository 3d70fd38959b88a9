"""The package as users get it: an sdist, the wheel built from it, and an environment that holds the wheel and what it asks for, no more."""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
DATA = {"kernels": ("*.cu", "*.cuh"), "configs": ("*.yaml",), "benchmarks": ("*.py",), "benchmarks/kernels": ("*.py",)}
"""Folders of the source tree that the wheel carries inside vllm_santa."""


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A program that finds no package by PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, cwd=cwd, env=environment)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `python -m build --no-isolation` does, from a copy of the tree: builds leave files beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    if tracked.returncode:
        pytest.skip("not a git checkout: which files belong to the package is not known")
    for name in tracked.stdout.splitlines():
        if name.partition("/")[0] in ("vllm_santa", *DATA) or "/" not in name:
            target = folder / "tree" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    build = "from setuptools import build_meta; print(build_meta.build_sdist('../sdist'))"
    sdist = run(sys.executable, "-c", build, cwd=folder / "tree")
    assert sdist.returncode == 0, sdist.stderr
    (archive,) = (folder / "sdist").glob("*.tar.gz")
    built = run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "wheel", archive)
    assert built.returncode == 0, built.stderr
    (path,) = (folder / "wheel").glob("*.whl")
    return path


def test_contents(wheel: Path) -> None:
    """Every module and every data file, the licence, and nothing else."""
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "vllm_santa").rglob("*.py")}
    for folder, patterns in DATA.items():
        expected |= {f"vllm_santa/{folder}/{path.name}" for pattern in patterns for path in (ROOT / folder).glob(pattern)}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (licence,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert names == expected | {"vllm_santa/py.typed"}
    assert wheel.name.endswith("-py3-none-any.whl")


def closure(requirements: list[str]) -> dict[str, Distribution]:
    """The installed distributions that these need, with all that they need."""
    found: dict[str, Distribution] = {}
    pending = [Requirement(text) for text in requirements]
    while pending:
        requirement = pending.pop()
        extras = {"extra": ""}
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name not in found and (requirement.marker is None or requirement.marker.evaluate(extras)):
            found[name] = distribution(name)
            pending += map(Requirement, found[name].requires or [])
    return found


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and links to its declared dependencies: no torch, no vLLM, no network needed."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    installed = run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    (metadata,) = site.glob("vllm_santa-*.dist-info")
    for needed in closure(Distribution.at(metadata).requires or []).values():
        for part in {path.parts[0] for path in needed.files or [] if path.parts[0] not in ("..", "__pycache__")}:
            if not (site / part).exists():
                (site / part).symlink_to(str(needed.locate_file(part)))
    return python


def test_the_environment_is_bare(bare: Path) -> None:
    for package in ("torch", "vllm", "transformers", "flashinfer"):
        assert run(bare, "-c", f"import {package}", cwd=bare.parent).returncode == 1


def test_the_command_line_runs_in_a_bare_environment(bare: Path) -> None:
    command = bare.with_name("vllm-santa")
    assert "doctor" in run(command, "--help").stdout
    explained = run(command, "policy", "explain", ROOT / "configs" / "default.yaml", "--context", 20000)
    assert explained.returncode == 0 and "decision: pps" in explained.stdout


@pytest.mark.parametrize("command", [("bench",), ("tune", "32/8/128")])
def test_measuring_explains_what_it_lacks(bare: Path, command: tuple[str, ...]) -> None:
    """Without a GPU, or with one and without torch."""
    done = run(bare.with_name("vllm-santa"), *command, cwd=bare.parent)
    assert done.returncode == 1 and "cure: " in done.stderr and "Traceback" not in done.stderr


def test_benchmarks_are_found_in_the_package(bare: Path) -> None:
    """They need torch, which this environment lacks: that is all that fails."""
    code = "from vllm_santa.bench.programs import run_program; raise SystemExit(run_program('kernels.tune', ['--help']))"
    done = run(bare, "-c", code, cwd=bare.parent)
    assert done.returncode == 1 and "vllm_santa/benchmarks/kernels/tune.py" in done.stderr and "No module named 'torch'" in done.stderr


def test_doctor_explains_a_bare_environment(bare: Path) -> None:
    done = run(bare.with_name("vllm-santa"), "doctor", "--json")
    report = json.loads(done.stdout)
    levels = {finding["check"]: finding["level"] for finding in report["findings"]}
    assert (done.returncode, report["ok"], done.stderr) == (1, False, "")
    assert {name for name, level in levels.items() if level == "error"} >= {"torch", "vLLM"}
    assert {"vllm-santa", "Python", "entry points", "policy"} <= {name for name, level in levels.items() if level == "ok"}
