"""Times for `vllm-santa tune`: dense and sparse decode of one layer, over context and batch, on the same pages and in replayed graphs.

    python -m benchmarks.kernels.tune --shape 32/8/128 --context 8192 --batch 4 --plan "pps 512" --plan "ssa 2%" --output FILE

Prints a line for each context and batch and writes FILE, which vllm_santa/tune/times.py reads.
"""

import argparse
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from vllm_santa.methods import Method
from vllm_santa.policy.budget import Budget
from vllm_santa.tune.shape import ModelShape
from vllm_santa.tune.times import DENSE, Point, Times, parse_plan

from . import santa, ssa
from .common import Case, Inputs, flashinfer_decode, make_inputs, time_us, versions

PEAK = 3.0
"""Standard deviation of the scores, in nats."""
MOST_TOKENS = 2**22
"""Of all rows together: beyond this, a server's buffers (`workspace_tokens`) leave rows dense."""
MEMORY = 0.7
"""Part of the free memory that pages may take; workspaces need some of the rest."""


def fits(case: Case) -> bool:
    """Whether rows so long are sparse, and their pages have room."""
    free = torch.cuda.mem_get_info()[0]
    return case.batch * case.context <= MOST_TOKENS and _sets(case) * 2 * case.key_bytes <= MEMORY * free


def measure(case: Case, plans: dict[str, tuple[Method, Budget]]) -> Point:
    """All plans and FlashInfer, on the same inputs."""
    inputs = [make_inputs(case, Method.pps, 1, PEAK, seed) for seed in range(_sets(case))]
    output = torch.empty_like(inputs[0].query)
    times = {DENSE: min(time_us([flashinfer_decode(case, one, output, cores) for one in inputs]) for cores in (True, False))}
    for name, (method, budget) in plans.items():
        rows = budget.rows(case.context)
        for one in inputs:
            one.rows.method.fill_(int(method))
            one.rows.budget.fill_(rows)
        make = decoder(case, method, rows, output)
        times[name] = time_us([make(one) for one in inputs])
    torch.cuda.empty_cache()
    return Point(context=case.context, batch=case.batch, microseconds=times)


def decoder(case: Case, method: Method, rows: int, output: torch.Tensor) -> Callable[[Inputs], Callable[[], None]]:
    """A function that makes the timed call for an input."""
    if method.needs_codes:
        return ssa.decoder(case, rows, output, (method,))
    return santa.decoder(case, method, rows, output)


def _sets(case: Case) -> int:
    """Inputs that would stay in the L2 cache take turns."""
    return max(1, min(4, int(400e6 / (2 * case.key_bytes))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="QUERY_HEADS/KV_HEADS/HEAD_DIM")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--context", type=int, action="append", required=True, help="tokens; repeatable")
    parser.add_argument("--batch", type=int, action="append", required=True, help="rows; repeatable")
    parser.add_argument("--plan", action="append", required=True, help="method and budget; repeatable")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    shape, plans = ModelShape.parse(args.shape), {text: parse_plan(text) for text in args.plan}
    points = []
    for batch in args.batch:
        for context in args.context:
            case = Case(shape.query_heads, shape.kv_heads, shape.head_dim, context, batch, getattr(torch, args.dtype))
            if not fits(case):
                print(f"{context:>9,} x {batch:<4} left out: more than {MOST_TOKENS:,} tokens, or than the GPU's free memory", flush=True)
                continue
            points.append(measure(case, plans))
            shown = "  ".join(f"{name} {time:.1f}" for name, time in points[-1].microseconds.items())
            print(f"{context:>9,} x {batch:<4} us: {shown}", flush=True)
    if not points:
        raise SystemExit("nothing was measured: no context and batch fits")
    found = versions()
    times = Times(
        shape=str(shape), dtype=args.dtype, gpu=found.pop("gpu"), versions=found, date=date.today().isoformat(),
        plans=args.plan, points=points,
    )  # fmt: skip
    args.output.write_text(times.model_dump_json(indent=1) + "\n")


if __name__ == "__main__":
    main()
