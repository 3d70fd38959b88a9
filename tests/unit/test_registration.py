"""The enum member SANTA: registered once, and known to every process that it is sent to."""

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

from vllm_santa import registration  # noqa: E402

SANTA = AttentionBackendEnum["SANTA"]


def name_and_path(member: AttentionBackendEnum) -> tuple[int, str, str]:
    return os.getpid(), member.name, member.get_path()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_member_reaches_another_process(method: str) -> None:
    with multiprocessing.get_context(method).Pool(1) as pool:
        pid, name, path = pool.apply(name_and_path, (SANTA,))
    assert pid != os.getpid()
    assert (name, path) == ("SANTA", registration.CLASS_PATH)


def test_unpickling_registers() -> None:
    """A spawned engine unpickles its configuration before it loads any plugin."""
    program = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).get_path())"
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(SANTA), capture_output=True, check=True)
    assert done.stdout.decode().split()[-1] == registration.CLASS_PATH


def test_a_copy_is_the_member() -> None:
    assert copy.deepcopy(SANTA) is SANTA and copy.copy(SANTA) is SANTA
    assert copy.deepcopy({"backend": SANTA})["backend"] is SANTA


def test_other_members_keep_their_pickles() -> None:
    for member in AttentionBackendEnum:
        assert pickle.loads(pickle.dumps(member)) is member


def test_registering_twice_changes_nothing() -> None:
    from vllm.platforms import current_platform
    from vllm.platforms.cpu import CpuPlatform

    from vllm_santa.plugin import register

    register()
    before = (CpuPlatform.get_attn_backend_cls.__func__, type(current_platform).check_and_update_config.__func__)
    names = list(AttentionBackendEnum.__members__)
    register()
    assert (CpuPlatform.get_attn_backend_cls.__func__, type(current_platform).check_and_update_config.__func__) == before
    assert list(AttentionBackendEnum.__members__) == names and names.count("SANTA") == 1


def test_importing_the_package_is_light() -> None:
    """Neither torch nor vLLM: entry points are looked at by every vLLM server of the environment."""
    program = "import sys, vllm_santa, vllm_santa.plugin; print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout.decode().strip() == "[]"


def choose(backend: AttentionBackendEnum | None, **changes: object) -> str:
    """The class path that vLLM's CPU platform answers with."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from vllm_santa.plugin import register

    register()
    config = AttentionSelectorConfig(head_size=64, dtype=torch.float32, kv_cache_dtype="auto", block_size=None)
    return CpuPlatform.get_attn_backend_cls(backend, config._replace(**changes))


def test_the_cpu_platform_honours_santa_and_only_santa() -> None:
    assert choose(SANTA) == registration.CLASS_PATH
    for other in (None, AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.FLASHINFER):
        assert choose(other) == AttentionBackendEnum.CPU_ATTN.get_path()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"head_size": 60}, "head_dim is 60"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(changes: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=f"SANTA is not valid for this configuration.*{reason}"):
        choose(SANTA, **changes)
