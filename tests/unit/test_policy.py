import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vllm_santa.methods import METHOD_NAMES, BernoulliSettings, Method
from vllm_santa.policy import (
    Decision,
    Policy,
    PolicyError,
    RowContext,
    default_policy_path,
    load_policy,
    policy_of,
    policy_path,
    served_model,
)
from vllm_santa.policy.budget import MAX_ROWS, Budget
from vllm_santa.policy.decision import REASONS, ErrorTarget
from vllm_santa.policy.file import parse_policy
from vllm_santa.policy.parameters import ParameterError, RequestParams
from vllm_santa.policy.reference_page import policy_reference

ROOT = Path(__file__).parents[2]


def policy(text: str) -> Policy:
    return parse_policy(text, "p.yaml")


# Budgets


@pytest.mark.parametrize(
    ("value", "context", "rows"),
    [(512, 10**6, 512), ("128", 1000, 128), ("2%", 1000, 20), (0.02, 1001, 21), ("7%", 100, 7), ("0.1%", 10, 1), (".5 %", 1000, 5)]
    + [("50%", 10**7, MAX_ROWS)],
)
def test_budget_rows(value, context, rows):
    assert Budget.parse(value).rows(context) == rows


@pytest.mark.parametrize(
    "value",
    [0, -1, True, None, 0.0, 1.0, -0.5, 1.5, 512.0, math.nan, math.inf, -math.inf, 1e-12, [1], {"a": 1}, b"2%"]
    + [
        "",
        "0",
        "x",
        "100%",
        "0%",
        "-2%",
        "2%%",
        "0.02",
        "1e3",
        "\u0663",
        pytest.param("9" * 5000, id="long"),
        pytest.param(-(10**5000), id="huge"),
    ],
)
def test_bad_budgets_name_field_value_and_what_is_allowed(value):
    with pytest.raises(ValueError, match=r"(?s)^santa_budget: .+ is not a budget; allowed: rows as an integer from 1") as caught:
        Budget.parse(value, "santa_budget")
    assert len(str(caught.value)) < 300


