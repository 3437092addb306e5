"""`MetricsSnapshot`: what one worker has counted, to be sent to another and added up there."""

from collections import Counter as Counts
from collections.abc import Iterable
from typing import cast

import msgspec

from openinfer_server.observability.exposition import Counter, Histogram
from openinfer_server.observability.metrics import ServerMetrics


class MetricsSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a `ServerMetrics`, by the names of its attributes."""

    tallies: dict[str, list[tuple[list[str | int], int]]]  # each label's values and the count
    counters: dict[str, int]
    histograms: dict[str, tuple[list[int], float]]  # counts per bucket, and the sum
    open_requests: int

    @classmethod
    def of(cls, metrics: ServerMetrics, *, open_requests: int) -> "MetricsSnapshot":
        numbers: dict[str, object] = vars(metrics)
        tallies = {name: cast("Counts[object]", value) for name, value in numbers.items() if isinstance(value, Counts)}
        histograms = {name: value for name, value in numbers.items() if isinstance(value, Histogram)}
        return cls(
            tallies={name: _entries(tally) for name, tally in tallies.items()},
            counters={name: value.value for name, value in numbers.items() if isinstance(value, Counter)},
            histograms={name: (list(value.counts), value.total) for name, value in histograms.items()},
            open_requests=open_requests,
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


def _entries(tally: "Counts[object]") -> list[tuple[list[str | int], int]]:
    return [(_labels(key), count) for key, count in tally.items()]


def _labels(key: object) -> list[str | int]:
    values = cast("tuple[str | int, ...]", key) if isinstance(key, tuple) else (cast("str", key),)
    return [value if isinstance(value, int) else str(value) for value in values]
