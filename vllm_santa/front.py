"""What the process that takes requests knows of its engine.

vLLM validates the parameters of a request without giving the validator the engine's configuration. But every process that takes requests
(API servers, `LLM`) has made that configuration itself, and each configuration passes through the platform's `check_and_update_config`,
so that is where to look: after the plugin has loaded, before the engine starts.
"""

from typing import TYPE_CHECKING

from vllm_santa.graphs import captures_decodes
from vllm_santa.policy import Policy, policy_of, policy_path
from vllm_santa.refusals import refuse_configuration

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_policy: Policy | None = None
_captures_decodes = False


def runs_santa(vllm_config: "VllmConfig") -> bool:
    """True if any kind of layer of this engine was given the SANTA backend."""
    config = vllm_config.attention_config
    backends = [config.backend, *(config.backend_per_kind or {}).values()]
    return any(getattr(backend, "name", None) == "SANTA" for backend in backends)


def front_policy() -> Policy | None:
    """Policy of the SANTA engine of this process, the last one where there are several; None without one."""
    return _policy


def front_captures_decodes() -> bool:
    """Whether that engine replays decode steps from CUDA graphs."""
    return _captures_decodes


def observe_config(vllm_config: "VllmConfig") -> None:
    """Keep the policy of an engine that runs SANTA; other engines change nothing.

    Raises:
        PolicyError: the policy cannot be used. ValueError: another option does not go with SANTA. Raised where the configuration is made,
            they stop the server before the engine starts.
    """
    global _policy, _captures_decodes
    if not runs_santa(vllm_config):
        return
    from vllm.logger import init_logger

    logger = init_logger("vllm.santa")
    refuse_configuration(vllm_config)
    _policy = policy_of(vllm_config)
    _captures_decodes = captures_decodes(vllm_config, _policy)
    logger.info("SANTA policy: %s", policy_path(vllm_config) or "the built-in default")
    for warning in _policy.warnings():
        logger.warning("SANTA policy: %s", warning)


def watch_configs() -> None:
    """Observe every configuration that this process makes from now on. Once per process; vLLM's plugin loading calls it."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config.__func__  # type: ignore[attr-defined]
    if getattr(original, "observed_by_santa", False):
        return

    def check_and_update_config(cls: type, vllm_config: "VllmConfig") -> None:
        original(cls, vllm_config)
        observe_config(vllm_config)

    check_and_update_config.observed_by_santa = True  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[assignment,method-assign]
