import importlib.metadata
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_santa import front
from vllm_santa.methods import METHOD_NAMES, BernoulliSettings, Method
from vllm_santa.policy import PolicyError, load_policy
from vllm_santa.policy.budget import Budget
from vllm_santa.policy.decision import ErrorTarget
from vllm_santa.policy.file import parse_policy
from vllm_santa.policy.parameters import PARAMETERS, ParameterError, RequestParams, parse, parse_lenient
from vllm_santa.request import SantaParams, processor_for

LIMITS = load_policy().requests
NARROW = parse_policy("requests: {methods: [dense, pps], budget: {min: 10, max: 20}, fraction: {min: 1%, max: 5%}}", "p").requests


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    monkeypatch.setattr(front, "_facts", None)
    monkeypatch.delenv("SANTA_POLICY", raising=False)


# Reading


@pytest.mark.parametrize(
    ("extra_args", "params"),
    [
        (None, RequestParams()),
        ({}, RequestParams()),
        ({"other": object(), 3: 4}, RequestParams()),
        ({"santa_method": "pps"}, RequestParams(method=Method.pps)),
        ({"santa_method": "dense"}, RequestParams(method=Method.dense)),
        ({"santa_budget": 128}, RequestParams(budget=Budget(128))),
        ({"santa_budget": "128"}, RequestParams(budget=Budget(128))),
        ({"santa_budget": "2%"}, RequestParams(budget=Budget(0, 20_000_000))),
        ({"santa_budget": 0.02}, RequestParams(budget=Budget(0, 20_000_000))),
        ({"santa_seed": 7}, RequestParams(seed=7)),
        ({"santa_seed": -1}, RequestParams(seed=2**64 - 1)),
        ({"santa_seed": -(2**63)}, RequestParams(seed=2**63)),
        ({"santa_seed": 2**64 - 1}, RequestParams(seed=2**64 - 1)),
        ({"santa_method": "ssa", "santa_budget": 8, "santa_seed": 0}, RequestParams(Method.ssa, Budget(8), 0)),
        ({"santa_method": "pps", "santa_bernoulli": 4}, RequestParams(Method.pps, bernoulli=BernoulliSettings(4))),
        ({"santa_bernoulli": "16", "santa_method": "santa"}, RequestParams(Method.santa, bernoulli=BernoulliSettings(16))),
        (
            {"santa_method": "flash", "santa_bernoulli": 1 << 18, "santa_bernoulli_query": "head"},
            RequestParams(Method.flash, bernoulli=BernoulliSettings(1 << 18, mean_group=False)),
        ),
        (
            {"santa_method": "sys", "santa_bernoulli": 1, "santa_bernoulli_query": "group"},
            RequestParams(Method.sys, bernoulli=BernoulliSettings(1)),
        ),
        ({"santa_max_error": 0.05}, RequestParams(max_error=0.05)),
        ({"santa_max_error": "0.05", "santa_method": "ssa"}, RequestParams(Method.ssa, max_error=0.05)),
        ({"santa_max_error": " 5 %", "santa_budget": "2%"}, RequestParams(budget=Budget(0, 20_000_000), max_error=0.05)),
        ({"santa_max_error": 1, "santa_method": "uniform_tail"}, RequestParams(Method.uniform_tail, max_error=1.0)),
    ],
)
def test_good_parameters(extra_args, params):
    assert parse(extra_args, LIMITS) == params
    assert parse_lenient(extra_args, LIMITS) == (params, 0)


