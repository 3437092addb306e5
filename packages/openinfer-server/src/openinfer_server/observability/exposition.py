"""Counters and histograms as plain numbers, and Prometheus' text format for them.

Labels are resolved once, when a metric is made; counting is an addition, observing a bisection. Everything is used
from the event loop's thread alone.

`prometheus_client` 0.26 writes the same page (28 kB) in 1.76 ms where this takes 0.36 ms, on the loop that streams
tokens; importing it costs 41 ms and 3.6 MB (2026-11).
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Histogram:
    """How many observations fell into each bucket.

    Args:
        bounds: upper bounds in ascending order; the bucket above the last is implied.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, or the same value several times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


def escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def render_labels(labels: Sequence[tuple[str, str]]) -> str:
    """`{name="value",…}`, or nothing."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{escape_label(value)}"' for name, value in labels) + "}"


Sample = tuple[Sequence[tuple[str, str]], float]  # labels and value


def render_family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{render_labels(labels)} {_number(value)}"


def render_histogram(
    name: str, text: str, histogram: Histogram, labels: Sequence[tuple[str, str]] = ()
) -> Iterator[str]:
    """Lines of a histogram; all have the same labels, and buckets have `le` too."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} histogram"
    cumulative = 0
    for bound, count in zip((*map(_number, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        cumulative += count
        yield f"{name}_bucket{render_labels((*labels, ('le', bound)))} {cumulative}"
    rendered = render_labels(labels)
    yield f"{name}_sum{rendered} {_number(histogram.total)}"
    yield f"{name}_count{rendered} {cumulative}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
