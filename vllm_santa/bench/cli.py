"""`vllm-santa bench`: the command line. Needs neither torch nor vLLM itself; the programs that it runs do."""

from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_santa.bench.machine import missing
from vllm_santa.bench.programs import run_program
from vllm_santa.doctor.finding import Finding


class Part(str, Enum):
    """The benchmarks, in the order in which they run."""

    santa = "santa"
    ssa = "ssa"
    e2e = "e2e"


RUNS = ("FLASHINFER", "santa dense", "santa pps 512", "santa ssa 2%")
CASES, QUICK_CASES = ("8192x8", "32768x8", "131072x2"), ("32768x4",)


def bench(
    only: Annotated[
        list[Part] | None, typer.Option(help="santa and ssa are kernels, e2e serves a model; repeatable. Default: all.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and cases.")] = False,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Model of e2e; default: Llama-3.1-8B's shape, random weights.")] = None,
    results: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the JSON files.")] = Path("santa-bench"),
) -> None:
    """Measure this GPU: kernels and whole decode steps against FlashInfer's dense decode. Exit status 1 if something did not run."""
    parts = [part for part in Part if part in (only or list(Part))]
    stop_if(missing(vllm=Part.e2e in parts))
    console, failed = Console(highlight=False, markup=False), []
    for part in parts:
        console.rule(part.value)
        if run_program(*program(part, quick, model, results)):
            failed.append(part.value)
    if failed:
        console.print(f"failed: {', '.join(failed)}; what they said is above", style="bold red")
        raise typer.Exit(1)
    console.print(f"results in {results}", soft_wrap=True)


def program(part: Part, quick: bool, model: Path | None, results: Path) -> tuple[str, list[str]]:
    """Name and arguments of a benchmark."""
    where = ["--results", str(results)]
    if part is not Part.e2e:
        return f"kernels.{part.value}", ["--quick"] * quick + where
    arguments = [word for case in (QUICK_CASES if quick else CASES) for word in ("--case", case)]
    arguments += [word for run in RUNS for word in ("--run", run)]
    arguments += ["--model", str(model)] if model else []
    return "e2e", [*arguments, "--output", "bench", *where]


def stop_if(findings: Iterable[Finding]) -> None:
    """End with exit status 1 and a line for each, if there are any."""
    console = Console(stderr=True, highlight=False, markup=False)
    found = list(findings)
    for finding in found:
        console.print(f"{finding.check}: {finding.found}", style="red", soft_wrap=True)
        console.print(f"cure: {finding.cure}", soft_wrap=True)
    if found:
        raise typer.Exit(1)
