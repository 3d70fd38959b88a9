"""Loads the plugin as vLLM does, resolves the backend, and sends its enum member to a spawned process."""

import json
import multiprocessing
import pickle

from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum

NAME = "SANTA"


def name_of(pickled: bytes) -> str:
    """Runs in a process that has not loaded any plugin."""
    return pickle.loads(pickled).name


def backend_class() -> dict[str, str]:
    """What `--attention-backend santa` resolves to on this platform."""
    try:
        cls = AttentionBackendEnum[NAME].get_class()
    except Exception as reason:
        return {"failure": str(reason)}
    return {"class": f"{cls.__module__}.{cls.__name__}"}


def spawned_name() -> dict[str, str]:
    """The member's name as a spawned process sees it."""
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return {"name": pool.apply(name_of, (pickle.dumps(AttentionBackendEnum[NAME]),))}
    except Exception as reason:
        return {"failure": str(reason)}


def main() -> None:
    load_general_plugins()
    found = {"platform": current_platform.device_name, "registered": NAME in AttentionBackendEnum.__members__}
    if found["registered"]:
        found |= {"backend": backend_class(), "spawn": spawned_name()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
