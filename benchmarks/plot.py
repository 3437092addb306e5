"""Draws results/h200/qwen3-4b-offline.png from the JSON beside it: python3 benchmarks/plot.py (needs matplotlib)."""

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent / "results" / "h200"
FLOOR = {1: 1.91, 8: 2.17, 16: 2.47, 32: 3.06, 64: 4.26, 128: 6.65, 256: 11.4}
VLLM = {1: 3.58, 8: 3.96, 16: 4.27, 32: 5.08, 64: 6.36, 128: 9.27, 256: 15.80}

rows = json.loads((HERE / "qwen3-4b-offline.json").read_text())["rows"]
ours = {row["batch"]: row["tpot_ms"] for row in rows if row["prompt_tokens"] == 1024}
figure, axes = plt.subplots(figsize=(7.5, 4.2), dpi=130)
for label, values, style in (
    ("vLLM 0.25.0", VLLM, {"color": "#888888", "marker": "s"}),
    ("openinfer", ours, {"color": "#0b6e4f", "marker": "o", "linewidth": 2.2}),
    ("floor: bytes / 4.3 TB/s", FLOOR, {"color": "#c0392b", "linestyle": "--"}),
):
    axes.plot(list(values), list(values.values()), label=label, **style)
axes.set_xscale("log", base=2)
axes.set_xticks(list(ours), [str(batch) for batch in ours])
axes.set_xlabel("sequences in the batch, 1024 prompt tokens each")
axes.set_ylabel("ms per output token")
axes.set_title("Qwen3-4B in BF16 on one H200, engine alone")
axes.set_ylim(0)
axes.grid(alpha=0.3)
axes.legend()
figure.tight_layout()
figure.savefig(HERE / "qwen3-4b-offline.png")
