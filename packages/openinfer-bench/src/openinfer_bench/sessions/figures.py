"""From played turns to figures: TTFT and hits by turn number, hits by tier, and how long sessions took."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from openinfer_bench.serve.drafts import line_of_drafts
from openinfer_bench.serve.figures import percentiles_ms
from openinfer_bench.sessions.play import Played

_SHOWN_ERRORS = 3


def rows_of(played: Sequence[Played]) -> list[dict[str, Any]]:
    """A row for each turn number: of all conversations, sub-agents too.

    `hit_rate` is cached tokens over prompt tokens, `allowed_rate` what a cache that forgets nothing would have had.
    What follows from cached tokens is None if the server tells none of any turn.
    """
    numbers = sorted({each.turn for each in played})
    is_told = tells_cached(played)
    return [_row(number, [each for each in played if each.turn == number], is_told=is_told) for number in numbers]


def tells_cached(played: Sequence[Played]) -> bool:
    """Whether the server tells cached tokens: where it found none it may say nothing, so one turn is enough."""
    return any(each.outcome.tells_cached for each in played)


def _row(number: int, turns: Sequence[Played], *, is_told: bool) -> dict[str, Any]:
    done = [each for each in turns if not each.outcome.error]
    prompts = sum(each.prompt_tokens for each in done)
    cached = sum(each.outcome.cached_tokens for each in done)
    return {
        "turn": number,
        "ok": len(done),
        "failed": len(turns) - len(done),
        "prompt_tokens": round(prompts / len(done)) if done else 0,
        "new_tokens": round((prompts - cached) / max(1, len(done))) if is_told else None,
        "hit_rate": _share(cached, prompts) if is_told else None,
        "allowed_rate": _share(sum(each.allowed_tokens for each in done), prompts),
        "ttft_ms": percentiles_ms(np.asarray([each.outcome.times_s[0] - each.begin_s for each in done])),
    }


def totals_of(played: Sequence[Played], spans_s: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Of the whole run. A session's time (`session_s`) is from its first request to its last token, waits included.

    Sessions that ended where a turn failed (`cut_sessions`) have no such time.
    """
    done = [each for each in played if not each.outcome.error]
    failed = [each for each in played if each.outcome.error]
    errors = [each.outcome.error for each in failed]
    cut = spans_s.keys() & {each.session for each in failed}
    prompts = sum(each.prompt_tokens for each in done)
    cached = sum(each.outcome.cached_tokens for each in done) if tells_cached(played) else None
    allowed = sum(each.allowed_tokens for each in done)
    wall_s = max(each.end_s for each in done) - min(each.begin_s for each in done) if done else 0.0
    lengths_s = [end_s - begin_s for name, (begin_s, end_s) in spans_s.items() if name not in cut]
    return {
        "sessions": len(spans_s),
        "cut_sessions": len(cut),
        "turns": len(done),
        "failed": len(errors),
        "errors": sorted(set(errors))[:_SHOWN_ERRORS],
        "prompt_tokens": prompts,
        "output_tokens": sum(each.outcome.tokens for each in done),
        "cached_tokens": cached,
        "hit_rate": None if cached is None else _share(cached, prompts),
        "allowed_rate": _share(allowed, prompts),
        "hits_of_allowed": None if cached is None else _share(cached, allowed),
        "out_tok_s": round(sum(each.outcome.tokens for each in done) / wall_s, 1) if wall_s else 0.0,
        "ttft_ms": percentiles_ms(np.asarray([each.outcome.times_s[0] - each.begin_s for each in done])),
        "session_s": {f"p{level}": round(float(np.percentile(lengths_s, level)), 3) for level in (50, 99)}
        if lengths_s
        else None,
    }


def hits_by_tier(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int] | None:
    """Tokens that prompts began with, by where they lay, by our server's `/metrics`; None of another's.

    The tiers are told apart by the blocks that they loaded: `kv_tier_tokens` is all that came from any of them.
    """
    total = "openinfer_prefix_cache_hits_total"
    if not any(name.startswith(total) for name in after):
        return None
    hits, tiers = (_difference(before, after, name) for name in (total, "openinfer_kv_tier_tokens_total"))
    found = {"gpu_tokens": hits - tiers, "tier_tokens": tiers}
    for name in after:
        if name.startswith("openinfer_kv_tier_loaded_blocks_total{"):
            tier = name.partition('tier="')[2].partition('"')[0]
            found[f"{tier}_loaded_blocks"] = _difference(before, after, name)
    return found


def _difference(before: Mapping[str, float], after: Mapping[str, float], name: str) -> int:
    """Of a counter, over all of its labels if `name` has none."""
    return round(
        sum(value - before.get(key, 0.0) for key, value in after.items() if key == name or key.startswith(name + "{"))
    )


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def heading() -> str:
    """Of the table on the terminal."""
    return (
        f"{'turn':>5} {'ok':>5} {'fail':>5} {'prompt':>8} {'computed':>8} {'hits':>7} {'allowed':>7}"
        f" {'TTFT p50':>9} {'p90':>9} {'p99':>9}  (tokens, ms)"
    )


def line_of(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    ttft: Mapping[str, float] = row["ttft_ms"] or {}
    cells = [f"{ttft[level]:.2f}" if ttft else "-" for level in ("p50", "p90", "p99")]
    computed = "-" if row["new_tokens"] is None else f"{row['new_tokens']:,}"
    return (
        f"{row['turn']:>5} {row['ok']:>5} {row['failed']:>5} {row['prompt_tokens']:>8,} {computed:>8}"
        f" {_percent(row['hit_rate']):>7} {row['allowed_rate']:>7.1%} {cells[0]:>9} {cells[1]:>9} {cells[2]:>9}"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def summary(totals: Mapping[str, Any]) -> str:
    """The totals in a few lines, and what went wrong."""
    times: Mapping[str, float] | None = totals["session_s"]
    played = f"{totals['sessions']} sessions, {totals['turns']:,} turns, {totals['failed']} failed; "
    played += f"{totals['prompt_tokens']:,} tokens in, {totals['output_tokens']:,} out ({totals['out_tok_s']:,.0f}/s)"
    further: list[str] = []
    if totals["hit_rate"] is not None:
        allowed = f"{totals['hits_of_allowed']:.1%} of what the sessions allow"
        further.append(f"hits {totals['hit_rate']:.1%} of the prompts, {allowed}")
    elif totals["turns"]:
        further.append("the server tells no cached tokens in its usage")
    if times:
        further.append(f"a session takes {times['p50']:.1f} s in the median, {times['p99']:.1f} at p99")
    lines = [played, *(["; ".join(further)] if further else [])]
    if totals["cut_sessions"]:
        lines.append(f"{totals['cut_sessions']} sessions ended where a turn failed, and have no time")
    if totals.get("tiers"):
        lines.append("; ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in totals["tiers"].items()))
    if drafts := line_of_drafts(totals):
        lines.append(drafts.strip())
    return "\n".join([*lines, *totals["errors"]])
