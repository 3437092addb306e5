"""Fits `StepLatency` to results of `openinfer bench offline`, and to nothing else.

Each measured figure is a sum of steps that our scheduler plans for that batch: `prefill_s` of the steps until every
request has its first token, `tpot_ms` the mean of those that follow. A step's time is linear in what is fitted, so the
whole is one least-squares problem of relative errors, in which nothing is negative. Two things that are known are kept
to: a token of context costs no less than its bytes take at the rate of the memory, and lines do not fall with size.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from openinfer_bench.simulate.latency import (
    COEFFICIENTS,
    EngineLimits,
    FitOrigin,
    FittedRow,
    Line,
    Shape,
    StepLatency,
    shape_of_plan,
    weights_at,
)
from openinfer_core import GenerateRequest, InvalidRequest, RequestId, SamplingParams
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan, StepResult
from openinfer_engine.cuda.step_buckets import TOKEN_BUCKETS
from openinfer_engine.scheduler.token_budget import TokenBudgetScheduler

BYTES_PER_S = 4.3e12
"""Device copy rate of an H200, bytes read and written."""
_ROUNDS = 1000


class OfflineRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `openinfer bench offline --json`."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    prefill_s: float
    tpot_ms: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineResult:
    """What is used of a result file."""

    origin: FitOrigin
    limits: EngineLimits
    kv_bytes_per_token: float
    rows: list[OfflineRow]


@dataclass(frozen=True, slots=True)
class _Figure:
    """One measured figure, and the steps whose times add up to it, times `scale`."""

    what: str
    measured_s: float
    shapes: list[Shape]
    scale: float


def read_offline(path: Path) -> OfflineResult:
    """Reads a result file.

    Raises:
        InvalidRequest: it is none, or not of a GPU.
    """
    try:
        report: Any = msgspec.json.decode(path.read_bytes())
        plan = report["set_up"]["model"]
        limits = msgspec.convert({name: plan["limits"][name] for name in EngineLimits.__struct_fields__}, EngineLimits)
        return OfflineResult(
            origin=FitOrigin(
                file=path.name, commit=report["commit"], gpu=report.get("gpu") or "", date=report.get("date", "")
            ),
            limits=limits,
            kv_bytes_per_token=plan["memory_bytes"]["kv_cache"] / plan["limits"]["kv_cache_tokens"],
            rows=msgspec.convert(report["rows"], list[OfflineRow]),
        )
    except (OSError, KeyError, TypeError, ZeroDivisionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{path} is no result of `openinfer bench offline`: {error!r}", field="offline") from error


def fit_steps(results: Sequence[OfflineResult]) -> tuple[StepLatency, list[FittedRow]]:
    """The table, and each figure as measured and as fitted. All results must be of one engine's limits."""
    figures = [figure for result in results for row in result.rows for figure in _figures(row, result.limits)]
    sizes = {is_decode: _sizes(figures, is_decode=is_decode) for is_decode in (True, False)}
    floor_s = min(result.kv_bytes_per_token for result in results) / BYTES_PER_S
    columns = _columns(figures, sizes) @ _from_rises(sizes)
    measured = np.array([figure.measured_s for figure in figures])
    num_decode, num_lines = len(sizes[True]), len(sizes[True]) + len(sizes[False])
    least = np.array([*np.zeros(num_lines), floor_s, *np.zeros(len(COEFFICIENTS) - 1)])
    # Both sides over what was measured, so that each figure's relative error counts.
    rises = least + _non_negative(columns / measured[:, None], 1 - columns @ least / measured)
    found = _from_rises(sizes) @ rises
    latency = StepLatency(
        decode=_line(sizes[True], found[:num_decode]),
        mixed=_line(sizes[False], found[num_decode:num_lines]),
        **{name: _rounded(value) for name, value in zip(COEFFICIENTS, found[num_lines:], strict=True)},
    )
    rows = [
        FittedRow(
            what=figure.what,
            measured_s=_rounded(figure.measured_s),
            fitted_s=_rounded(figure.scale * sum(latency.of_shape(shape) for shape in figure.shapes)),
        )
        for figure in figures
    ]
    return latency, rows


def _line(sizes: Sequence[int], seconds: NDArray[Any]) -> Line:
    return Line(tuple(sizes), tuple(map(_rounded, seconds.tolist())))


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


# --- what was run -------------------------------------------------------------------------------------------


def _figures(row: OfflineRow, limits: EngineLimits) -> list[_Figure]:
    prefill, decode = steps_of(row, limits)
    size = f"{row.batch} x {row.prompt_tokens}"
    return [
        _Figure(f"{size}: prefill", row.prefill_s, prefill, 1.0),
        _Figure(f"{size}: TPOT", row.tpot_ms / 1e3, decode, 1 / max(1, len(decode))),
    ]


