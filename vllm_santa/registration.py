"""The member AttentionBackendEnum.SANTA. Importing this module registers it.

vLLM sends its configuration, with the enum member in it, to spawned processes, which unpickle it before they load any plugin. So the member
pickles as a call of `_restore` in this module: unpickling imports it, and with that registers.
"""

import copyreg
from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

NAME = "SANTA"
CLASS_PATH = "vllm_santa.backend.SantaBackend"


def _restore(name: str) -> AttentionBackendEnum:
    return AttentionBackendEnum[name]


def _reduce(member: AttentionBackendEnum) -> tuple[Any, tuple[Any, ...]]:
    return (_restore, (NAME,)) if member.name == NAME else (AttentionBackendEnum, (member.value,))


# Another process of ours may have pickled the member into this one before vLLM loads the plugin: register once.
if NAME not in AttentionBackendEnum.__members__:
    register_backend(NAME, CLASS_PATH)
copyreg.pickle(AttentionBackendEnum, _reduce)  # type: ignore[arg-type]
