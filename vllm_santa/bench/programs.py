"""Finds the benchmark programs and runs them, each in a process of its own: CUDA starts and ends with it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def run_program(name: str, arguments: Sequence[str]) -> int:
    """Run a module of the benchmarks, as "kernels.ssa", on this terminal. Returns its exit status.

    Raises:
        FileNotFoundError: the benchmarks are neither in the installed package nor beside the source tree.
    """
    if (PACKAGE / "benchmarks").is_dir():
        package, environment = f"{PACKAGE.name}.benchmarks", dict(os.environ)
    elif (PACKAGE.parent / "benchmarks").is_dir():
        package = "benchmarks"
        path = filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH")))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    else:
        raise FileNotFoundError(f"the benchmarks are missing: looked for {PACKAGE / 'benchmarks'} and {PACKAGE.parent / 'benchmarks'}")
    return subprocess.run([sys.executable, "-m", f"{package}.{name}", *arguments], env=environment).returncode