@given(st.integers(1, 10**9 - 1), st.integers(1, 10**8))
def test_fractions_round_up_exactly(parts, context):
    exact = -(-parts * context // 10**9)
    assert Budget(0, parts).rows(context) == min(exact, MAX_ROWS)
    assert Budget.parse(Budget(0, parts).fraction) == Budget(0, parts)


# Decisions

RULES = """
rules:
  - context: {min: 100, max: 200}
    generated: {min: 10}
    method: ssa
    budget: 10
  - {context: {min: 1000}, model: "*llama*", method: sys, budget: 5%}
  - {context: {min: 1000}, batch: {max: 4}, method: pps}
  - {context: {min: 5000}, method: dense}
default_method: prop
default_budget: 64
sink: 8
local: 8
"""


@pytest.mark.parametrize(
    ("row", "method", "budget", "reason"),
    [
        (RowContext(100, 10), "ssa", 10, "rule"),
        (RowContext(200, 10), "ssa", 10, "rule"),
        (RowContext(99, 10), "dense", 0, "no_rule"),
        (RowContext(201, 10), "dense", 0, "no_rule"),
        (RowContext(150, 9), "dense", 0, "no_rule"),
        (RowContext(2000, model="meta/llama-3"), "sys", 100, "rule"),
        (RowContext(2000, model="/models/my-llama/"), "sys", 100, "rule"),
        (RowContext(2000, model="qwen"), "pps", 64, "rule"),
        (RowContext(2000, batch=5, model="qwen"), "dense", 0, "no_rule"),
        (RowContext(5000, batch=5, model="qwen"), "dense", 0, "rule_dense"),
    ],
)
def test_first_matching_rule_decides(row, method, budget, reason):
    assert policy(RULES).decide(row) == Decision(Method[method], budget, reason)


@pytest.mark.parametrize(
    ("context", "asked", "method", "budget", "reason"),
    [
        (2000, RequestParams(), "pps", 64, "rule"),
        (2000, RequestParams(seed=1), "pps", 64, "rule"),
        (2000, RequestParams(method=Method.dense, budget=Budget(9)), "dense", 0, "request_dense"),
        (2000, RequestParams(method=Method.topk), "topk", 64, "request"),
        (2000, RequestParams(budget=Budget(9)), "pps", 9, "request"),
        (2000, RequestParams(Method.flash, Budget.parse("1%")), "flash", 20, "request"),
        (500, RequestParams(budget=Budget(9)), "prop", 9, "request"),
        (500, RequestParams(method=Method.ssa), "ssa", 64, "request"),
    ],
)
def test_request_overrides(context, asked, method, budget, reason):
    assert policy(RULES).decide(RowContext(context), asked) == Decision(Method[method], budget, reason)


def test_budget_that_covers_the_context_is_dense():
    rules = policy(RULES)
    covered = Decision(Method.dense, 0, "budget_covers_context")
    assert rules.decide(RowContext(80), RequestParams(Method.ssa, Budget(64))) == covered  # 64 + 8 + 8
    assert rules.decide(RowContext(81), RequestParams(Method.ssa, Budget(64))).method is Method.ssa
    assert rules.decide(RowContext(64), RequestParams(Method.pps, Budget(64))) == covered
    assert rules.decide(RowContext(65), RequestParams(Method.pps, Budget(64))).method is Method.pps  # pps has no windows
    assert rules.decide(RowContext(10), RequestParams(Method.santa, Budget(64))).method is Method.santa  # draws never cover


BERNOULLI = "rules: [{context: {min: 100}, method: prop, budget: 8, bernoulli: {samples: 4}}]"


@pytest.mark.parametrize(
    ("context", "asked", "method", "bernoulli"),
    [
        (100, RequestParams(), "prop", BernoulliSettings(4, True)),
        (100, RequestParams(budget=Budget(9)), "prop", BernoulliSettings(4, True)),
        (100, RequestParams(method=Method.prop), "prop", None),  # who names the method says what goes with it
        (100, RequestParams(method=Method.ssa), "ssa", None),
        (100, RequestParams(Method.flash, bernoulli=BernoulliSettings(2, False)), "flash", BernoulliSettings(2, False)),
        (99, RequestParams(), "dense", None),
        (99, RequestParams(budget=Budget(9)), "pps", None),
        (99, RequestParams(method=Method.dense), "dense", None),
    ],
)
def test_bernoulli_queries_go_with_the_method(context, asked, method, bernoulli):
    windowless = policy(BERNOULLI + "\nsink: 0\nlocal: 0\ndefault_budget: 8")
    decision = windowless.decide(RowContext(context), asked)
    assert (decision.method.name, decision.bernoulli) == (method, bernoulli)


def test_bernoulli_queries_of_heads():
    rule = policy("rules: [{method: sys, bernoulli: {samples: 3, query: head}}]").rules[0]
    assert rule.compiled(Budget(1)).bernoulli == BernoulliSettings(3, False)


def test_a_budget_that_covers_the_context_leaves_bernoulli_queries():
    asked = RequestParams(Method.pps, Budget(64), bernoulli=BernoulliSettings(2))
    assert policy("rules: []").decide(RowContext(10), asked) == Decision(Method.pps, 64, "request", BernoulliSettings(2))


@given(st.builds(RowContext, st.integers(1, 10**6), st.integers(0, 100), st.integers(1, 8), st.sampled_from(["", "llama", "a/llama"])))
def test_explanation_agrees_with_decision(row):
    rules = policy(RULES)
    met = [index for index, rule in enumerate(rules.decider.rules) if rule.mismatch(row) is None]
    decision = rules.decide(row)
    assert decision.reason in REASONS
    if not met:
        assert decision.reason == "no_rule"
    elif decision.reason == "rule":
        assert decision.method is rules.rules[met[0]].method


# Layers and buffers


@pytest.mark.parametrize(
    ("layers", "found"), [("[]", set()), ("[0, -1]", {0, 11}), ("[0-1, 4]", {0, 1, 4}), ("['-2--1']", {10, 11}), ("['3--9']", {3})]
)
def test_dense_layers(layers, found):
    assert policy(f"dense_layers: {layers}").dense_layer_set(12) == found


@pytest.mark.parametrize("layers", ["[12]", "[-13]", "['5-2']", "['0-12']"])
def test_dense_layers_that_do_not_fit_the_model(layers):
    with pytest.raises(ValueError, match=r"dense_layers: .* does not fit a model of 12 layers; allowed: layers -12 to 11"):
        policy(f"dense_layers: {layers}").dense_layer_set(12)


def test_max_budget_bounds_every_decision():
    limits = "requests: {allow: false}\nrules: [{method: ssa, budget: 5%}]"
    assert policy(limits).max_budget(100_000) == 5000
    assert policy(limits).max_budget(1000) == 512  # the default budget
    assert policy("rules: []").max_budget(1000) == 16384  # what requests may ask for


# Error targets

TARGETS = """
rules:
  - {context: {min: 5000}, method: topk, budget: 64}
  - {context: {min: 1000}, method: pps, budget: 5%, max_error: 0.1}
  - {context: {min: 500}, method: sys, budget: 32}
default_max_error: 0.2
default_budget: 64
requests: {budget: {min: 16, max: 300}, fraction: {min: 1%, max: 20%}}
"""


@pytest.mark.parametrize(
    ("context", "asked", "target"),
    [
        (2000, RequestParams(), ErrorTarget(0.1, 20, 400)),
        (600, RequestParams(), ErrorTarget(0.2, 16, 300)),
        (6000, RequestParams(), None),
        (400, RequestParams(), None),
        (2000, RequestParams(budget=Budget(64)), None),
        (2000, RequestParams(Method.ssa), None),
        (2000, RequestParams(max_error=0.03), ErrorTarget(0.03, 20, 400)),
        (2000, RequestParams(budget=Budget(100), max_error=0.03), ErrorTarget(0.03, 16, 300)),
        (400, RequestParams(max_error=0.03), ErrorTarget(0.03, 16, 300)),
        (2000, RequestParams(Method.ssa, Budget(9), max_error=0.03), ErrorTarget(0.03, 9, 300)),
        (2000, RequestParams(Method.ssa, Budget(999), max_error=0.03), ErrorTarget(0.03, 16, 999)),
        (6000, RequestParams(max_error=0.03), None),
    ],
)
def test_error_targets(context, asked, target):
    """The limits of the budget are those for requests, moved where the starting budget itself is outside."""
    assert policy(TARGETS).decide(RowContext(context), asked).target == target


def test_budgets_of_targets_are_settled_as_others():
    decider = policy(TARGETS).decider
    decision = decider(RowContext(2000))
    assert decider.with_budget(decision, 200, 2000) == decision._replace(budget=200)
    assert decider.with_budget(decision, 2000, 2000).reason == "budget_covers_context"


def test_what_targets_ask_of_a_server():
    plain, ruled = policy("rules: [{method: pps}]\nrequests: {allow: false}"), policy("rules: [{method: pps, max_error: 0.1}]")
    assert not plain.sets_targets and not plain.allows_targets and policy("").allows_targets
    assert ruled.sets_targets and not ruled.needs_reference and policy("rules: [{method: sys, max_error: 0.1}]").needs_reference
    assert policy("default_max_error: 0.1\nrules: [{method: topk}]").sets_targets is False
    assert policy("rules: [{method: pps, max_error: 0.1}]\nrequests: {allow: false, budget: {max: 999}}").max_budget(9999) > 998
    assert not policy("requests: {max_error: false}").allows_targets


@pytest.mark.parametrize(
    ("text", "asked", "kernels_only", "message"),
    [
        (TARGETS, RequestParams(max_error=0.1), False, "santa_max_error: 0.1 is refused, since rows may get topk, which takes no row by"),
        (TARGETS, RequestParams(Method.pps, max_error=0.1), True, None),
        (TARGETS, RequestParams(Method.sys, max_error=0.1), False, None),
        (TARGETS, RequestParams(Method.sys, max_error=0.1), True, "rows may get sys, whose error no kernel computes"),
        ("rules: [{method: pps, bernoulli: {samples: 2}}]", RequestParams(max_error=0.1), False, "rows may get Bernoulli queries"),
        ("default_method: topk", RequestParams(max_error=0.1), False, "rows may get topk"),
        ("default_method: sys", RequestParams(max_error=0.1), True, "allowed: with santa_method pps, ssa, ssa_fixed, uniform_tail"),
        ("", RequestParams(max_error=0.1), True, None),
        (TARGETS, RequestParams(Method.topk), True, None),
    ],
)
def test_targets_that_some_row_could_not_have_are_refused(text, asked, kernels_only, message):
    if message is None:
        policy(text).check_target(asked, kernels_only)
    else:
        with pytest.raises(ParameterError) as caught:
            policy(text).check_target(asked, kernels_only)
        assert message in str(caught.value) and "; allowed: with santa_method " in str(caught.value)


# Errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules:\n- method: pps\n  budget: 0", "p.yaml:3: rules[0].budget: 0: not a budget; allowed: rows as an integer from 1 to 262144"),
        ("default_budget: 262145", "p.yaml:1: default_budget: 262145: not a budget; allowed: rows as an integer from 1 to 262144"),
        ("rules:\n- method: ppss", "p.yaml:2: rules[0].method: 'ppss': not a method; allowed: one of dense, santa"),
        ("rules:\n- budget: 3", "p.yaml:2: rules[0].method: is missing; allowed: one of dense"),
        ("rules:\n- {method: dense, budget: 3}", "p.yaml:2: rules[0]: {'method': 'dense', 'budget': 3}: a dense rule has no budget"),
        ("rules:\n- method: ssa\n  context: {min: 5, max: 4}", "p.yaml:3: rules[0].context: {'min': 5, 'max': 4}: min 5 is above max 4"),
        ("rules: [{method: ssa, bernoulli: {samples: 2}}]", "ssa has no bernoulli; allowed: with santa, strat, sys, prop, flash, pps"),
        ("rules: [{method: dense, bernoulli: {samples: 2}}]", "p.yaml:1: dense has no bernoulli; allowed: with santa"),
        ("rules:\n- method: pps\n  bernoulli: {query: head}", "p.yaml:3: rules[0].bernoulli.samples: is missing; allowed: an integer"),
        ("rules:\n- method: pps\n  bernoulli: 4", "p.yaml:3: rules[0].bernoulli: 4: input should be a valid dictionary"),
        ("rules: [{method: pps, bernoulli: {samples: 0}}]", "rules[0].bernoulli.samples: 0: input should be greater than or equal to 1"),
        ("rules: [{method: pps, bernoulli: {samples: 262145}}]", "rules[0].bernoulli.samples: 262145: input should be less than or"),
        (
            "rules: [{method: pps, bernoulli: {samples: 1, query: all}}]",
            "rules[0].bernoulli.query: 'all': input should be 'group' or 'head'",
        ),
        (
            "rules:\n- method: pps\n  max_error: 0",
            "p.yaml:3: rules[0].max_error: 0: input should be greater than 0; allowed: null, or a number",
        ),
        ("rules: [{method: pps, max_error: 1.5}]", "rules[0].max_error: 1.5: input should be less than or equal to 1"),
        ("rules: [{method: pps, max_error: .nan}]", "rules[0].max_error: nan: input should be"),
        ("rules: [{method: pps, max_error: 5%}]", "rules[0].max_error: '5%': input should be a valid number"),
        (
            "rules: [{method: topk, max_error: 0.1}]",
            "topk has no max_error; allowed: with santa, strat, sys, prop, flash, pps, ssa, ssa_fixed",
        ),
        ("rules: [{method: dense, max_error: 0.1}]", "dense has no max_error; allowed: with santa"),
        ("rules: [{method: pps, max_error: 0.1, bernoulli: {samples: 2}}]", "max_error beside bernoulli"),
        ("default_max_error: -1", "p.yaml:1: default_max_error: -1: input should be greater than 0"),
        ("rules: [{method: pps, bernoulli: {sample: 1}}]", "allowed: samples, query; did you mean samples?"),
        ("sink: 1\n\nheavy_fracton: 0.5", "p.yaml:3: heavy_fracton: unknown field (value 0.5); allowed: rules, default_method"),
        ("heavy_fracton: 0.5", "did you mean heavy_fraction?"),
        ("requests:\n  over_limits: clamp", "p.yaml:2: requests.over_limits: unknown field (value 'clamp'); allowed: allow, methods"),
        ("requests:\n  methods: [pps, ppp]", "p.yaml:2: requests.methods[1]: 'ppp': not a method; allowed: a list of methods"),
        ("requests:\n  methods: []", "p.yaml:2: requests.methods: []: empty; allowed: a list of methods"),
        ("requests: {fraction: {max: 3}}", "p.yaml:1: requests.fraction.max: 3: a number of rows, where a fraction is wanted"),
        ("sink: true", "p.yaml:1: sink: True: input should be a valid integer; allowed: an integer from 0 to 65536"),
        ("subspaces: 12", "p.yaml:1: subspaces: 12: input should be 8, 16 or 32"),
        ("dense_layers: [0, first]", "p.yaml:1: dense_layers[1]: 'first': neither a layer number nor a range; allowed: a list of layer"),
        ("default_method: dense", "p.yaml:1: default_method: 'dense': dense has no budget; allowed: one of santa"),
        ("heavy_fraction: .nan", "p.yaml:1: heavy_fraction: nan: input should be"),
        ("sink: 1\nsink: 2", "p.yaml:2: sink: is given twice"),
        ("sink: 1\nlocal: \x01", "p.yaml:2: is not YAML: the character #x0001 is not allowed"),
        ("a: b: c", "p.yaml:1: is not YAML: mapping values are not allowed here"),
        ("[1]", "p.yaml:1: the file is [1]; allowed: a mapping of rules"),
    ],
)
def test_mistakes_name_file_line_field_value_and_what_is_allowed(text, message):
    with pytest.raises(PolicyError) as caught:
        policy(text)
    assert message in str(caught.value)