REFUSED = (
    [
        (
            {"santa_budgt": 5},
            "santa_budgt: unknown parameter (value 5); allowed: santa_method, santa_budget, santa_seed, santa_bernoulli, "
            "santa_bernoulli_query, santa_max_error; did you mean santa_budget?",
        ),
        ({"santa_": 5}, "santa_: unknown parameter (value 5); allowed: santa_method"),
        ({"santa_bernoulli": 4}, "santa_bernoulli: 4 is given with no santa_method; allowed: with santa_method santa, strat, sys"),
        ({"santa_bernoulli_query": "head"}, "santa_bernoulli_query: 'head' is given without santa_bernoulli; allowed: both, or neither"),
        ({"santa_bernoulli_query": "heads"}, "santa_bernoulli_query: 'heads' is not a query; allowed: group, head"),
        ({"santa_bernoulli_query": 1}, "santa_bernoulli_query: 1 is not a query"),
        ({"santa_method": "ppss"}, "santa_method: 'ppss' is not a method; allowed: dense, santa, strat"),
        ({"santa_method": "PPS"}, "santa_method: 'PPS' is not a method"),
        ({"santa_method": 1}, "santa_method: 1 is not a method"),
        ({"santa_method": ["pps"]}, "santa_method: ['pps'] is not a method"),
        ({"santa_method": None}, "santa_method: None is not a method"),
        ({"santa_seed": 1.0}, "santa_seed: 1.0 is not a seed; allowed: an integer from -2^63 to 2^64 - 1"),
        ({"santa_seed": "7"}, "santa_seed: '7' is not a seed"),
        ({"santa_seed": True}, "santa_seed: True is not a seed"),
        ({"santa_seed": 2**64}, "santa_seed: 18446744073709551616 is not a seed"),
        ({"santa_seed": -(2**63) - 1}, "santa_seed: -9223372036854775809 is not a seed"),
    ]
    + [
        (
            {"santa_budget": value},
            f"santa_budget: {value!r} is not a budget; allowed: 8 to 16384 rows, or a fraction of the context from 0.001 (0.1%)",
        )
        for value in (0, -3, 0.0, -0.1, 1.0, 1.5, math.nan, math.inf, True, "many", "100%", [5], [[5]], {"rows": 5}, None)
    ]
    + [
        ({"santa_bernoulli": value}, f"santa_bernoulli: {value!r} is not a number of samples; allowed: an integer from 1 to 262144")
        for value in (0, -3, 1.0, 0.5, (1 << 18) + 1, math.nan, True, "many", "0", "2%", "-4", [5], {"samples": 5}, None)
    ]
    + [
        ({"santa_max_error": value}, f"santa_max_error: {value!r} is not an error; allowed: a number above 0 and up to 1, as 0.05 or '5%'")
        for value in (
            0,
            0.0,
            -0.1,
            1.1,
            2,
            math.nan,
            math.inf,
            True,
            "many",
            "0",
            "0%",
            "101%",
            "-1",
            "nan",
            "1e-2",
            [0.1],
            {"max": 1},
            None,
        )
    ]
)


@pytest.mark.parametrize(("extra_args", "message"), REFUSED)
def test_refused_parameters_name_field_value_and_what_is_allowed(extra_args, message):
    with pytest.raises(ValueError) as caught:
        parse(extra_args, LIMITS)
    assert str(caught.value).startswith(message)
    assert parse_lenient(extra_args, LIMITS) == (RequestParams(), 1)


@pytest.mark.parametrize("method", ["dense", "ssa", "ssa_fixed", "topk", "uniform_tail"])
def test_bernoulli_queries_of_methods_that_have_none(method):
    asked = {"santa_method": method, "santa_bernoulli": 4, "santa_bernoulli_query": "head", "santa_seed": 1}
    allowed = "allowed: with santa_method santa, strat, sys, prop, flash, pps"
    with pytest.raises(ValueError, match=f"^santa_bernoulli: 4 is given with santa_method {method}; {allowed}$"):
        parse(asked, LIMITS)
    assert parse_lenient(asked, LIMITS) == (RequestParams(Method[method], seed=1), 2), "the rest is served"


