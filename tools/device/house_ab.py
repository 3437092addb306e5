"""Two source trees side by side on one machine: what a change of the code costs at run time.

    python3 tools/device/house_ab.py BASELINE [--parts offline startup] [--runs 5] [--json FILE]

BASELINE is a checkout of the older code in any folder (`git archive COMMIT | tar x -C .device/baseline`, which `carry`
brings to the device machine); this checkout is the newer one. Nothing may be installed: both run from their sources,
each with its own entry points, and only the command line of each is used, so that their modules may be named
differently. Runs alternate A, B, A, B; the table has medians, the least and the greatest, the ratio B / A of the
medians, and its 95 % interval (bootstrap).

    part        figures                                                         seconds per run, H100
    offline     engine alone: TPOT and prefill at 1 x 1024 and 32 x 1024        10
    startup     ready, resident memory                                          8
    serve       HTTP: TTFT and TPOT alone, tokens/s and TTFT of 32 in flight    15
    frontend    CPU seconds per 100,000 streamed tokens over a C program's      10
    scheduler   host microseconds of a step of 1 and 256 rows, of a KV block    4
    imports     seconds of `import` in a fresh interpreter                      3

`offline`, `startup` and `serve` take Qwen3-4B's shape with dummy weights on a GPU, or the tiny model (`--device cpu`).
One run of each part and tree is thrown away first, so that kernels are compiled and files are in the page cache.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import source_packages

QWEN3_4B: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 2031,
    "eos_token_id": 2033,
}
IMPORTS = {
    "openinfer": "import openinfer",
    "LLM": "from openinfer import LLM",
    "the command": "import openinfer_core, openinfer.commands.main",
    "the server": "from openinfer_server import ServerOptions, run",
    "the engine": "import openinfer_engine",
    "a family": "import openinfer_qwen3",
}
RUN_LIMIT_S = 180
RESAMPLES = 2000

Figures = dict[str, float]
"""`TPOT ms 1 x 1024` -> the value of one run."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One source tree; `environment` finds its packages."""

    name: str
    folder: Path
    environment: dict[str, str]

    def run(self, *arguments: str) -> str:
        """Output of a Python process of this tree; the process is in a folder that holds no code."""
        command = [sys.executable, "-P", *arguments]
        done = subprocess.run(
            command, env=self.environment, cwd="/tmp", capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
        )
        if done.returncode:
            sys.exit(f"{self.name}: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def bench(self, *arguments: str) -> dict[str, Any]:
        """What `openinfer bench ARGUMENTS --json FILE` wrote."""
        with tempfile.TemporaryDirectory(prefix="house-ab-") as folder:
            report = Path(folder) / "report.json"
            self.run("-m", "openinfer.commands.main", "bench", *arguments, "--json", str(report))
            return json.loads(report.read_bytes())


@dataclass(frozen=True, slots=True)
class Set:
    """What the parts measure on."""

    model: str
    on_gpu: bool

    @property
    def flags(self) -> list[str]:
        return ["--model", self.model, *(["--device", "cuda", "--load-format", "dummy"] if self.on_gpu else [])]


def offline(tree: Tree, made: Set) -> Figures:
    model = (
        made.model if made.on_gpu else tree.run("-c", "import openinfer_tiny_model as m; print(m.model_dir())").strip()
    )
    gpu = ["device=cuda", "load_format=dummy", "max_model_tokens=20480"]
    options = gpu if made.on_gpu else ["num_blocks=2048", "max_num_seqs=32"]
    sizes = ["1x1024", "32x1024"] if made.on_gpu else ["1x64", "8x64"]
    flags = [each for option in options for each in ("--option", option)]
    report = tree.bench("offline", "--model", model, "--size", *sizes, *flags, "--commit", tree.name)
    figures: Figures = {}
    for row in report["rows"]:
        size = f"{row['batch']} x {row['prompt_tokens']}"
        figures[f"offline {size} TPOT ms"] = row["tpot_ms"]
        figures[f"offline {size} prefill ms"] = row["prefill_s"] * 1e3
    return figures


def startup(tree: Tree, made: Set) -> Figures:
    report = tree.bench("startup", "--repeats", "1", *made.flags, "--commit", tree.name)
    return {"startup ready s": report["ready_s"], "startup resident MiB": report["resident_mb"]}


def serve(tree: Tree, made: Set) -> Figures:
    size, ids = ("1024x128", "151000") if made.on_gpu else ("64x16", "2000")
    workloads = [f"bs1:{size}", f"conc=32:{size}"]
    report = tree.bench("serve", *made.flags, "--workload", *workloads, "--num-token-ids", ids, "--commit", tree.name)
    alone, loaded = report["rows"]
    return {
        "serve bs1 TTFT p50 ms": alone["ttft_ms"]["p50"],
        "serve bs1 TPOT p50 ms": alone["tpot_ms"]["p50"],
        "serve conc=32 TTFT p50 ms": loaded["ttft_ms"]["p50"],
        "serve conc=32 TPOT p50 ms": loaded["tpot_ms"]["p50"],
        "serve conc=32 ms per 1000 tokens": 1e6 / loaded["out_tok_s"],
    }


def frontend(tree: Tree, made: Set) -> Figures:
    report = tree.bench("frontend", "--streams", "64", "--seconds", "3", "--repeats", "1")
    (row,) = report["rows"]
    return {"frontend 64 streams CPU over floor": row["ratio"], "frontend 64 streams lag p99 ms": row["lag_p99_ms"]}


def scheduler(tree: Tree, made: Set) -> Figures:
    report = tree.bench("scheduler", "--rows", "1", "256")
    figures = {f"scheduler {row['rows']} rows us per step": row["median_step_us"] for row in report["scheduler"]}
    return figures | {"scheduler us per KV block": report["bookkeeping_us_per_block"]}


def imports(tree: Tree, made: Set) -> Figures:
    figures: Figures = {}
    for name, statement in IMPORTS.items():
        code = f"import time; b = time.perf_counter(); {statement}; print(time.perf_counter() - b)"
        figures[f"import {name} ms"] = 1e3 * min(float(tree.run("-c", code)) for _ in range(3))
    return figures


PARTS: Mapping[str, Callable[[Tree, Set], Figures]] = {
    each.__name__: each for each in (offline, startup, serve, frontend, scheduler, imports)
}


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="house-ab-model-") as folder:
        trees = [make_tree("A", arguments.baseline), make_tree("B", source_packages.ROOT)]
        on_gpu = arguments.device == "cuda"
        if on_gpu:
            write_model(Path(folder), trees[1])
        made = Set(folder if on_gpu else "tiny", on_gpu)
        begin_s = time.monotonic()
        samples: dict[str, dict[str, list[float]]] = {}
        for part in arguments.parts:
            for number in range(arguments.runs + 1):
                for tree in trees:
                    figures = PARTS[part](tree, made)
                    if number:  # the first run is thrown away
                        for name, value in figures.items():
                            samples.setdefault(name, {"A": [], "B": []})[tree.name].append(value)
                    print(
                        f"  {time.monotonic() - begin_s:5.0f} s  {part} {number} {tree.name}",
                        file=sys.stderr,
                        flush=True,
                    )
            rows = [row_of(name, each) for name, each in samples.items()]
            write(arguments.json, rows, arguments)  # after each part: a later one may run into the time limit
    print(table(rows))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", type=Path, metavar="BASELINE", help="the tree that is A; this checkout is B")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS], help="what to measure")
    parser.add_argument("--runs", type=int, default=5, help="runs of each tree that count")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    return parser.parse_args()