def test_every_mistake_has_its_line():
    with pytest.raises(PolicyError) as caught:
        policy("sink: -1\nlocal: x\n")
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["1", "2"]


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([*METHOD_NAMES, "2%", "0-1"])
KEYS = st.sampled_from([*Policy.model_fields, "context", "min", "max", "method", "budget", "allow", "methods"]) | st.text(max_size=5)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_mapping_is_a_policy_or_a_policy_error(data):
    text = yaml.safe_dump(data)
    try:
        parsed = policy(text)
    except PolicyError as error:
        assert str(error).startswith("p.yaml:")
    else:
        assert parsed.decide(RowContext(1000)).reason in REASONS


@given(st.text(max_size=40))
def test_any_text_is_a_policy_or_a_policy_error(text):
    try:
        policy(text)
    except PolicyError as error:
        assert str(error).startswith("p.yaml:")


# Files


def test_default_policy_is_the_shipped_file():
    assert default_policy_path() == ROOT / "configs" / "default.yaml"
    assert load_policy() == load_policy(str(ROOT / "configs" / "default.yaml"))
    assert load_policy().decide(RowContext(200_000)) == Decision(Method.pps, 512, "rule")
    assert load_policy().decide(RowContext(1000)).method is Method.dense


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_policies_are_used_and_without_warnings(path):
    shipped = load_policy(str(path))
    assert shipped.rules
    assert shipped.warnings() == []
    assert shipped.decide(RowContext(200_000)).reason == "rule"


