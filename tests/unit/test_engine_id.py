"""An engine keeps its name, whatever vLLM does to its configuration."""

import copy
import pickle

import pytest

pytest.importorskip("vllm")
from vllm.config import VllmConfig  # noqa: E402

from vllm_santa.engine_id import engine_id  # noqa: E402


def test_completing_a_configuration_again_changes_nothing() -> None:
    """As the engine's process does once it has started; requests' parameters are looked up by this name in every step."""
    config = VllmConfig()
    first = engine_id(config)
    config.__post_init__()
    assert config.instance_id != first and engine_id(config) == first


def test_the_name_travels() -> None:
    config = VllmConfig()
    first = engine_id(config)
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        other.__post_init__()
        other.instance_id += "_dp1"
        assert engine_id(other) == first
    assert engine_id(VllmConfig()) != first