def make_tree(name: str, folder: Path) -> Tree:
    return Tree(name, folder.resolve(), source_packages.environment(folder.resolve()))


def write_model(folder: Path, tree: Tree) -> None:
    """Qwen3-4B's shape with the tiny model's tokenizer, whose vocabulary is filled up to Qwen3's size."""
    source = Path(tree.run("-c", "import openinfer_tiny_model as m; print(m.model_dir())").strip())
    tokenizer = json.loads((source / "tokenizer.json").read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary.update({f"<unused{i}>": i for i in range(QWEN3_4B["vocab_size"]) if i not in taken})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(QWEN3_4B))


def row_of(name: str, samples: dict[str, list[float]]) -> dict[str, Any]:
    a, b = samples["A"], samples["B"]
    rng = random.Random(0)
    ratios = sorted(
        statistics.median(rng.choices(b, k=len(b))) / statistics.median(rng.choices(a, k=len(a)))
        for _ in range(RESAMPLES)
    )
    return {
        "figure": name,
        "a": statistics.median(a),
        "b": statistics.median(b),
        "ratio": statistics.median(b) / statistics.median(a),
        "ratio_95": [ratios[RESAMPLES * 25 // 1000], ratios[RESAMPLES * 975 // 1000 - 1]],
        "a_samples": a,
        "b_samples": b,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'figure':36} {'A median':>10} {'least':>9} {'most':>9} {'B median':>10} {'least':>9} {'most':>9}  B / A"
    ]
    for row in rows:
        cells = [
            f"{statistics.median(samples):>10.4g} {min(samples):>9.4g} {max(samples):>9.4g}"
            for samples in (row["a_samples"], row["b_samples"])
        ]
        low, high = row["ratio_95"]
        lines.append(f"{row['figure']:36} {cells[0]} {cells[1]}  {row['ratio']:.3f} ({low:.3f} to {high:.3f})")
    return "\n".join(lines)


def write(path: Path | None, rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {"baseline": str(arguments.baseline), "device": arguments.device, "runs": arguments.runs, "rows": rows}
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
