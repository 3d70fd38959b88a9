"""What is compared: the names of configurations and the `santa_*` parameters they send, without their prefix."""

from typing import Any

from vllm_santa.methods import Method

SELECTIONS = ("ssa", "ssa_fixed", "topk", "uniform_tail")
SPARSITIES = {"10x": "10%", "20x": "5%", "50x": "2%"}

CONFIGURATIONS: dict[str, dict[str, Any]] = {"dense": {"method": "dense"}}
CONFIGURATIONS |= {f"prop-{draws}": {"method": "prop", "budget": draws} for draws in (64, 128, 256, 1024)}
CONFIGURATIONS |= {f"flash-{draws}": {"method": "flash", "budget": draws} for draws in (256, 2048)}
CONFIGURATIONS |= {f"pps-{rows}": {"method": "pps", "budget": rows} for rows in (64, 128, 256, 512)}
CONFIGURATIONS |= {
    f"{method}-{sparsity}": {"method": method, "budget": budget} for method in SELECTIONS for sparsity, budget in SPARSITIES.items()
}


def needs_codes(configuration: str) -> bool:
    """Whether the configuration needs PQ codebooks."""
    return Method[CONFIGURATIONS[configuration]["method"]].needs_codes
