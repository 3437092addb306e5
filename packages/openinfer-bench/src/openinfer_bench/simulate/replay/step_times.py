"""What each step of a step trace took, beside what a fitted table says it takes: where the table is wrong.

A step's time is from the result before to its own, since it was planned while the one before ran; from its plan, if
nothing ran.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from openinfer_bench.simulate.latency import Shape, StepLatency, shape_of
from openinfer_engine.tracing.step_trace import Apply, Plan, read_step_trace

_KINDS: dict[str, Callable[[Shape], bool]] = {
    "decode, 1 to 8 rows": lambda shape: shape.is_decode and shape.num_tokens <= 8,
    "decode, to 64 rows": lambda shape: shape.is_decode and 8 < shape.num_tokens <= 64,
    "decode, more": lambda shape: shape.is_decode and shape.num_tokens > 64,
    "mixed, to 512 tokens": lambda shape: not shape.is_decode and shape.num_tokens <= 512,
    "mixed, to 1,536 tokens": lambda shape: not shape.is_decode and 512 < shape.num_tokens <= 1536,
    "mixed, more": lambda shape: not shape.is_decode and shape.num_tokens > 1536,
}


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one kind, milliseconds."""

    kind: str
    steps: int
    recorded_p50_ms: float
    fitted_p50_ms: float
    recorded_sum_s: float
    fitted_sum_s: float

    def __str__(self) -> str:
        return (
            f"{self.kind:<24} {self.steps:>6} steps, median {self.recorded_p50_ms:>7.3f} ms recorded, "
            f"{self.fitted_p50_ms:>7.3f} fitted; in all {self.recorded_sum_s:>7.3f} s and {self.fitted_sum_s:>7.3f}"
        )


def compare_step_times(path: Path, latency: StepLatency) -> list[StepTimes]:
    """Sums and medians by kind of step; kinds that a trace has not are left out."""
    steps = list(_steps(path))
    found: list[StepTimes] = []
    for kind, is_of in _KINDS.items():
        shapes = [(shape, took_s) for shape, took_s in steps if is_of(shape)]
        if shapes:
            recorded = [took_s for _, took_s in shapes]
            fitted = [latency.of_shape(shape) for shape, _ in shapes]
            found.append(
                StepTimes(
                    kind=kind,
                    steps=len(shapes),
                    recorded_p50_ms=_median_ms(recorded),
                    fitted_p50_ms=_median_ms(fitted),
                    recorded_sum_s=round(sum(recorded), 4),
                    fitted_sum_s=round(sum(fitted), 4),
                )
            )
    return found


def _steps(path: Path) -> Iterator[tuple[Shape, float]]:
    plans: dict[int, Plan] = {}
    applied_s = float("-inf")
    for record in read_step_trace(path):
        if isinstance(record, Plan) and record.step is not None:
            plans[record.step] = record
        elif isinstance(record, Apply):
            plan = plans.pop(record.step)
            shape = shape_of([row[1] for row in plan.rows], [row[2] for row in plan.rows])
            yield shape, record.at_s - max(applied_s, plan.at_s)
            applied_s = record.at_s


def _median_ms(seconds: Sequence[float]) -> float:
    return round(float(np.median(seconds)) * 1e3, 4)