def test_warnings():
    assert "heavy_fraction: 0 leaves" in policy("heavy_fraction: 0").warnings()[0]
    assert "heavy_fraction: 1 leaves" in policy("heavy_fraction: 1.0").warnings()[0]
    shadowed = policy("rules: [{method: ssa}, {method: pps}]")
    assert shadowed.warnings() == ["rules[0] has no conditions, so the rules after it are never tried"]


def test_unreadable_files(tmp_path):
    with pytest.raises(PolicyError, match="cannot be read: No such file"):
        load_policy(str(tmp_path / "none.yaml"))
    with pytest.raises(PolicyError, match="cannot be read: Is a directory"):
        load_policy(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"# \xe9")
    with pytest.raises(PolicyError, match="is not UTF-8"):
        load_policy(str(tmp_path / "latin.yaml"))


def test_codebooks_are_beside_the_policy(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("codebooks: c.safetensors")
    with pytest.raises(PolicyError, match=r"p.yaml: codebooks: no such file: .*c.safetensors"):
        load_policy(str(file))
    (tmp_path / "c.safetensors").touch()
    assert load_policy(str(file)).codebooks == str(tmp_path / "c.safetensors")


def config(additional, **model):
    return SimpleNamespace(additional_config=additional, model_config=SimpleNamespace(**model))


def test_policy_path(monkeypatch, tmp_path):
    monkeypatch.delenv("SANTA_POLICY", raising=False)
    path = str(tmp_path / "a.yaml")
    assert policy_path(config({})) is None
    assert policy_path(config({"other": 1})) is None
    assert policy_path(config({"santa": {"policy": path}})) == path
    monkeypatch.setenv("SANTA_POLICY", path)
    assert policy_path(config({})) == path
    assert policy_path(config({"santa": {"policy": path}})) == path
    with pytest.raises(PolicyError, match="two policies: SANTA_POLICY=.*a.yaml and .*b.yaml"):
        policy_path(config({"santa": {"policy": "b.yaml"}}))
    (tmp_path / "a.yaml").write_text("sink: 3")
    assert policy_of(config({})).sink == 3


@pytest.mark.parametrize(
    ("santa", "message"),
    [
        ({"polcy": "x"}, "santa.polcy is unknown .*allowed: policy; did you mean policy"),
        ("x", "santa is 'x'; allowed"),
        ({"policy": 3}, "santa.policy is 3; allowed: the path"),
        ({"policy": ""}, "santa.policy is ''; allowed: the path"),
    ],
)
def test_additional_config_mistakes(monkeypatch, santa, message):
    monkeypatch.delenv("SANTA_POLICY", raising=False)
    with pytest.raises(PolicyError, match=message):
        policy_path(config({"santa": santa}))


def test_served_model():
    assert served_model(config({}, served_model_name="a", model="/m")) == "a"
    assert served_model(config({}, served_model_name=["a", "b"], model="/m")) == "a"
    assert served_model(config({}, served_model_name=None, model="/m")) == "/m"


def test_reference_is_current():
    page = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    assert page == policy_reference(), "run: vllm-santa policy reference > docs/policy.md"
