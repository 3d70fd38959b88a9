"""`vllm-santa tune`: the command line. Measuring is a program of the benchmarks, in a process of its own."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_santa.bench.cli import stop_if
from vllm_santa.bench.machine import missing
from vllm_santa.bench.programs import run_program
from vllm_santa.tune import rules
from vllm_santa.tune.picture import draw
from vllm_santa.tune.shape import ALLOWED, ModelShape
from vllm_santa.tune.times import Times, parse_plan, read_times

CONTEXTS = [2048, 8192, 32768, 131072, 524288]
BATCHES = [1, 4, 16, 64]
PLANS = ["pps 512", "prop 128", "ssa 2%"]


def tune(
    model_shape: Annotated[str, typer.Argument(metavar="MODEL_SHAPE", help=f"{ALLOWED}. With tensor parallelism: the heads of one GPU.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The policy; .json (times) and .png are written beside it.")] = Path(
        "tuned.yaml"
    ),
    context: Annotated[list[int] | None, typer.Option(min=256, help=f"Tokens; repeatable. Default: {CONTEXTS}.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, max=1024, help=f"Decode rows; repeatable. Default: {BATCHES}.")] = None,
    plan: Annotated[
        list[str] | None, typer.Option(help=f"Method and budget, from the most exact to the least; repeatable. Default: {PLANS}.")
    ] = None,
    margin: Annotated[float, typer.Option(min=0, max=1, help="What a less exact method must be faster by; 0.05 is 5 %.")] = 0.05,
    any_batch: Annotated[bool, typer.Option("--any-batch", help="Rules that do not look at the batch, and hold at every one.")] = False,
    times: Annotated[Path | None, typer.Option(metavar="FILE", help="Times of an earlier run; measures nothing and needs no GPU.")] = None,
) -> None:
    """Measure dense and sparse decoding on this GPU over context and batch, and write the policy that follows: its break-even points."""
    console = Console(highlight=False, markup=False)
    try:
        shape = ModelShape.parse(model_shape)
        plans = plan or PLANS
        for text in plans:
            parse_plan(text)
        if times is None:
            stop_if(missing())
            measured = _measure(shape, sorted({*(context or CONTEXTS)}), sorted({*(batch or BATCHES)}), plans)
        else:
            measured = read_times(times)
            if (measured.shape, measured.dtype) != (str(shape), shape.dtype):
                raise ValueError(f"{times}: measured for {measured.shape} {measured.dtype}; must be for {shape} {shape.dtype}")
    except ValueError as error:
        Console(stderr=True, highlight=False, markup=False).print(str(error), style="red", soft_wrap=True)
        raise typer.Exit(1) from None
    text = rules.policy_text(measured, margin, by_batch=not any_batch)
    out.write_text(text)
    out.with_suffix(".json").write_text(measured.model_dump_json(indent=1) + "\n")
    console.print(text, soft_wrap=True)
    written = [out, out.with_suffix(".json")]
    try:
        draw(measured, rules.choices(measured, margin, by_batch=not any_batch), out.with_suffix(".png"))
        written.append(out.with_suffix(".png"))
    except ImportError:
        again = f"vllm-santa tune {model_shape} --times {out.with_suffix('.json')} --out {out}"
        console.print(f"no picture without matplotlib: pip install 'vllm-santa[tune]', then {again}", style="yellow", soft_wrap=True)
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True)


def _measure(shape: ModelShape, contexts: list[int], batches: list[int], plans: list[str]) -> Times:
    """Exits with status 1 where the program does."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "times.json"
        arguments = ["--shape", str(shape), "--dtype", shape.dtype, "--output", str(file)]
        for name, values in (("--context", contexts), ("--batch", batches), ("--plan", plans)):
            arguments += [word for value in values for word in (name, str(value))]
        if run_program("kernels.tune", arguments):
            raise typer.Exit(1)
        return read_times(file)
