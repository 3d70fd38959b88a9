"""`vllm-santa doctor`: the command line. Needs neither torch nor vLLM."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import vllm_santa
from vllm_santa.doctor.diagnosis import diagnose
from vllm_santa.doctor.finding import Finding

STYLE = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(
    model: Annotated[str | None, typer.Option(metavar="DIR", help="Hugging Face folder that is to be served.")] = None,
    codebooks: Annotated[Path | None, typer.Option(metavar="FILE", help="Its codebooks; default: those that the policy names.")] = None,
    policy: Annotated[Path | None, typer.Option(metavar="FILE", envvar="SANTA_POLICY", help="Default: the built-in one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine: packages, GPU, plugin, kernels, and what a server is to be given. Exit status 1 if anything is an error."""
    findings = []
    for finding in diagnose(model, codebooks, policy):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        typer.echo(json.dumps(_report(findings), indent=2))
    else:
        _console().print(_summary(findings))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


def _console() -> Console:
    return Console(highlight=False, markup=False)


def _print(finding: Finding) -> None:
    """One line as soon as it is known; some checks take half a minute. Not wrapped: it may be copied, or searched for."""
    console = _console()
    console.print(f"{finding.level:8}", style=STYLE[finding.level], end="")
    console.print(f"{finding.check}: {finding.found}", soft_wrap=True)
    if finding.cure:
        console.print(f"{'':8}cure: {finding.cure}", soft_wrap=True)


def _count(findings: Iterable[Finding], level: str) -> int:
    return sum(finding.level == level for finding in findings)


def _summary(findings: list[Finding]) -> str:
    return f"ok: {_count(findings, 'ok')}, warnings: {_count(findings, 'warning')}, errors: {_count(findings, 'error')}"


def _report(findings: list[Finding]) -> dict[str, object]:
    """ok: no errors. findings: check, level, found and cure of each, in order."""
    return {
        "version": vllm_santa.__version__,
        "ok": _count(findings, "error") == 0,
        "findings": [vars(finding) for finding in findings],
    }
