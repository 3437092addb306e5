"""Whole engines of low-bit models next to BF16 on one GPU, in turns: ms a token and tokens/s of prompts, in one table.

    python3 tools/device/less_to_read.py OUT.json COMMIT [--plan dense|formats|larger|mixtures ...] [--seconds S]

Weights are random codes of the real shapes, routers' of normal scale. Each line is an engine of its own (`openinfer
bench offline`); where a plan names one twice, both runs are kept, so that BF16 before and after says what the card did
meanwhile. What does not fit into S seconds is left out, and said. Configs are those of `published_configs.py`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import published_configs
import source_packages

ALL = ("1x1024", "8x1024", "16x1024", "32x1024", "64x1024", "96x1024", "128x1024", "192x1024", "256x1024", "1x16384")
SOME = ("1x1024", "8x1024", "64x1024", "128x1024", "256x1024", "1x16384")
FEW = ("1x1024", "8x1024", "64x1024")
OUTPUT = 33
LIMIT_S = 75


class Line(NamedTuple):
    name: str
    model: str
    sizes: Sequence[str]
    options: Sequence[str] = ()


def lines(names: Mapping[str, str], sizes: Sequence[str]) -> list[Line]:
    return [Line(name, model, sizes) for name, model in names.items()]


THREE = {"BF16": "qwen3-4b", "FP8 blocks": "qwen3-4b-fp8", "AWQ": "qwen3-4b-awq"}
MIXTURES = {
    f"{size} {name}": f"{model}{end}"
    for size, model in (("30B-A3B", "qwen3-30b-a3b"), ("35B-A3B", "qwen3.5-35b-a3b"))
    for name, end in (("BF16", ""), ("FP8", "-fp8"), ("AWQ", "-awq"))
}
PLANS: Mapping[str, Sequence[Line]] = {
    "dense": [
        *lines(THREE, ALL),
        *lines(THREE, ALL),
        Line("FP8 blocks, FP8 head", "qwen3-4b-fp8", FEW, ("fp8_head=true",)),
        Line("AWQ, FP8 head", "qwen3-4b-awq", FEW, ("fp8_head=true",)),
        Line("BF16, FP8 KV", "qwen3-4b", ("64x1024", "256x1024", "1x16384"), ("kv_cache_dtype=fp8",)),
    ],
    "formats": [
        *lines(
            {
                "BF16": "qwen3-4b",
                "FP8 rows": "qwen3-4b-fp8-rows",
                "GPTQ": "qwen3-4b-gptq",
                "W4A16": "qwen3-4b-w4a16",
                "W4A16 in groups of 32": "qwen3-4b-w4a16-g32",
                "W8A8": "qwen3-4b-w8a8",
                "MXFP4": "qwen3-4b-mxfp4",
            },
            SOME,
        ),
        Line("BF16", "qwen3-4b", SOME),
    ],
    "larger": lines({"8B BF16": "qwen3-8b", "8B FP8": "qwen3-8b-fp8", "8B AWQ": "qwen3-8b-awq"}, FEW),
    "mixtures": [
        *lines(MIXTURES, ("1x1024", "8x1024", "32x1024", "64x1024")),
        Line("35B-A3B FP8 in 80 GB", "qwen3.5-35b-a3b-fp8", FEW, ("gpu_memory_fraction=0.51",)),
    ],
}


def run(line: Line, configs: Path, commit: str, tokens: int, device: Sequence[str]) -> dict[str, Any]:
    """The report of one engine; what went wrong, where something did."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = [*device, f"max_model_tokens={tokens}", *line.options]
        command = [sys.executable, "-P", "-m", "openinfer.commands.main", "bench", "offline"]
        command += ["--model", str(configs / line.model), "--size", *line.sizes, "--output", str(OUTPUT)]
        command += [each for option in options for each in ("--option", option)]
        command += ["--commit", commit, "--json", str(report)]
        try:
            done = subprocess.run(
                command,
                env=source_packages.environment(),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"more than {LIMIT_S} s"}
        if done.returncode:
            return {"failed": (done.stdout + done.stderr)[-600:]}
        return json.loads(report.read_bytes())


def kept(line: Line, report: dict[str, Any]) -> dict[str, Any]:
    if "failed" in report:
        return {"name": line.name, "model": line.model, "options": line.options, "failed": report["failed"]}
    plan = report["set_up"]["model"]
    return {
        "name": line.name,
        "model": line.model,
        "options": [*line.options],
        "weight_format": plan["parts"].get("weight_format"),
        "weights_bytes": plan["memory_bytes"]["weights"],
        "kernels": plan["kernels"].get("quantised weights"),
        "limits": plan["limits"],
        "load_s": report["set_up"]["load_s"],
        "rows": [
            {
                "size": f"{row['batch']}x{row['prompt_tokens']}",
                "tpot_ms": round(row["tpot_ms"], 4),
                "prefill_tokens_per_s": round(row["prefill_tokens_per_s"]),
            }
            for row in report["rows"]
        ],
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """Of each engine: ms a token, tokens/s of prompts; and both against the mean of the first name's runs."""
    first: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in found:
        size = each["name"].split(" ")[0] if each["name"][0].isdigit() else ""
        if each["name"].removeprefix(size).strip() == "BF16":
            for row in each.get("rows", ()):
                first.setdefault((size, row["size"]), []).append(row)
    text: list[str] = []
    for each in found:
        if "failed" in each:
            text.append(f"{each['name']}: FAILED {each['failed'][-300:]}")
            continue
        size = each["name"].split(" ")[0] if each["name"][0].isdigit() else ""
        cells = []
        for row in each["rows"]:
            beside = first.get((size, row["size"]), [])
            cell = f"{row['size']} {row['tpot_ms']:.3f} {row['prefill_tokens_per_s']:,}"
            if beside:
                tpot = sum(one["tpot_ms"] for one in beside) / len(beside)
                speed = sum(one["prefill_tokens_per_s"] for one in beside) / len(beside)
                cell += f" ({tpot / row['tpot_ms']:.2f} {row['prefill_tokens_per_s'] / speed:.2f})"
            cells.append(cell)
        text.append(f"{each['name']}: " + "  ".join(cells))
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("commit")
    parser.add_argument("--plan", nargs="+", choices=PLANS, default=["dense"])
    parser.add_argument("--seconds", type=float, default=150)
    given = parser.parse_args()
    begin, found, left_out = time.monotonic(), [], []
    device = ["device=cuda", "load_format=dummy"]
    with tempfile.TemporaryDirectory() as folder:
        published_configs.write(Path(folder))
        for line in [each for name in given.plan for each in PLANS[name]]:
            if time.monotonic() - begin > given.seconds:
                left_out.append(line.name)
                continue
            tokens = 20480 if "1x16384" in line.sizes else 2048
            report = run(line, Path(folder), given.commit, tokens, device)
            found.append(kept(line, report))
            print(f"{time.monotonic() - begin:5.0f} s  {table(found[-1:])}", flush=True)
            described = {key: report[key] for key in ("commit", "gpu", "date", "machine", "versions") if key in report}
            whole = {
                **described,
                "command": f"python3 tools/device/less_to_read.py --plan {' '.join(given.plan)}",
                "output_tokens": OUTPUT,
                "engines": found,
                "left_out": left_out,
            }
            given.out.write_text(json.dumps(whole, indent=1) + "\n")
    print(table(found))
    if left_out:
        print("left out:", ", ".join(left_out))
    return 1 if any("failed" in each for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