@pytest.mark.parametrize(("method", "reason"), [("dense", "reads everything"), ("topk", "takes no row by chance")])
def test_error_targets_of_methods_that_cannot_tell(method, reason):
    asked = {"santa_method": method, "santa_max_error": 0.1, "santa_seed": 1}
    with pytest.raises(ParameterError, match=f"^santa_max_error: 0.1 is given with santa_method {method}, which {reason}.*; allowed: with"):
        parse(asked, LIMITS)
    assert parse_lenient(asked, LIMITS) == (RequestParams(Method[method], seed=1), 1), "the rest is served"


def test_error_targets_beside_bernoulli_queries():
    asked = {"santa_method": "pps", "santa_max_error": 0.1, "santa_bernoulli": 4}
    with pytest.raises(ParameterError, match="santa_max_error: 0.1 is given with santa_bernoulli, .*; allowed: one of them"):
        parse(asked, LIMITS)
    assert parse_lenient(asked, LIMITS) == (RequestParams(Method.pps, max_error=0.1), 1)


def test_the_policy_may_refuse_error_targets():
    without = parse_policy("requests: {max_error: false}", "p").requests
    with pytest.raises(
        ParameterError, match="santa_max_error: 0.1 is refused; allowed: nothing, this server's policy has no error targets"
    ):
        parse({"santa_max_error": 0.1}, without)


@pytest.mark.parametrize("value", [4, "4"])
def test_the_policy_may_refuse_bernoulli_queries(value):
    exact = parse_policy("requests: {bernoulli: false}", "p").requests
    with pytest.raises(ValueError, match=f"santa_bernoulli: {value!r} is refused; allowed: nothing, this server's policy has no Bernoulli"):
        parse({"santa_method": "pps", "santa_bernoulli": value}, exact)
    assert parse_lenient({"santa_method": "pps", "santa_bernoulli": value}, exact) == (RequestParams(Method.pps), 1)


@pytest.mark.parametrize(("value", "clamped"), [(9, "10"), (21, "20"), (10**9, "20"), ("0.5%", "1%"), (0.5, "5%")])
def test_over_limit(value, clamped):
    with pytest.raises(ValueError, match=r"santa_budget: .* is outside this server's limits; allowed: 10 to 20 rows, or .*0.01 \(1%\)"):
        parse({"santa_budget": value}, NARROW)
    inside = RequestParams(budget=Budget.parse(clamped))
    assert parse({"santa_budget": value}, NARROW.clamping()) == inside
    assert parse_lenient({"santa_budget": value}, NARROW) == (inside, 0)


def test_json_true_arrives_as_one_and_is_below_the_smallest_budget():
    with pytest.raises(ValueError, match="santa_budget: 1 is outside this server's limits; allowed: 8 to 16384 rows"):
        parse({"santa_budget": 1}, LIMITS)


def test_forbidden_method():
    with pytest.raises(ValueError, match="santa_method: 'ssa' is not allowed by this server's policy; allowed: dense, pps"):
        parse({"santa_method": "ssa"}, NARROW)
    with pytest.raises(ValueError, match="did you mean pps"):
        parse({"santa_method": "ppss"}, NARROW)


