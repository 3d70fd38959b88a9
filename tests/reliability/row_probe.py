"""A worker extension that remembers which sparse rows were decoded, for whom. `--worker-extension-cls row_probe.RowProbe`."""

from collections import Counter

from cache_probe import CacheProbe

from vllm_santa.request import processor_for
from vllm_santa.runtime import runtime_for


class RowProbe(CacheProbe):
    """Methods that vLLM adds to its worker; /collective_rpc calls them."""

    def watch_rows(self) -> None:
        """Count every sparse token from now on."""
        runtime = runtime_for(self.vllm_config)
        self.watched_rows: Counter[tuple[int, int, str, int, int]] = Counter()
        begin_step = runtime.begin_step

        def watching(plan) -> None:
            begin_step(plan)
            for token in plan.sparse:
                bernoulli = token.bernoulli.samples if token.bernoulli else 0
                self.watched_rows[token.seed, token.context, token.method.name, token.budget, bernoulli] += 1

        runtime.begin_step = watching

    def take_rows(self) -> list[list[int | str]]:
        """Seed, context, method, budget, Bernoulli samples and count of the sparse tokens since the last call."""
        rows = [[*row, count] for row, count in self.watched_rows.items()]
        self.watched_rows.clear()
        return rows

    def kept_requests(self) -> int:
        """Requests whose parameters the worker still holds."""
        return len(processor_for(self.vllm_config)._rows)
