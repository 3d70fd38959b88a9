"""What tells the engines of a process, and the processes of an engine, apart and together."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def engine_id(vllm_config: "VllmConfig") -> str:
    """The configuration's first `instance_id`.

    vLLM gives a configuration a new instance_id whenever it completes it again: in the engine's process after its start, and for each
    data-parallel rank. The first one is kept beside it, where it travels with the configuration to other processes.
    """
    return vllm_config.__dict__.setdefault("santa_engine_id", vllm_config.instance_id)
