"""From outcomes to figures: percentiles in ms, throughput, what failed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_bench.serve.messages import Outcome

_SHOWN_ERRORS = 3


def row_of(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One row of the result: what `results/h200/*-serve.json` holds.

    `out_tok_s` and `req_s` count from the first request's begin to the last event, over requests that ended as asked.
    TTFT is from sending to the first event with text, TPOT the time after it over the further tokens, ITL the time
    between two events of one request.
    """
    done = [outcome for outcome in outcomes if not outcome.error and not outcome.aborted]
    errors = [outcome.error for outcome in outcomes if outcome.error]
    times = [outcome.times_s for outcome in done]
    wall_s = float(max(each[-1] for each in times) - min(outcome.begin_s for outcome in done)) if done else 0.0
    ttft = [each[0] - outcome.begin_s for outcome, each in zip(done, times, strict=True)]
    tpot = [
        (each[-1] - each[0]) / (outcome.tokens - 1)
        for outcome, each in zip(done, times, strict=True)
        if outcome.tokens > 1
    ]
    gaps = [np.diff(each) for each in times]
    return {
        "workload": name,
        "ok": len(done),
        "failed": len(errors),
        "aborted": sum(outcome.aborted for outcome in outcomes),
        "errors": sorted(set(errors))[:_SHOWN_ERRORS],
        "cached_tokens": sum(outcome.cached_tokens for outcome in done),
        "out_tok_s": round(sum(outcome.tokens for outcome in done) / wall_s, 1) if wall_s else 0.0,
        "req_s": round(len(done) / wall_s, 3) if wall_s else 0.0,
        "ttft_ms": percentiles_ms(np.asarray(ttft)),
        "tpot_ms": percentiles_ms(np.asarray(tpot)),
        "itl_ms": percentiles_ms(np.concatenate(gaps) if gaps else np.empty(0)),
    }


def percentiles_ms(seconds: NDArray[Any]) -> dict[str, float] | None:
    """p50, p90, p99 and the mean, in ms to a microsecond; None of nothing."""
    if not len(seconds):
        return None
    values = {f"p{level}": np.percentile(seconds, level) for level in (50, 90, 99)} | {"mean": seconds.mean()}
    return {name: round(float(value) * 1e3, 3) for name, value in values.items()}


def heading() -> str:
    """Of the table on the terminal."""
    head = f"{'workload':>14} {'ok':>6} {'fail':>5} {'left':>5} {'tok/s':>9} {'req/s':>7}"
    head += "".join(f" {f'{what} p50':>10} {'p90':>8} {'p99':>8}" for what in ("TTFT", "TPOT", "ITL"))
    return head + "  (ms)"


def line_of(row: dict[str, Any]) -> str:
    """A row of the table; below it what went wrong."""
    text = f"{row['workload']:>14} {row['ok']:>6} {row['failed']:>5} {row['aborted']:>5} "
    text += f"{row['out_tok_s']:>9,.0f} {row['req_s']:>7.2f}"
    for what in ("ttft_ms", "tpot_ms", "itl_ms"):
        found: dict[str, float] = row[what] or {}
        cells = [f"{found[level]:.2f}" if found else "-" for level in ("p50", "p90", "p99")]
        text += f" {cells[0]:>10} {cells[1]:>8} {cells[2]:>8}"
    return text + "".join(f"\n{'':>14} {error}" for error in row["errors"])