def test_requests_may_not_choose():
    closed = parse_policy("requests: {allow: false}", "p").requests
    for key, value in (("santa_method", "pps"), ("santa_budget", 64), ("santa_bernoulli", 4), ("santa_bernoulli_query", "head")):
        with pytest.raises(ValueError, match=f"{key}: {value!r} is refused; .* choose only santa_seed"):
            parse({key: value}, closed)
    assert parse({"santa_seed": 3}, closed) == RequestParams(seed=3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([*METHOD_NAMES, "2%", "64", "head"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
KEYS = st.sampled_from(PARAMETERS) | st.text(max_size=6).map("santa_".__add__) | st.text(max_size=6)


@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_any_parameters_are_read_or_refused_by_name(extra_args):
    lenient, ignored = parse_lenient(extra_args, LIMITS)
    try:
        params = parse(extra_args, LIMITS)
    except ValueError as error:
        assert any(str(error).startswith(repr(key)[1:-1] + ": ") for key in extra_args if key.startswith("santa_"))
    else:
        assert (lenient, ignored) == (params, 0)
        assert params.bernoulli is None or (params.method is not None and params.method.scores_exactly)
        assert params.budget is None or LIMITS.clamp(params.budget) == params.budget
        assert params.seed is None or 0 <= params.seed < 2**64


# The server's door


def config(instance_id="engine", backend="SANTA", additional=None, **kinds):
    per_kind = {kind: SimpleNamespace(name=name) for kind, name in kinds.items()}
    attention = SimpleNamespace(backend=backend and SimpleNamespace(name=backend), backend_per_kind=per_kind)
    parallel = SimpleNamespace(
        enable_dbo=False, prefill_context_parallel_size=1, decode_context_parallel_size=1, pipeline_parallel_size=1
    )  # fmt: skip
    return SimpleNamespace(
        instance_id=instance_id, attention_config=attention, additional_config=additional or {}, parallel_config=parallel,
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False), compilation_config=SimpleNamespace(cudagraph_mode=None),
        speculative_config=None, use_v2_model_runner=False,
    )  # fmt: skip


def sampling(seed=None, **extra_args):
    return SimpleNamespace(seed=seed, extra_args=extra_args or None)


def test_another_backend_refuses_santa_parameters_and_nothing_else():
    pytest.importorskip("vllm")
    front.observe_config(config(backend="FLASHINFER"))
    front.observe_config(config(backend=None))
    SantaParams.validate_params(sampling())
    SantaParams.validate_params(sampling(other=3))
    with pytest.raises(ValueError, match="santa_seed: this server does not run --attention-backend santa"):
        SantaParams.validate_params(sampling(santa_seed=3))


@pytest.mark.parametrize("santa", [config(), config(backend=None, full_attention="SANTA")])
def test_the_door_knows_the_policy(tmp_path, santa):
    pytest.importorskip("vllm")
    (tmp_path / "p.yaml").write_text("requests: {budget: {min: 5, max: 6}}")
    santa.additional_config = {"santa": {"policy": str(tmp_path / "p.yaml")}}
    front.observe_config(santa)
    front.observe_config(config(backend="FLASHINFER"))  # a second engine beside it
    SantaParams.validate_params(sampling(santa_budget=5))
    with pytest.raises(ValueError, match="allowed: 5 to 6 rows"):
        SantaParams.validate_params(sampling(santa_budget=7))


@pytest.mark.parametrize(
    ("speculates", "stages", "v2", "reason"),
    [(False, 1, False, ""), (True, 1, True, ""), (False, 2, False, ""), (True, 1, False, "speculative"), (False, 2, True, "pipeline")],
)
def test_parameters_that_workers_would_not_see_are_refused(speculates, stages, v2, reason):
    pytest.importorskip("vllm")
    santa = config()
    santa.speculative_config = object() if speculates else None
    santa.parallel_config.pipeline_parallel_size, santa.use_v2_model_runner = stages, v2
    front.observe_config(santa)
    SantaParams.validate_params(sampling())
    if reason:
        with pytest.raises(ValueError, match=f"santa_seed, santa_method: cannot be followed with {reason}.*; allowed: no santa_"):
            SantaParams.validate_params(sampling(santa_seed=3, santa_method="pps"))
    else:
        SantaParams.validate_params(sampling(santa_seed=3, santa_method="pps"))


def test_configurations_are_watched_once(monkeypatch):
    platforms = pytest.importorskip("vllm.platforms")
    seen = []

    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config):
            seen.append(vllm_config)

    monkeypatch.setattr(platforms, "current_platform", Platform(), raising=False)
    front.watch_configs()
    front.watch_configs()
    other, santa = config(backend="FLASHINFER"), config()
    Platform.check_and_update_config(other)
    assert front.engine_facts() is None
    Platform.check_and_update_config(santa)
    assert front.engine_facts().policy == load_policy()
    assert seen == [other, santa]
    with pytest.raises(PolicyError, match="/none.yaml: cannot be read"):
        Platform.check_and_update_config(config(additional={"santa": {"policy": "/none.yaml"}}))


@pytest.fixture
def entry_point(monkeypatch):
    """The entry point as an installed package has it, for both of vLLM's loaders."""
    pytest.importorskip("vllm")
    from vllm.v1.sample import logits_processor as v1
    from vllm.v1.worker.gpu.sample.logits_processor import loader as v2

    found = [importlib.metadata.EntryPoint("santa", "vllm_santa.request:SantaParams", "vllm.logits_processors")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    monkeypatch.setattr(v2, "entry_points", lambda group: found)
    caches = (v1.cached_load_custom_logitsprocs, v2._cached_load_v2_logitsprocs)
    for cache in caches:
        cache.cache_clear()
    yield SimpleNamespace(v1=v1, v2=v2)
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_vllm_validates_through_either_loader(entry_point, runner):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    front.observe_config(config())
    if runner == "v1":

        def validate(params):
            entry_point.v1.validate_logits_processors_parameters(None, params)
    else:
        validate = entry_point.v2.build_custom_logits_processors_params_validator(None)
    validate(SamplingParams(extra_args={"santa_budget": "2%", "santa_method": "ssa", "santa_seed": 5}))
    validate(SamplingParams())
    with pytest.raises(VLLMValidationError, match="santa_budget: -5 is not a budget; allowed: 8 to 16384 rows"):
        validate(SamplingParams(extra_args={"santa_budget": -5}))


# In the worker


def test_v1_runner_follows_the_batch(entry_point):
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    built = entry_point.v1.build_logitsprocs(config_v1(), "cpu", False, False)
    processor = next(item for item in built.all if isinstance(item, SantaParams))
    assert processor in built.argmax_invariant
    added = [
        (0, sampling(santa_budget=64), [1] * 5, []),
        (1, sampling(seed=9), None, []),
        (2, sampling(santa_seed=-1, seed=9), [1] * 7, []),
    ]
    processor.update_state(BatchUpdate(batch_size=3, removed=(), added=added, moved=()))
    processor.update_state(None)
    rows = processor.rows_of(SimpleNamespace(num_reqs=4, req_idx=None))
    assert [row and row.prompt_len for row in rows] == [5, None, 7, None]
    assert [row and row.params for row in rows] == [RequestParams(budget=Budget(64)), RequestParams(), RequestParams(seed=2**64 - 1), None]
    assert (rows[1].seed, rows[2].seed, rows[3]) == (9, 2**64 - 1, None)
    swap, shift = (0, 2, MoveDirectionality.SWAP), (2, 1, MoveDirectionality.UNIDIRECTIONAL)
    processor.update_state(BatchUpdate(batch_size=2, removed=[1], added=[], moved=[swap, shift]))
    assert processor.rows_of(SimpleNamespace(num_reqs=3, req_idx=None)) == [rows[2], rows[0], None]


def config_v1():
    santa = config("v1")
    santa.speculative_config = None
    santa.scheduler_config = SimpleNamespace(max_num_seqs=8)
    return santa


def test_v2_runner_keeps_slots(entry_point):
    prompt_lens = np.array([3, 4, 5, 6], dtype=np.int32)
    tensors = dict(device="cpu", max_num_reqs=4, vocab_size=9, all_token_ids=None, total_len=None)
    req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=prompt_lens), prefill_len=SimpleNamespace(np=prompt_lens), **tensors)
    (processor,) = entry_point.v2.build_custom_logits_processors(config("v2"), req_states, is_pooling_model=False)
    assert processor_for(config("v2")) is processor
    assert processor_for(config("v3")) is None
    assert processor.add_request(2, sampling(santa_budget=64, seed=1)) is False
    assert processor.add_request(0, sampling(santa_method="ssa", seed=2)) is False
    rows = processor.rows_of(SimpleNamespace(num_reqs=3, req_idx=np.array([2, 0])))
    assert [row and (row.seed, row.prompt_len) for row in rows] == [(1, 5), (2, 3), None]
    prompt_lens[2] = 9
    processor.add_request(2, sampling(seed=3))  # the slot's next occupant
    assert processor.rows_of(SimpleNamespace(num_reqs=1, req_idx=np.array([2])))[0] == type(rows[0])(RequestParams(), 3, 9)
    processor.apply_staged_writes()
    logits = object()
    assert processor.apply(logits, None) is logits


