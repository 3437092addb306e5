"""Draws results/h200/kv-tiers.png from the JSON beside it: python3 benchmarks/plot_kv_tiers.py (needs matplotlib)."""

import json
import statistics
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent / "results" / "h200"
WAYS = (
    ("computed_ms", "computed", {"color": "#c0392b", "marker": "s"}),
    ("disk_ms", "disk tier (page cache)", {"color": "#888888", "marker": "^"}),
    ("host_ms", "host tier", {"color": "#0b6e4f", "marker": "o", "linewidth": 2.2}),
    ("pool_ms", "still in the cache", {"color": "#2c5f9e", "marker": "v"}),
)

rows = json.loads((HERE / "kv-tiers.json").read_text())["rows"]
lengths = [row["prompt_tokens"] for row in rows]
figure, axes = plt.subplots(figsize=(7.5, 4.2), dpi=130)
for key, label, style in WAYS:
    found = [row for row in rows if row.get(key.replace("_ms", "_tokens"), 1)]  # else it was computed after all
    values = [statistics.median(row[key]) for row in found]
    axes.plot([row["prompt_tokens"] for row in found], values, label=label, **style)
    axes.annotate(
        f"{values[-1]:.0f}", (lengths[-1], values[-1]), textcoords="offset points", xytext=(7, -3), fontsize=8
    )
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
axes.set_xlabel("prompt tokens")
axes.set_ylabel("ms to the first token")
axes.set_title("Qwen3-4B on one H200: where the prompt's KV is, engine alone")
axes.grid(alpha=0.3, which="both")
axes.legend()
figure.tight_layout()
figure.savefig(HERE / "kv-tiers.png")
