"""`vllm-santa policy`: check a policy file, explain a decision, print the reference. Needs neither torch nor vLLM."""

from pathlib import Path
from typing import Annotated

import typer
import yaml  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

from vllm_santa.methods import Method
from vllm_santa.policy import REASONS, Policy, PolicyError, RowContext, load_policy
from vllm_santa.policy.decision import CompiledRule
from vllm_santa.policy.parameters import PARAMETERS, RequestParams, has_santa, parse
from vllm_santa.policy.reference_page import policy_reference
from vllm_santa.policy.request_limits import RequestLimits
from vllm_santa.policy.schema import Range, Rule

app = typer.Typer(no_args_is_help=True, help="Check and explain policy files.")

PolicyFile = Annotated[Path, typer.Argument(metavar="FILE", help="A policy, as configs/default.yaml.")]


@app.command()
def check(file: PolicyFile) -> None:
    """Check a policy file and print what it says."""
    policy = _load(file)
    console = _console()
    console.print(f"{file}: ok", style="green", soft_wrap=True)
    for warning in policy.warnings():
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    table = Table("rule", "when", "method", "budget")
    for index, rule in enumerate(policy.rules):
        table.add_row(str(index), _conditions(rule), _method_of(rule), _budget_of(rule, policy))
    table.add_row("-", "no rule matches", Method.dense.name, "")
    console.print(table)
    console.print(f"dense layers: {', '.join(map(str, policy.dense_layers)) or 'none'}; sink {policy.sink}, local {policy.local}")
    console.print(f"requests may choose: {_requests(policy)}", soft_wrap=True)


@app.command()
def explain(
    file: PolicyFile,
    context: Annotated[int, typer.Option(min=1, help="Context length of the row in tokens.")],
    generated: Annotated[int, typer.Option(min=0, help="Tokens of the answer so far.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Decode rows in the step.")] = 1,
    model: Annotated[str, typer.Option(help="Served model name.")] = "",
    request: Annotated[list[str] | None, typer.Option(metavar="K=V", help="A parameter of the request, as santa_budget=2%.")] = None,
) -> None:
    """Print the decision for one decode row, and why."""
    policy = _load(file)
    row = RowContext(context, generated, batch, model)
    asked = _parse_request(request or [], policy.requests)
    console = _console()
    for index, (rule, compiled) in enumerate(zip(policy.rules, policy.decider.rules, strict=True)):
        verdict = _verdict(rule, compiled, row)
        console.print(f"rule {index} ({_conditions(rule)}: {_method_of(rule)} {_budget_of(rule, policy)}): {verdict}", soft_wrap=True)
        if verdict == "matches":
            break
    else:
        console.print("no rule matches", soft_wrap=True)
    if request:
        budget = "not given" if asked.budget is None else str(asked.budget)
        method = "not given" if asked.method is None else asked.method.name
        bernoulli = "" if asked.bernoulli is None else f", {asked.bernoulli}"
        target = "" if asked.max_error is None else f", error under {asked.max_error:g}"
        console.print(f"request: method {method}, budget {budget}{bernoulli}{target}", soft_wrap=True)
    decision = policy.decide(row, asked)
    unit = "draws per query head" if decision.method.samples_values else "rows per KV head"
    if decision.method.needs_codes:
        unit += f", beside the {policy.sink} sink and {policy.local} local tokens"
    budget = f", {decision.budget} {unit} ({decision.budget / context:.2%} of {context})" if decision.budget else ""
    console.print(f"decision: {decision.method.name}{budget}", style="bold", soft_wrap=True)
    if decision.bernoulli is not None:
        console.print(f"keys: scored by {decision.bernoulli}", soft_wrap=True)
    if decision.target is not None:
        max_error, least, most = decision.target
        console.print(f"error: held under {max_error:g}, by {least} to {most} rows", soft_wrap=True)
    console.print(f"why: {decision.reason}: {REASONS[decision.reason]}", soft_wrap=True)


@app.command()
def reference() -> None:
    """Print docs/policy.md, the reference of every field."""
    typer.echo(policy_reference(), nl=False)


def _console() -> Console:
    return Console(highlight=False, markup=False)


def _fail(message: str) -> typer.Exit:
    Console(stderr=True, highlight=False, markup=False).print(message, style="red", soft_wrap=True)
    return typer.Exit(1)


def _load(file: Path) -> Policy:
    try:
        return load_policy(str(file))
    except PolicyError as error:
        raise _fail(str(error)) from None


def _parse_request(pairs: list[str], limits: RequestLimits) -> RequestParams:
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise _fail(f"--request: {pair!r} is not a parameter; allowed: K=V, as santa_budget=2%")
        if not has_santa({key: value}):
            raise _fail(f"--request: {key!r} is not a santa_* parameter; allowed: {', '.join(PARAMETERS)}")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            values[key] = value
    try:
        return parse(values, limits)
    except ValueError as error:
        raise _fail(str(error)) from None


def _verdict(rule: Rule, compiled: CompiledRule, row: RowContext) -> str:
    missed = compiled.mismatch(row)
    if missed is None:
        return "matches"
    wanted = rule.model if missed == "model" else _span(getattr(rule, missed))
    return f"no, {missed} is {getattr(row, missed)!r}, not {wanted}"


def _conditions(rule: Rule) -> str:
    spans = [f"{name} {_span(getattr(rule, name))}" for name in ("context", "generated", "batch") if getattr(rule, name) != Range()]
    if rule.model:
        spans.append(f"model {rule.model}")
    return ", ".join(spans) or "always"


def _span(span: Range) -> str:
    if span.max is None:
        return f"from {span.low}"
    return f"{span.low} to {span.max}"


def _method_of(rule: Rule) -> str:
    return rule.method.name if rule.bernoulli is None else f"{rule.method.name} with {rule.bernoulli.settings()},"


def _budget_of(rule: Rule, policy: Policy) -> str:
    if rule.method is Method.dense:
        return ""
    max_error = rule.compiled(policy.default_budget, policy.default_max_error).max_error
    target = "" if max_error is None else f", error under {max_error:g}"
    return f"{rule.budget or policy.default_budget}{target}"


def _requests(policy: Policy) -> str:
    limits = policy.requests
    if not limits.allow:
        return "only their seed"
    targets = "error targets" if limits.max_error else "no error targets"
    return f"{', '.join(method.name for method in limits.methods)}; {limits.budget_text()}; beyond that: {limits.over_limit}; {targets}"