def new_processor(instance_id="engine", **fields):
    lengths = SimpleNamespace(np=np.arange(8))
    return SantaParams(config(instance_id, **fields), SimpleNamespace(prompt_len=lengths, prefill_len=lengths))


def row_seed(processor, **fields):
    processor.add_request(1, sampling(**fields))
    return processor.rows_of(SimpleNamespace(num_reqs=1, req_idx=np.array([1])))[0].seed


def test_requests_with_a_target_have_a_control_that_outlives_preemption():
    prompt_lens, prefill_lens = np.full(8, 100), np.full(8, 100)
    states = SimpleNamespace(prompt_len=SimpleNamespace(np=prompt_lens), prefill_len=SimpleNamespace(np=prefill_lens))
    processor = SantaParams(config("engine"), states)

    def control(slot, **fields):
        processor.add_request(slot, sampling(**fields))
        return processor.rows_of(SimpleNamespace(num_reqs=1, req_idx=np.array([slot])))[0].control

    assert control(1, santa_budget=64, seed=1) is None
    asked = {"santa_max_error": 0.1, "seed": 1}
    one, two = control(1, **asked), control(2, **asked)
    assert one is not None and one is not two
    for context in range(101, 121):
        one.budget(context, 64, ErrorTarget(0.1, 1, 1000))
    prefill_lens[3] = 121  # 21 tokens of its answer, of which the last one has not been read
    assert control(3, **asked) is one
    assert control(3, **asked | {"seed": 2}) is not one
    assert control(3, santa_max_error=0.1) is not control(3, santa_max_error=0.1), "without a seed it comes back as another request"


