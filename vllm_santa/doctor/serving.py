"""What a server is given: a policy, a model and codebooks, and whether they fit together."""

from pathlib import Path
from typing import Any

from vllm_santa.doctor.finding import Finding, error, ok, warning
from vllm_santa.policy import Policy, PolicyError, load_policy

SEE_POLICY = "docs/policy.md has every field; `vllm-santa policy check FILE` shows what a policy says."
CALIBRATE = "vllm-santa calibrate MODEL --text FILE --out CODEBOOKS"


def check_policy(path: Path | None) -> tuple[Finding, Policy | None]:
    """The finding, and the policy if it can be used. path: None for the built-in default."""
    try:
        policy = load_policy(None if path is None else str(path))
    except PolicyError as reason:
        return error("policy", str(reason), SEE_POLICY), None
    rules = f"{len(policy.rules)} rule{'' if len(policy.rules) == 1 else 's'}"
    found = f"{path or 'the built-in default'}: {rules}, codebooks {policy.codebooks or 'trained from the first prompts'}"
    warnings = policy.warnings()
    if warnings:
        return warning("policy", f"{found}; {'; '.join(warnings)}", SEE_POLICY), policy
    return ok("policy", found), policy


def check_model(probed: dict[str, Any], gpus: bool) -> Finding:
    """probed: what probes.model_fit says. gpus: whether the machine has any, so that kernels are needed."""
    found = "{num_layers} layers, {num_kv_heads} KV heads of {group} query heads, head_dim {head_dim}".format(**probed)
    failure = probed["codes"] or (gpus and probed["kernels"])
    if failure:
        return error("model", f"{found}: {failure}", "Serve this model with another backend.")
    return ok("model", found)


def check_dense_layers(policy: Policy, num_layers: int) -> Finding | None:
    """Nothing where the policy names no layers that the model does not have."""
    try:
        policy.dense_layer_set(num_layers)
    except ValueError as reason:
        return error("policy", str(reason), SEE_POLICY)
    return None


def check_codebooks(probed: dict[str, Any], dense_layers: frozenset[int]) -> Finding:
    """probed: what probes.model_fit says, of a file. dense_layers: those that the policy leaves dense."""
    check, codebooks = "codebooks", probed["codebooks"]
    if "failure" in codebooks:
        return error(check, codebooks["failure"], CALIBRATE)
    found = "of {model}, {subspaces} bytes a key, {training_tokens} tokens, fingerprint {fingerprint:.16}".format(**codebooks)
    missing = sorted(set(range(probed["num_layers"])) - dense_layers - set(codebooks["layers"]))
    if missing:
        without = f"none for layers {', '.join(map(str, missing))}, which a server refuses if they have full attention"
        return warning(check, f"{found}; {without}", f"{CALIBRATE}, or name these layers in the policy's dense_layers.")
    return ok(check, f"{found}; they fit the model")