def steps_of(row: OfflineRow, limits: EngineLimits) -> tuple[list[Shape], list[Shape]]:
    """Shapes of the steps of a batch until all have a first token, and of those that TPOT is the mean of."""
    config = SchedulerConfig(
        num_blocks=limits.num_blocks,
        block_size_tokens=limits.block_size_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_step_tokens=limits.max_step_tokens,
        max_model_tokens=limits.max_model_tokens,
        prefix_cache=False,
    )
    scheduler = TokenBudgetScheduler(config, FirstComeFirstServed(QueuePolicyConfig()))
    max_tokens = limits.max_model_tokens - row.prompt_tokens
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    for number in range(row.batch):
        prompt = (1,) * row.prompt_tokens
        request = GenerateRequest(request_id=RequestId(number), prompt_token_ids=prompt, sampling=sampling)
        scheduler.add(request, now_s=0.0)
    waiting = set(range(row.batch))
    prefill: list[Shape] = []
    decode: list[Shape] = []
    before = _planned(scheduler)
    while len(decode) < row.steps:
        after = _planned(scheduler)
        (prefill if waiting else decode).append(shape_of_plan(before))
        events = scheduler.apply(before, _sampled(before), now_s=0.0)
        waiting -= {event.request_id for event in events if getattr(event, "token_ids", ())}
        before = after
    return prefill, decode


def _planned(scheduler: TokenBudgetScheduler) -> StepPlan:
    plan = scheduler.plan(now_s=0.0)
    if plan is None:
        raise InvalidRequest("a row of the results asks for more tokens than a context of that engine has")
    return plan


def _sampled(plan: StepPlan) -> StepResult:
    return StepResult.of_single_tokens(np.where(plan.max_new > 0, np.int32(1), np.int32(-1)).astype(np.int32))


# --- least squares ------------------------------------------------------------------------------------------


def _sizes(figures: Sequence[_Figure], *, is_decode: bool) -> list[int]:
    """Where a line has a point: at the size of which a figure has most steps, and at all that are captured."""
    found: set[int] = set()
    for figure in figures:
        counts = Counter(shape.num_tokens for shape in figure.shapes if shape.is_decode is is_decode)
        found |= {size for size in counts if size <= TOKEN_BUCKETS[-1]}
        found |= {size for size, count in counts.items() if count == max(counts.values())}
    if not found:
        raise InvalidRequest("the results have no row from which this could be fitted", field="offline")
    return sorted(found)


def _columns(figures: Sequence[_Figure], sizes: dict[bool, list[int]]) -> NDArray[Any]:
    first = {True: 0, False: len(sizes[True])}
    num_lines = len(sizes[True]) + len(sizes[False])
    columns = np.zeros((len(figures), num_lines + len(COEFFICIENTS)))
    for row, figure in zip(columns, figures, strict=True):
        for shape in figure.shapes:
            for point, weight in weights_at(sizes[shape.is_decode], shape.num_tokens):
                row[first[shape.is_decode] + point] += weight * figure.scale
            row[num_lines:] += np.array(shape[-len(COEFFICIENTS) :]) * figure.scale
    return columns


def _from_rises(sizes: dict[bool, list[int]]) -> NDArray[Any]:
    """From how much lines rise from point to point to their points; the coefficients are as they are.

    The second line begins with the first one's first point: the smallest step with prompts reads all weights, too.
    """
    num_decode, num_mixed = len(sizes[True]), len(sizes[False])
    matrix = np.eye(num_decode + num_mixed + len(COEFFICIENTS))
    matrix[:num_decode, :num_decode] = np.tri(num_decode)
    matrix[num_decode : -len(COEFFICIENTS), num_decode : -len(COEFFICIENTS)] = np.tri(num_mixed)
    matrix[num_decode : num_decode + num_mixed, 0] = 1
    return matrix


def _non_negative(matrix: NDArray[Any], target: NDArray[Any]) -> NDArray[Any]:
    """`x >= 0` with the least `|matrix x - target|` (Lawson and Hanson, Solving Least Squares Problems, chapter 23)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    num_unknowns = matrix.shape[1]
    found, is_free = np.zeros(num_unknowns), np.zeros(num_unknowns, bool)
    for _ in range(_ROUNDS):
        gradient = matrix.T @ (target - matrix @ found)
        gradient[is_free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-10:
            break
        is_free[best] = True
        while True:
            solved = np.zeros(num_unknowns)
            solved[is_free] = np.linalg.lstsq(matrix[:, is_free], target, rcond=None)[0]
            if (solved[is_free] > 0).all():
                break
            blocking = is_free & (solved <= 0)
            step = np.min(found[blocking] / (found[blocking] - solved[blocking]))
            found += step * (solved - found)
            is_free &= found > 1e-15
        found = solved
    return found / scale