def test_seed_precedence(tmp_path):
    (tmp_path / "p.yaml").write_text("base_seed: -2")
    based = new_processor(additional={"santa": {"policy": str(tmp_path / "p.yaml")}})
    assert row_seed(based, seed=5, santa_seed=6) == 6
    assert row_seed(based, seed=5) == 5
    assert row_seed(based, seed=0) == 0
    assert row_seed(based) == 2**64 - 2


def test_drawn_seeds_differ_by_request_and_agree_between_ranks():
    one, two = new_processor(), new_processor()
    drawn = [row_seed(one) for _ in range(4)]
    assert len(set(drawn)) == 4
    assert [row_seed(two) for _ in range(4)] == drawn
    assert row_seed(new_processor("another engine")) != drawn[0]


def test_worker_never_fails_on_parameters():
    processor = new_processor()
    assert row_seed(processor, santa_seed=4, santa_budget=10**9, santa_method="x", santa_x=[{}]) == 4
    row = processor.rows_of(SimpleNamespace(num_reqs=1, req_idx=np.array([1])))[0]
    assert row.params == RequestParams(budget=Budget(LIMITS.budget.max), seed=4)
    assert processor.ignored == 2


def test_workers_of_another_backend_keep_nothing():
    processor = new_processor(backend="FLASHINFER")
    assert processor.add_request(1, sampling(santa_budget=64)) is False
    processor.update_state(object())
    assert processor.rows_of(SimpleNamespace(num_reqs=1, req_idx=np.array([1]))) == [None]
