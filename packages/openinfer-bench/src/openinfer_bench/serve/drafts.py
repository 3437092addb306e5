"""How many drafts of a server were accepted while it was under load, of those that its `/metrics` count."""

from collections.abc import Mapping
from typing import Any

from openinfer_bench.serve.messages import Target
from openinfer_bench.serve.watch import read_metrics

_COUNTERS = {
    "drafts": "spec_decode_num_drafts_total",
    "draft_tokens": "spec_decode_num_draft_tokens_total",
    "accepted_tokens": "spec_decode_num_accepted_tokens_total",
}
_PREFIXES = "openinfer_", "vllm:"


class DraftWatch:
    """Counts from when it is made; a server without such counters, or that drafts nothing, has none."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._begin = _counters(target)

    def figures(self) -> dict[str, Any]:
        """`drafts`: rows with drafts, drafted and accepted tokens, and tokens that such a row yielded in the mean."""
        end = _counters(self._target)
        counts = {name: int(end[name] - self._begin.get(name, 0)) for name in end}
        if not counts.get("drafts"):
            return {}
        return {"drafts": counts | {"tokens_per_row": round(1 + counts["accepted_tokens"] / counts["drafts"], 3)}}


def line_of_drafts(row: Mapping[str, Any]) -> str:
    """Below a row of the table; empty without drafts."""
    if "drafts" not in row:
        return ""
    found = row["drafts"]
    share = found["accepted_tokens"] / max(1, found["draft_tokens"])
    text = f"{share:.0%} of {found['draft_tokens']:,} drafts accepted, {found['tokens_per_row']:.2f} tokens a row"
    return f"\n{'':>14} {text}"


def _counters(target: Target) -> dict[str, float]:
    metrics = read_metrics(target)
    for prefix in _PREFIXES:
        if all(prefix + metric in metrics for metric in _COUNTERS.values()):
            return {name: metrics[prefix + metric] for name, metric in _COUNTERS.items()}
    return {}
