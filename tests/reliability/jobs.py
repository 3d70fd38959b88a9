"""Random requests of every kind that clients send, and what each must get."""

import random
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from server import MODEL

ADAPTER = "adapter"
LIMIT = 1536
"""Longest context of the server, and the size of its whole KV cache in tokens: one request can need all of it."""
WINDOWS, DEFAULT_BUDGET = 32, 64
"""Sink and local tokens together, and the budget of requests that name only a method, as in POLICY."""
POLICY = """
sink: 16
local: 16
default_method: pps
default_budget: 64
prefix_cache: separate
codebooks: {codebooks}
requests: {{budget: {{min: 4, max: 512}}}}
"""
DRAWS = ("santa", "strat", "sys", "prop", "flash")
CODES = ("ssa", "ssa_fixed", "topk", "uniform_tail")
METHODS = ("dense", "pps", *DRAWS, *CODES)
BUDGETS = (4, 16, 64, 200, 512, "16", 0.02, "10%", "33%", 0.5)
STOPS = tuple("aeo ")
FIRST_CHARACTER = ord("!")
"""That of token 0 of the tiny model; the others of ASCII follow."""
REGEX = r"[a-d]{4,12}"
INVALID: tuple[dict[str, Any], ...] = (
    {"santa_method": "psp"}, {"santa_budget": 0}, {"santa_budget": 513}, {"santa_budget": "60%"}, {"santa_seed": "x"}, {"santa_sed": 1},
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One request.

    seed: santa_seed, which no other job has. santa: its other parameters, without their prefix. text: a chat, if not empty; else `prompt`
    holds token ids. adapter: asks the model's LoRA adapter. leaves_after: chunks of a streamed answer after which the client closes the
    connection; leaves_within: seconds after which it closes that of an answer in one piece. refused: what it asks for cannot be had, and
    the answer is HTTP 400.
    """

    seed: int
    prompt: tuple[int, ...]
    max_tokens: int
    santa: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    adapter: bool = False
    leaves_after: int | None = None
    leaves_within: float | None = None
    refused: bool = False

    @property
    def n(self) -> int:
        return self.sampling.get("n", 1)

    @property
    def leaves(self) -> bool:
        return self.leaves_after is not None or self.leaves_within is not None

    def path(self) -> str:
        return "/v1/chat/completions" if self.text else "/v1/completions"

    def body(self) -> dict[str, Any]:
        model = ADAPTER if self.adapter else MODEL
        santa = {name if name.startswith("santa_") else f"santa_{name}": value for name, value in self.santa.items()}
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "return_token_ids": True,
        }
        body["vllm_xargs"] = {"santa_seed": self.seed} | santa
        if self.text:
            body |= {"messages": [{"role": "user", "content": self.text}], "logprobs": True}
        else:
            body |= {"prompt": list(self.prompt), "logprobs": 1}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return body | self.sampling

    def sparse_row(self, context: int) -> tuple[str, int, int] | None:
        """Method, budget and Bernoulli samples of a decode row of `context` tokens; None where it is dense. Said once more here, in other
        words than the product's."""
        if not self.santa or self.santa.get("method") == "dense":
            return None
        method, budget = self.santa.get("method", "pps"), self.santa.get("budget", DEFAULT_BUDGET)
        share = Fraction(str(budget).rstrip("%")) / (100 if str(budget).endswith("%") else 1)
        rows = int(share) if share >= 1 else -(-share.numerator * context // share.denominator)
        bernoulli = self.santa.get("bernoulli", 0)
        covered = not bernoulli and method not in DRAWS and rows + (WINDOWS if method in CODES else 0) >= context
        return None if covered else (method, rows, bernoulli)


class Mix:
    """Jobs of one random seed. Some begin alike, so that they share blocks."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._beginnings = [self._tokens(LIMIT) for _ in range(3)]
        self._next_seed = self._random.randrange(2**40)

    def wave(self, size: int) -> list[Job]:
        """Jobs to be sent together: every kind, or (one wave in three) long ones that do not all fit into the cache."""
        storm = self._random.random() < 1 / 3
        return [self._long_job() if storm else self._job() for _ in range(size)]

    def full_size(self) -> Job:
        """A request that needs every block of the cache."""
        return Job(
            self._seed(), self._tokens(LIMIT - 4), 4, {"method": "pps", "budget": 16}, sampling={"temperature": 0, "ignore_eos": True}
        )

    def _job(self) -> Job:
        choose = self._random
        tokens = choose.choice((1, 2, 8, 16, 30))
        prompt = self._prompt(int(LIMIT ** choose.random()) if choose.random() < 0.9 else LIMIT - tokens, LIMIT - tokens)
        job: dict[str, Any] = {"santa": self._santa(), "sampling": self._sampling(), "stream": choose.random() < 0.4}
        job["adapter"] = choose.random() < 0.2
        if choose.random() < 0.2:
            job["text"] = "".join(chr(97 + token % 26) for token in prompt[:400])
        kind = choose.random()
        if kind < 0.08:
            job |= {"leaves_after": choose.randrange(1, 6), "stream": True}
        elif kind < 0.14:
            job |= {"leaves_within": choose.random() / 2, "stream": False}
        elif kind < 0.18:
            job |= {"santa": choose.choice(INVALID), "refused": True}
        elif kind < 0.20:
            prompt, job["refused"], job["text"] = self._tokens(LIMIT + choose.randrange(100)), True, ""
        return Job(self._seed(), prompt, tokens, **job)

    def _long_job(self) -> Job:
        sampling = {"temperature": 0, "ignore_eos": True}
        return Job(self._seed(), self._prompt(self._random.randrange(150, 260), LIMIT), 60, self._santa(), sampling=sampling)

    def _seed(self) -> int:
        self._next_seed += 1
        return self._next_seed

    def _tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.randbytes(length))

    def _prompt(self, length: int, limit: int) -> tuple[int, ...]:
        length = max(1, min(length, limit))
        if self._random.random() < 0.3:
            shared = self._random.randrange(length + 1)
            return (self._random.choice(self._beginnings)[:shared] + self._tokens(length))[:length]
        return self._tokens(length)

    def _santa(self) -> dict[str, Any]:
        santa = {"method": self._random.choice(METHODS), "budget": self._random.choice(BUDGETS)}
        santa = {name: value for name, value in santa.items() if self._random.random() < 0.85}
        if santa.get("method") in ("pps", *DRAWS) and self._random.random() < 0.1:
            santa["bernoulli"] = self._random.choice((8, 64))
        return santa

    def _sampling(self) -> dict[str, Any]:
        """vLLM's own parameters."""
        choose = self._random
        sampling: dict[str, Any] = {"temperature": choose.choice((0, 0, 1.0)), "ignore_eos": choose.random() < 0.8}
        if choose.random() < 0.15:
            sampling |= {"n": choose.choice((2, 3)), "temperature": 1.0}
        if choose.random() < 0.2:
            sampling["stop"] = list(STOPS)
        if choose.random() < 0.1:
            sampling |= {"structured_outputs": {"regex": REGEX}, "ignore_eos": False}
        return sampling
