"""Drawing a run: TTFT and hits by turn. Needs matplotlib."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openinfer_core import InvalidRequest, Refused
from openinfer_core.errors import brought_by

_DARK, _MIDDLE, _LIGHT = "#0b6e4f", "#6bb392", "#d0d0d0"


def check_picture(path: Path) -> None:
    """Whether a picture can be written to such a file.

    Raises:
        InvalidRequest: matplotlib draws no such format.
        Refused: it is not installed.
    """
    formats: Any = _figure_class()().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise InvalidRequest(f"--plot {path}: pictures are {', '.join(sorted(formats))}", field="plot")


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a picture of the turns.

    Raises:
        Refused: matplotlib is not installed.
    """
    shown = [row for row in rows if row["ttft_ms"]]
    turns = [row["turn"] for row in shown]
    figure: Any = _figure_class()(figsize=(9.0, 3.4), dpi=130, layout="constrained")
    times, hits = figure.subplots(1, 2)
    for level, colour in (("p99", _MIDDLE), ("p50", _DARK)):
        times.plot(turns, [row["ttft_ms"][level] for row in shown], color=colour, label=level, marker=".")
    times.set_ylim(bottom=0)
    times.set_title("time to first token, ms")
    allowed = [row["allowed_rate"] for row in shown]  # wide, since what is cached often lies on it
    hits.plot(turns, allowed, color=_LIGHT, label="that the session allows", linewidth=5)
    if all(row["hit_rate"] is not None for row in shown):
        hits.plot(turns, [row["hit_rate"] for row in shown], color=_DARK, label="cached", marker=".")
    hits.set_ylim(0, 1.02)
    hits.set_title("share of the prompt")
    for axis in (times, hits):
        axis.set_xlabel("turn")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path)


def _figure_class() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as missing:
        raise Refused(f"--plot needs matplotlib, which is not installed: {brought_by('--plot')}") from missing
