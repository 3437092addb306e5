"""Drawing a run: latencies of each workload, and memory over time where it was watched. Needs matplotlib."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openinfer_core import Refused
from openinfer_core.errors import brought_by

_SHADES = {"p50": "#0b6e4f", "p90": "#6bb392", "p99": "#c9e4d6"}
_TITLES = {"ttft_ms": "time to first token, ms", "tpot_ms": "time per output token, ms", "itl_ms": "between tokens, ms"}


def draw(rows: Sequence[dict[str, Any]], samples: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a picture of the rows, and of the samples if there are any.

    Raises:
        Refused: matplotlib is not installed.
    """
    try:
        figure_class: Any = importlib.import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as missing:
        raise Refused(f"--plot needs matplotlib, which is not installed: {brought_by('--plot')}") from missing
    panels = len(_TITLES) + bool(samples)
    figure: Any = figure_class(figsize=(4.2 * panels, 1.6 + 0.5 * max(3, len(rows))), dpi=130, layout="constrained")
    axes: Sequence[Any] = figure.subplots(1, panels)
    for axis, (key, title) in zip(axes, _TITLES.items(), strict=False):
        _draw_latencies(axis, rows, key, title)
    if rows:
        axes[0].legend(loc="lower right")
    if samples:
        _draw_memory(axes[-1], samples)
    figure.savefig(path)


def _draw_latencies(axis: Any, rows: Sequence[dict[str, Any]], key: str, title: str) -> None:
    shown = [row for row in rows if row[key]]
    for level in ("p99", "p90", "p50"):  # the longest bar lies behind
        axis.barh(
            [row["workload"] for row in shown], [row[key][level] for row in shown], color=_SHADES[level], label=level
        )
    axis.invert_yaxis()
    axis.set_title(title)
    axis.grid(axis="x", alpha=0.3)


def _draw_memory(axis: Any, samples: Sequence[dict[str, Any]]) -> None:
    times = [sample["t_s"] for sample in samples]
    axis.plot(times, [sample["resident_mib"] for sample in samples], color="#0b6e4f", label="resident")
    axis.set_ylim(0, 1.2 * max(sample["resident_mib"] for sample in samples))
    axis.set_title("memory of the server's processes, MiB")
    axis.set_xlabel("s")
    axis.grid(alpha=0.3)
