"""`MetricsSnapshot`: what one worker has counted, to be sent to another and added up there."""

from collections import Counter as Counts
from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from openinfer_server.observability.exposition import Counter, Histogram
from openinfer_server.observability.metrics import ServerMetrics


class BudgetUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of a budget is used."""

    budget: str
    """Its name."""
    used: float
    limit: float
    refused: int
    """Requests, or connections, that it has cost since the start."""


class MetricsSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a `ServerMetrics`, by the names of its attributes."""

    tallies: dict[str, list[tuple[list[str | int], int]]]  # each label's values and the count
    counters: dict[str, int]
    histograms: dict[str, tuple[list[int], float]]  # counts per bucket, and the sum
    open_requests: int
    budgets: list[BudgetUse] = []

    @classmethod
    def of(cls, metrics: ServerMetrics, *, open_requests: int, budgets: Sequence[BudgetUse] = ()) -> "MetricsSnapshot":
        numbers: dict[str, object] = vars(metrics)
        tallies = {name: cast("Counts[object]", value) for name, value in numbers.items() if isinstance(value, Counts)}
        histograms = {name: value for name, value in numbers.items() if isinstance(value, Histogram)}
        return cls(
            tallies={name: _entries(tally) for name, tally in tallies.items()},
            counters={name: value.value for name, value in numbers.items() if isinstance(value, Counter)},
            histograms={name: (list(value.counts), value.total) for name, value in histograms.items()},
            open_requests=open_requests,
            budgets=list(budgets),
        )

    def add_to(self, metrics: ServerMetrics) -> None:
        for name, entries in self.tallies.items():
            tally: Counts[object] = getattr(metrics, name)
            for key, count in entries:
                tally[key[0] if len(key) == 1 else tuple(key)] += count
        for name, value in self.counters.items():
            getattr(metrics, name).value += value
        for name, (counts, total) in self.histograms.items():
            histogram: Histogram = getattr(metrics, name)
            histogram.counts = [mine + theirs for mine, theirs in zip(histogram.counts, counts, strict=True)]
            histogram.total += total


def summed(snapshots: Iterable[MetricsSnapshot], *, max_model_tokens: int) -> ServerMetrics:
    metrics = ServerMetrics(max_model_tokens=max_model_tokens)
    for snapshot in snapshots:
        snapshot.add_to(metrics)
    return metrics


def budgets_of(snapshots: Iterable[MetricsSnapshot]) -> list[BudgetUse]:
    """The budgets of all workers, those of one name added up."""
    total: dict[str, BudgetUse] = {}
    for each in (use for snapshot in snapshots for use in snapshot.budgets):
        before = total.get(each.budget)
        total[each.budget] = each if before is None else _added(before, each)
    return list(total.values())


def _added(one: BudgetUse, other: BudgetUse) -> BudgetUse:
    return BudgetUse(
        budget=one.budget,
        used=one.used + other.used,
        limit=one.limit + other.limit,
        refused=one.refused + other.refused,
    )


def _entries(tally: "Counts[object]") -> list[tuple[list[str | int], int]]:
    return [(_labels(key), count) for key, count in tally.items()]


def _labels(key: object) -> list[str | int]:
    values = cast("tuple[str | int, ...]", key) if isinstance(key, tuple) else (cast("str", key),)
    return [value if isinstance(value, int) else str(value) for value in values]
