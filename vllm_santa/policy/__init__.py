"""The policy of a server: where it comes from, and what every other module needs of it.

The rest of the package imports policy names from here; the schema is in schema.py and the decision in decision.py.
"""

import difflib
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_santa.policy.budget import Budget, shown
from vllm_santa.policy.decision import REASONS, Decision, RowContext
from vllm_santa.policy.file import PolicyError, read_policy
from vllm_santa.policy.request_limits import RequestLimits
from vllm_santa.policy.schema import Policy

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = [
    "REASONS",
    "Budget",
    "Decision",
    "Policy",
    "PolicyError",
    "RequestLimits",
    "RowContext",
    "default_policy_path",
    "load_policy",
    "policy_of",
    "policy_path",
    "served_model",
]

_ADDITIONAL_KEYS = ("policy",)


def default_policy_path() -> Path:
    """configs/default.yaml: of the source tree, or of the installed package, which carries it as data."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "configs" / "default.yaml", package.parent / "configs" / "default.yaml")
    for path in candidates:
        if path.is_file():
            return path
    raise PolicyError(f"the built-in policy is missing: looked for {candidates[0]} and {candidates[1]}")


@lru_cache(maxsize=16)
def load_policy(path: str | None = None) -> Policy:
    """Read a policy file; None means the built-in default. A path is read once per process.

    Raises:
        PolicyError: with file, line, field, value and what is allowed.
    """
    return read_policy(default_policy_path() if path is None else Path(path).expanduser())


def policy_path(vllm_config: "VllmConfig") -> str | None:
    """The policy file that the server was given, in SANTA_POLICY or in `--additional-config`; None for the built-in default.

    Raises:
        PolicyError: two different files, an unknown key under "santa", or a value that is not a path.
    """
    from_env = os.environ.get("SANTA_POLICY") or None
    additional = getattr(vllm_config, "additional_config", None)
    santa = additional.get("santa", {}) if isinstance(additional, dict) else {}
    if not isinstance(santa, dict):
        raise PolicyError(f'--additional-config: santa is {shown(santa)}; allowed: {{"policy": "path of a YAML file"}}')
    for key in santa:
        if key not in _ADDITIONAL_KEYS:
            near = difflib.get_close_matches(str(key), _ADDITIONAL_KEYS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise PolicyError(f"--additional-config: santa.{key} is unknown (value {shown(santa[key])}); allowed: policy{hint}")
    from_config = santa.get("policy")
    if from_config is not None and (not isinstance(from_config, str) or not from_config):
        raise PolicyError(f"--additional-config: santa.policy is {shown(from_config)}; allowed: the path of a YAML file")
    if from_env and from_config and Path(from_env).expanduser().resolve() != Path(from_config).expanduser().resolve():
        raise PolicyError(f"two policies: SANTA_POLICY={from_env} and --additional-config santa.policy={from_config}; allowed: one of them")
    return from_env or from_config


def policy_of(vllm_config: "VllmConfig") -> Policy:
    """The policy of a server with this configuration; errors as policy_path and load_policy."""
    return load_policy(policy_path(vllm_config))


def served_model(vllm_config: "VllmConfig") -> str:
    """The name that rules match with `model`: the served name (the first, where there are several), which vLLM sets to the model's path."""
    name = vllm_config.model_config.served_model_name or vllm_config.model_config.model
    return name[0] if isinstance(name, list) else name
