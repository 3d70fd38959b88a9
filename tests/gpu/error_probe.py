"""A worker extension that tells what error targets have achieved so far."""

from vllm_santa.counters import INDEX
from vllm_santa.runtime import runtime_for


class ErrorProbe:
    """Methods that vLLM adds to its worker."""

    def achieved(self) -> dict[str, dict[str, float]]:
        """By method: rows whose error was estimated, and the sums of errors, budgets and missed targets over them."""
        values = runtime_for(self.vllm_config).counters.values
        names = ("santa_estimated_rows", "santa_estimated_error", "santa_estimated_budget", "santa_missed_targets")
        found: dict[str, dict[str, float]] = {}
        for (name, method, _), index in INDEX.items():
            if name in names:
                found.setdefault(method, {})[name] = float(values[index])
        return {method: sums for method, sums in found.items() if sums["santa_estimated_rows"]}
