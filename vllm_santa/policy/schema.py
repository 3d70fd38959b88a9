"""What a policy file may say. docs/policy.md is generated from these models."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import BeforeValidator, field_validator, model_validator

from vllm_santa.methods import MAX_BERNOULLI_SAMPLES, METHOD_NAMES, BernoulliSettings, Method
from vllm_santa.policy import budget as budgets
from vllm_santa.policy.budget import Budget, shown
from vllm_santa.policy.decision import CompiledRule, Condition, Decider, Decision, RowContext
from vllm_santa.policy.fields import LAYERS, BudgetValue, Layer, MethodName, Part, Span, as_tuple, setting
from vllm_santa.policy.parameters import BERNOULLI_METHODS, ERROR_METHODS, ParameterError, RequestParams
from vllm_santa.policy.request_limits import RequestLimits

_ERROR_TEXT = "null, or a number above 0 and up to 1"
_METHOD_TEXT = "one of " + ", ".join(METHOD_NAMES)


class Range(Span):
    """An inclusive range; an end that is left out does not bound."""

    min: int | None = setting(None, "an integer from 0", "Smallest number that matches.", ge=0)
    max: int | None = setting(None, "an integer from 0", "Largest number that matches.", ge=0)


class Bernoulli(Part):
    """Keys are scored by random queries that read only some features of K (SANTA §5). No kernel computes them: a GPU server decodes
    such rows by the reference, slowly. For methods that score every key: santa, strat, sys, prop, flash, pps."""

    samples: int = setting(
        ..., f"an integer from 1 to {MAX_BERNOULLI_SAMPLES}", "B, draws per feature; the more, the closer.", ge=1, le=MAX_BERNOULLI_SAMPLES
    )
    query: Literal["group", "head"] = setting(
        "group", "group or head", "Whether the query heads of a KV head share one draw (mean group query, §5.1) or each draw their own."
    )

    def settings(self) -> BernoulliSettings:
        """As the decision and the reference use them."""
        return BernoulliSettings(self.samples, self.query == "group")


class Rule(Part):
    """Conditions, which must all hold, and what then happens to the row. Conditions that are left out always hold."""

    context: Range = setting(Range(), "min and max in tokens", "Context length of the row in tokens, the current one included.")
    generated: Range = setting(Range(), "min and max in tokens", "Tokens of its answer that the request has generated so far.")
    batch: Range = setting(
        Range(), "min and max in rows", "Decode rows in the step. A rule that looks at it makes answers depend on the load of the server."
    )
    model: str | None = setting(
        None, "a glob pattern, as `*Llama-3*`", "Pattern for the served model's name, whole or its last path component.", min_length=1
    )
    method: MethodName = setting(..., _METHOD_TEXT, "Decode method of the rows that the rule matches.")
    budget: BudgetValue | None = setting(None, budgets.ALLOWED, "Budget of the method; left out, it is `default_budget`.")

    bernoulli: Bernoulli | None = setting(
        None, "samples and query", "Bernoulli queries of the method; a request that names a method says for itself whether it wants them."
    )
    max_error: float | None = setting(
        None,
        _ERROR_TEXT,
        "Error target: the budget is raised or lowered, within the limits for requests, to hold the estimated relative error of the "
        "attention output under it. Left out, it is `default_max_error`. A request that names a method or a budget has a target only if "
        "it names that too.",
        gt=0,
        le=1,
    )

    @model_validator(mode="after")
    def _bernoulli_suits_the_method(self) -> "Rule":
        if self.bernoulli is not None and not self.method.scores_exactly:
            raise ValueError(f"{self.method.name} has no bernoulli; allowed: with {', '.join(BERNOULLI_METHODS)}")
        return self

    @model_validator(mode="after")
    def _error_can_be_estimated(self) -> "Rule":
        if self.max_error is not None and not self.method.estimates_error:
            raise ValueError(f"{self.method.name} has no max_error; allowed: with {', '.join(ERROR_METHODS)}")
        if self.max_error is not None and self.bernoulli is not None:
            raise ValueError("max_error beside bernoulli, whose own error the sampled rows do not tell; allowed: one of them")
        return self

    @model_validator(mode="after")
    def _dense_has_no_budget(self) -> "Rule":
        if self.method is Method.dense and self.budget is not None:
            raise ValueError("a dense rule has no budget")
        return self

    def compiled(self, default_budget: Budget, default_max_error: float | None = None) -> CompiledRule:
        """The rule as the decision uses it."""
        named = ((RowContext._fields.index(name), getattr(self, name)) for name in ("context", "generated", "batch"))
        conditions = tuple(Condition(field, int(span.low), span.high) for field, span in named if span != Range())
        bernoulli = None if self.bernoulli is None else self.bernoulli.settings()
        max_error = default_max_error if self.max_error is None else self.max_error
        if bernoulli is not None or not self.method.estimates_error:
            max_error = None
        return CompiledRule(conditions, self.model, self.method, self.budget or default_budget, bernoulli, max_error)


class Policy(Part):
    """How a server decodes: rules, the windows and constants of the methods, and what requests may change."""

    rules: Annotated[tuple[Rule, ...], BeforeValidator(as_tuple)] = setting(
        (), "a list of rules", "The first rule whose conditions hold decides; a row that none matches is dense."
    )
    default_method: MethodName = setting(
        Method.pps,
        "one of " + ", ".join(METHOD_NAMES[1:]),
        "Method of a request that gives a budget but no method, on a row that the rules leave dense.",
    )
    default_budget: BudgetValue = setting(
        Budget(512),
        budgets.ALLOWED,
        "Budget of rules without one, and of requests that give only a method on a row that the rules leave dense.",
    )
    default_max_error: float | None = setting(
        None, _ERROR_TEXT, "Error target of rules without one whose method estimates its error.", gt=0, le=1
    )
    dense_layers: Annotated[tuple[Layer, ...], BeforeValidator(as_tuple)] = setting(
        (), "a list of layer numbers and ranges, as [0, '2-4', -1]", "Layers that stay dense; negative numbers count from the last layer."
    )
    sink: int = setting(128, "an integer from 0 to 65536", "First tokens that methods with codes always read.", ge=0, le=65536)
    local: int = setting(128, "an integer from 0 to 65536", "Last tokens that methods with codes always read.", ge=0, le=65536)
    heavy_fraction: float = setting(
        0.4, "a number from 0 to 1", "Part of the budget that `ssa_fixed` and `uniform_tail` spend on the largest proxy scores.", ge=0, le=1
    )
    uniform_share: float = setting(
        0.02, "a number from 0, below 1", "Share of uniform mass in the proxies that `ssa` samples from; it bounds the weights.", ge=0, lt=1
    )
    base_seed: int | None = setting(
        None,
        "null, or an integer from -2^63 to 2^64 - 1",
        "Seed of requests that bring none; null draws one for each request.",
        ge=-(2**63),
        lt=2**64,
    )
    prefix_cache: Literal["share", "separate"] = setting(
        "share",
        "share or separate",
        "Whether requests that read everything may find keys and values in the prefix cache that sparse decode steps have written.",
    )
    requests: RequestLimits = setting(RequestLimits(), "limits", "What requests may choose for themselves.")
    codebooks: str | None = setting(
        None,
        "null, or the path of a safetensors file",
        "PQ codebooks of the methods with codes, relative to the policy file; null trains them from the first long prompts.",
        min_length=1,
    )
    subspaces: Literal[8, 16, 32] = setting(16, "8, 16 or 32", "Subspaces of codebooks that the server trains: bytes of code a key.")
    training_tokens: int = setting(
        4096, "an integer from 256 to 1048576", "Tokens that the server collects to train codebooks.", ge=256, le=2**20
    )

    workspace_tokens: int = setting(
        2**22,
        "an integer from 65536 to 2^31 - 1",
        "Context tokens that the CUDA kernels' buffers hold, shared by the rows of a step: with R rows, rounded up to a power of two, a "
        "row of more than workspace_tokens / R tokens is dense.",
        ge=2**16,
        lt=2**31,
    )

    @field_validator("default_method")
    @classmethod
    def _default_is_sparse(cls, method: Method) -> Method:
        if method is Method.dense:
            raise ValueError("dense has no budget")
        return method

    @cached_property
    def decider(self) -> Decider:
        rules = [rule.compiled(self.default_budget, self.default_max_error) for rule in self.rules]
        windows = self.sink + self.local
        return Decider(rules, self.default_method, self.default_budget, self.requests.rows, windows)

    def decide(self, row: RowContext, request: RequestParams | None = None) -> Decision:
        """Method and budget of one decode row, and why."""
        return self.decider(row, request)

    def possible_methods(self) -> frozenset[Method]:
        """Every method that a row can get, dense included: what a server must be able to run."""
        methods = {Method.dense, *(rule.method for rule in self.rules)}
        if self.requests.allow:
            methods |= {self.default_method, *self.requests.methods}
        return frozenset(methods)

    @property
    def needs_reference(self) -> bool:
        """True if a rule wants what no kernel computes: Bernoulli queries, or the error of a sampler of values."""
        rules = self.decider.rules
        return any(rule.bernoulli is not None or (rule.max_error is not None and rule.method.samples_values) for rule in rules)

    @property
    def sets_targets(self) -> bool:
        """True if a rule has an error target."""
        return any(rule.max_error is not None for rule in self.decider.rules)

    @property
    def allows_targets(self) -> bool:
        """True if some row can get an error target."""
        return self.sets_targets or (self.requests.allow and self.requests.max_error)

    def check_target(self, request: RequestParams, kernels_only: bool) -> None:
        """Refuse an error target where a row of the request may get a method that cannot have one. kernels_only: no reference decodes.

        Raises:
            ParameterError: names the parameter, its value, the reason and what is allowed.
        """
        if request.max_error is None:
            return
        rules = [] if request.method is not None else [rule for rule in self.decider.rules if rule.method is not Method.dense]
        methods = {request.method or self.default_method, *(rule.method for rule in rules)}
        reason = ""
        if unknown := sorted(method for method in methods if not method.estimates_error):
            reason = f"rows may get {unknown[0].name}, which takes no row by chance, so its rows do not tell its error"
        elif any(rule.bernoulli is not None for rule in rules):
            reason = "rows may get Bernoulli queries, whose own error the sampled rows do not tell"
        elif kernels_only and (slow := sorted(method for method in methods if method.samples_values)):
            reason = f"rows may get {slow[0].name}, whose error no kernel computes, and this server decodes from CUDA graphs"
        if reason:
            allowed = [name for name in ERROR_METHODS if not (kernels_only and Method[name].samples_values)]
            text = f"santa_max_error: {request.max_error:g} is refused, since {reason}; allowed: with santa_method {', '.join(allowed)}"
            raise ParameterError("santa_max_error", text)

    @property
    def needs_codes(self) -> bool:
        """True if some row can get a method that scores keys by their PQ codes."""
        return any(method.needs_codes for method in self.possible_methods())

    def warnings(self) -> list[str]:
        """What the policy may say but hardly means, a sentence each."""
        found = []
        if self.heavy_fraction in (0, 1):
            found.append(
                f"heavy_fraction: {self.heavy_fraction:g} leaves ssa_fixed and uniform_tail without "
                + ("their heavy set" if self.heavy_fraction == 0 else "samples beside the heavy set")
                + "; answers from 0.2 to 0.8 were clearly better (SSA, ablation of h)"
            )
        for index, rule in enumerate(self.rules[:-1]):
            if rule.model_copy(update={"budget": None}) == Rule(method=rule.method):
                found.append(f"rules[{index}] has no conditions, so the rules after it are never tried")
                break
        return found

    def dense_layer_set(self, num_layers: int) -> frozenset[int]:
        """`dense_layers` as indices from 0 to num_layers - 1.

        Raises:
            ValueError: a layer that the model does not have, or a range that runs backwards.
        """
        found: set[int] = set()
        for entry in self.dense_layers:
            ends = LAYERS.fullmatch(entry).groups() if isinstance(entry, str) else (entry, entry)  # type: ignore[union-attr]
            first, last = (number + num_layers if number < 0 else number for number in map(int, ends))
            if not 0 <= first <= last < num_layers:
                raise ValueError(
                    f"dense_layers: {shown(entry)} does not fit a model of {num_layers} layers; "
                    f"allowed: layers {-num_layers} to {num_layers - 1}, and ranges that run forward"
                )
            found.update(range(first, last + 1))
        return frozenset(found)

    def max_budget(self, max_model_len: int) -> int:
        """The most rows that any rule or request can get at contexts up to max_model_len tokens: what buffers must hold."""
        budgets_ = [self.default_budget, *(rule.budget for rule in self.rules if rule.budget)]
        if self.requests.allow or self.sets_targets:
            budgets_ += [Budget(self.requests.budget.max), self.requests.fraction.max]
        return max(budget.rows(max_model_len) for budget in budgets_)
