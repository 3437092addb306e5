"""Replayed rows beside measured ones: which figures are compared, and what counts as agreement.

A median, a rate: within 10 %. A 99th percentile: within 25 %. Of fewer than 20 requests there is no 99th percentile.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from openinfer_core import InvalidRequest

P50_BOUND, P99_BOUND = 0.10, 0.25
_FEWEST_FOR_P99 = 20


class Compared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure of one row."""

    workload: str
    figure: str
    measured: float
    replayed: float
    ratio: float
    bound: float
    passed: bool


class MeasuredRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `openinfer bench serve --json`, as far as it is compared."""

    workload: str
    ok: int
    out_tok_s: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float] | None
    itl_ms: dict[str, float] | None
    prompt_tokens: int
    output_tokens: int
    seed: int | None = None


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """A file of `openinfer bench serve --json`."""

    commit: str
    set_up: dict[str, Any]
    rows: list[MeasuredRow]
    gpu: str | None = None
    date: str = ""


def read_measured(path: Path) -> MeasuredRun:
    """Raises `InvalidRequest`: it is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MeasuredRun)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{path} is no result of `openinfer bench serve`: {error}", field="measured") from error


def name_of(row: Mapping[str, Any]) -> str:
    """What tells a row from others of its workload."""
    return f"{row['workload']} {row['prompt_tokens']}/{row['output_tokens']}"


def compare(measured: MeasuredRow, replayed: Mapping[str, Any]) -> list[Compared]:
    """The figures that both rows have."""
    ours: dict[str, Any] = msgspec.to_builtins(measured)
    name = name_of(ours)
    wanted = [("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("itl_ms", "p99")]
    found: list[Compared] = []
    for figure, level in wanted:
        seen, said = ours[figure], replayed[figure]
        if seen is None or said is None or (level == "p99" and measured.ok < _FEWEST_FOR_P99):
            continue
        found.append(_compared(name, f"{figure.removesuffix('_ms').upper()} {level} ms", seen[level], said[level]))
    if measured.output_tokens > 1:
        found.append(_compared(name, "tokens/s", measured.out_tok_s, replayed["out_tok_s"]))
    return found


def _compared(workload: str, figure: str, measured: float, replayed: float) -> Compared:
    bound = P99_BOUND if "p99" in figure else P50_BOUND
    ratio = replayed / measured if measured else float("inf")
    return Compared(
        workload=workload,
        figure=figure,
        measured=measured,
        replayed=replayed,
        ratio=round(ratio, 3),
        bound=bound,
        passed=abs(ratio - 1) <= bound,
    )


def table(found: Sequence[Compared]) -> str:
    """For the terminal."""
    lines = [f"{'workload':<24} {'figure':<12} {'measured':>10} {'replayed':>10} {'ratio':>7}"]
    lines += [
        f"{each.workload:<24} {each.figure:<12} {each.measured:>10,.2f} {each.replayed:>10,.2f} {each.ratio:>7.3f}"
        f"  {'pass' if each.passed else f'miss (bound {each.bound:.0%})'}"
        for each in found
    ]
    missed = sum(not each.passed for each in found)
    return "\n".join([*lines, f"{len(found) - missed} of {len(found)} figures within their bounds"]) + "\n"
