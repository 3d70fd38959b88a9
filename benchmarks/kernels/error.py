"""What the estimate of errors costs behind pps: `python -m benchmarks.kernels.error [--results FOLDER]`.

Graph replays of one layer's pps with and without the estimate, on the same pages, in one process. Prints a table and writes
kernel-error.json.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

import torch

from vllm_santa.error_ops import ErrorWorkspace, estimate_errors
from vllm_santa.jit import Shape
from vllm_santa.kernel_ops import Layer, PpsWorkspace, pps
from vllm_santa.methods import Method

from .common import Case, make_inputs, time_us, versions

CASES = [Case(32, 8, 128, 32768, 1), Case(32, 8, 128, 131072, 1), Case(32, 8, 128, 131072, 8), Case(16, 4, 256, 131072, 1)]
BUDGETS = (512, 4096)


def measure(case: Case, budget: int) -> dict[str, float]:
    """Microseconds of pps, and of pps with the estimate of every row."""
    shape, layer = Shape(case.head_dim, case.group, case.dtype), Layer(0, case.head_dim**-0.5)
    inputs = [make_inputs(case, Method.pps, budget, peak=3.0, seed=seed) for seed in range(2)]
    output = torch.empty_like(inputs[0].query)
    workspace = PpsWorkspace(case.batch, case.kv_heads, shape, case.context, budget)
    errors = ErrorWorkspace(case.batch, case.kv_heads, shape)
    sums = torch.zeros(case.batch, errors.parts, 2, device="cuda")
    measured = torch.ones(case.batch, dtype=torch.int8, device="cuda")

    def times(flags: torch.Tensor | None) -> float:
        def call(one) -> None:
            pps(one.query, one.kv, one.rows, layer, output, workspace, errors.lse)
            if flags is not None:
                estimate_errors(one.query, one.kv, one.rows, flags, layer, [Method.pps], output, workspace, sums, errors)

        return time_us([lambda one=one: call(one) for one in inputs])

    alone = times(None)
    return {"pps_us": alone, "estimate_us": times(measured) - alone, "unmeasured_us": times(torch.zeros_like(measured)) - alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results")
    folder = parser.parse_args().results
    rows = []
    print("| query heads / KV heads / head_dim | context × batch | budget | pps, µs | estimate, µs | the same, no row measured |")
    print("|" + "---|" * 6)
    for case in CASES:
        for budget in BUDGETS:
            found = {name: round(value, 2) for name, value in measure(case, budget).items()}
            heads = f"{case.query_heads} / {case.kv_heads} / {case.head_dim}"
            print(
                f"| {heads} | {case.context} × {case.batch} | {budget} | " + " | ".join(f"{value:.1f}" for value in found.values()) + " |"
            )
            rows.append({"heads": heads, "context": case.context, "batch": case.batch, "budget": budget} | found)
    report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions(), "rows": rows}
    (folder / "kernel-error.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
