"""What the process that takes requests knows of its engine.

vLLM validates the parameters of a request without giving the validator the engine's configuration. But every process that takes requests
(API servers, `LLM`) has made that configuration itself, and each configuration passes through the platform's `check_and_update_config`,
so that is where to look: after the plugin has loaded, before the engine starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_santa.engine_id import engine_id
from vllm_santa.graphs import captures_decodes
from vllm_santa.policy import Policy, policy_of, policy_path
from vllm_santa.refusals import refuse_codebooks_among_weights, refuse_configuration
from vllm_santa.wrapping import wrap_once

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class EngineFacts:
    """Of the SANTA engine of this process.

    captures_decodes: whether it replays decode steps from CUDA graphs. blind_workers: what keeps its workers from seeing the parameters of
    requests, in words; empty if nothing does.
    """

    policy: Policy
    captures_decodes: bool = False
    blind_workers: str = ""


_facts: EngineFacts | None = None


def runs_santa(vllm_config: "VllmConfig") -> bool:
    """True if any kind of layer of this engine was given the SANTA backend."""
    config = vllm_config.attention_config
    backends = [config.backend, *(config.backend_per_kind or {}).values()]
    return any(getattr(backend, "name", None) == "SANTA" for backend in backends)


def engine_facts() -> EngineFacts | None:
    """Those of the last SANTA engine of this process; None without one."""
    return _facts


def blind_workers(vllm_config: "VllmConfig") -> str:
    """Where vLLM makes no logits processors, in some worker at least: rows then follow the policy alone (docs/requests.md)."""
    v2 = vllm_config.use_v2_model_runner
    if vllm_config.speculative_config is not None and not v2:
        return "speculative decoding on vLLM's V1 model runner"
    if vllm_config.parallel_config.pipeline_parallel_size > 1 and v2:
        return "pipeline parallelism on vLLM's V2 model runner"
    return ""


def observe_config(vllm_config: "VllmConfig") -> None:
    """Keep the facts of an engine that runs SANTA; other engines change nothing.

    Raises:
        PolicyError: the policy cannot be used. ValueError: another option does not go with SANTA. Raised where the configuration is made,
            they stop the server before the engine starts.
    """
    global _facts
    if not runs_santa(vllm_config):
        return
    from vllm.logger import init_logger

    logger = init_logger("vllm.santa")
    engine_id(vllm_config)  # as early as can be: its processes get it with the configuration
    refuse_configuration(vllm_config)
    policy, blind = policy_of(vllm_config), blind_workers(vllm_config)
    if policy.codebooks is not None:
        refuse_codebooks_among_weights(policy.codebooks, vllm_config.model_config.model)
    if policy.sets_targets and blind:
        raise ValueError(f"max_error: the policy's rules have error targets, which cannot be followed with {blind}")
    _facts = EngineFacts(policy, captures_decodes(vllm_config, policy), blind)
    logger.info("SANTA policy: %s", policy_path(vllm_config) or "the built-in default")
    if blind:
        logger.warning("SANTA: rows follow the policy alone, and santa_* parameters are refused, because of %s.", blind)
    for warning in policy.warnings():
        logger.warning("SANTA policy: %s", warning)


def watch_configs() -> None:
    """Observe every configuration that this process makes from now on. Once per process; vLLM's plugin loading calls it."""
    from vllm.platforms import current_platform

    def check_and_update_config(original: Callable[..., None], cls: type, vllm_config: "VllmConfig") -> None:
        original(cls, vllm_config)
        observe_config(vllm_config)

    wrap_once(type(current_platform), "check_and_update_config", check_and_update_config)
