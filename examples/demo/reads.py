"""What the server read: its `santa_*` counters, before and after a question."""

from dataclasses import dataclass
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Reads:
    """Sums over decode steps for one method; rows are per KV head and layer, on average.

    Args:
        steps: decode steps, one a token.
        context: tokens in the cache at those steps.
        keys: rows of K read.
        values: rows of V read.
    """

    steps: float
    context: float
    keys: float
    values: float

    def __sub__(self, other: "Reads") -> "Reads":
        return Reads(self.steps - other.steps, self.context - other.context, self.keys - other.keys, self.values - other.values)


def counter(address: str, name: str, **labels: str) -> float:
    """Sum of the server's samples called `name` that carry `labels`."""
    with urlopen(f"{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def reads(address: str, method: str) -> Reads:
    """The counters of `method` now."""
    names = ("santa_rows_total", "santa_context_tokens_total", "santa_key_rows_read_total", "santa_value_rows_read_total")
    return Reads(*(counter(address, name, method=method) for name in names))
