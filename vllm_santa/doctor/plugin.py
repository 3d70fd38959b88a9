"""The plugin inside vLLM: found, registered, and known to the processes that vLLM spawns."""

import os
from importlib.metadata import entry_points
from typing import Any

from vllm_santa.doctor.finding import Finding, error, ok

GROUPS = {
    "vllm.general_plugins": "plugin:register",
    "vllm.logits_processors": "request:SantaParams",
    "vllm.stat_logger_plugins": "metrics:SantaStatLogger",
}
"""The entry points that a server needs, and what each of them is."""
REINSTALL = "pip install --force-reinstall --no-deps vllm-santa"


def check_entry_points() -> Finding:
    check = "entry points"
    missing = [group for group in GROUPS if "santa" not in entry_points(group=group).names]
    if missing:
        return error(check, f"none called santa in {', '.join(missing)}: vLLM does not know the plugin", REINSTALL)
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and "santa" not in chosen.split(","):
        return error(check, f"VLLM_PLUGINS={chosen} leaves the plugin out", "Add santa to VLLM_PLUGINS, or unset it.")
    return ok(check, f"santa in {', '.join(GROUPS)}")


def check_backend(probed: dict[str, Any]) -> Finding:
    """probed: what probes.vllm_plugin says."""
    check = "backend"
    if not probed["registered"]:
        return error(check, "vLLM loaded its plugins, and SANTA is not among its attention backends", REINSTALL)
    backend, platform = probed["backend"], probed["platform"] or "none: vLLM found neither its CPU build nor a GPU"
    if "failure" in backend:
        return error(
            check,
            f"registered, but not usable on this platform ({platform}): {backend['failure']}",
            "Serve with another backend, or on another machine.",
        )
    return ok(check, f"SANTA is {backend['class']} on platform {platform}")


def check_spawn(probed: dict[str, Any]) -> Finding:
    """probed: what probes.vllm_plugin says of a registered plugin. vLLM's engine and workers are spawned with the member in their
    configuration."""
    check = "spawn"
    if "failure" in probed["spawn"]:
        found = f"the enum member does not reach a spawned process: {probed['spawn']['failure']}"
        return error(check, found, "Install vllm-santa into this environment, so that every Python started from it finds it.")
    return ok(check, f"a spawned process unpickles the enum member as {probed['spawn']['name']}")
