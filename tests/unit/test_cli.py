import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_santa.cli import app
from vllm_santa.policy.reference_page import policy_reference

CONFIGS = Path(__file__).parents[2] / "configs"


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_check_accepts_shipped_policies(path):
    result = run("policy", "check", path)
    assert result.exit_code == 0
    assert f"{path}: ok" in result.output.replace("\n", "")
    assert "pps" in result.output


def test_check_prints_mistakes_and_fails(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("sink: -1\n")
    result = run("policy", "check", file)
    assert result.exit_code == 1
    assert f"{file}:1: sink: -1: input should be greater than or equal to 0; allowed: an integer from 0 to 65536" in result.output


def test_check_prints_warnings(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("heavy_fraction: 0\nrequests: {allow: false}")
    result = run("policy", "check", file)
    assert result.exit_code == 0
    assert "warning: heavy_fraction: 0 leaves" in result.output
    assert "requests may choose: only their seed" in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--context", 200_000],
            [
                "rule 0 (context from 262144: ssa 2%): no, context is 200000, not from 262144",
                "matches",
                "decision: ssa, 10000 rows per KV head",
            ],
        ),
        (["--context", 1000], ["no rule matches", "decision: dense", "why: no_rule: no rule matches the row"]),
        (
            ["--context", 8000, "--request", "santa_method=prop", "--request", "santa_budget=2%"],
            ["request: method prop, budget 2%", "decision: prop, 160 draws per query head (2.00% of 8000)", "why: request:"],
        ),
        (
            ["--context", 8000, "--request", "santa_budget=50%"],
            ["request: method not given, budget 10%", "decision: pps, 800 rows per KV head"],
        ),
        (
            [
                "--context",
                8000,
                "--request",
                "santa_method=prop",
                "--request",
                "santa_bernoulli=8",
                "--request",
                "santa_bernoulli_query=head",
            ],
            [
                "budget not given, Bernoulli queries of 8 samples, one per query head",
                "keys: scored by Bernoulli queries of 8 samples, one per",
            ],
        ),
        (
            ["--context", 300, "--request", "santa_budget=299", "--request", "santa_method=ssa"],
            ["decision: dense", "budget_covers_context"],
        ),
    ],
)
def test_explain(arguments, expected):
    result = run("policy", "explain", CONFIGS / "long-context.yaml", *arguments)
    assert result.exit_code == 0
    for text in expected:
        assert text in result.output


def test_bernoulli_queries_of_a_rule(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("rules: [{method: prop, budget: 32, bernoulli: {samples: 16}}]")
    assert "prop with Bernoulli" in run("policy", "check", file).output
    result = run("policy", "explain", file, "--context", 5000)
    assert "rule 0 (always: prop with Bernoulli queries of 16 samples, one per group, 32): matches" in result.output
    assert "keys: scored by Bernoulli queries of 16 samples, one per group" in result.output


def test_explain_names_the_condition_that_failed(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text(
        "rules: [{model: '*llama*', method: ssa}, {generated: {min: 2, max: 4}, method: ssa}, {batch: {max: 2}, method: dense}]"
    )
    result = run("policy", "explain", file, "--context", 5000, "--model", "qwen", "--batch", 2)
    assert "no, model is 'qwen', not *llama*" in result.output
    assert "no, generated is 0, not 2 to 4" in result.output
    assert "why: rule_dense" in result.output


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("santa_budget=.nan", "santa_budget: nan is not a budget; allowed: 8 to 16384 rows"),
        ("santa_budgt=3", "did you mean santa_budget?"),
        ("santa_budget", "--request: 'santa_budget' is not a parameter; allowed: K=V"),
        ("budget=3", "--request: 'budget' is not a santa_* parameter; allowed: santa_method, santa_budget, santa_seed, santa_bernoulli"),
        ("santa_bernoulli=4", "santa_bernoulli: 4 is given with no santa_method"),
        ("santa_method=[", "santa_method: '[' is not a method"),
    ],
)
def test_explain_refuses_what_the_server_refuses(pair, message):
    result = run("policy", "explain", CONFIGS / "default.yaml", "--context", 1000, "--request", pair)
    assert result.exit_code == 1
    assert message in result.output


def test_reference():
    result = run("policy", "reference")
    assert result.exit_code == 0
    assert result.output == policy_reference()


def test_policy_commands_need_neither_torch_nor_vllm():
    program = (
        "import sys; sys.modules |= {'torch': None, 'vllm': None}\n"  # importing either now fails
        "from vllm_santa.cli import app; app()"
    )
    command = [sys.executable, "-c", program, "policy", "explain", str(CONFIGS / "default.yaml"), "--context", "20000"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=CONFIGS.parent)
    assert (result.returncode, result.stderr) == (0, "")
    assert "decision: pps, 512 rows per KV head" in result.stdout
