"""Cached turns against uncached ones, a feature at a time and several at once: `bench sessions --check` on a CPU.

    python tools/agents/correctness.py OUT.json [ARM ...]

Every arm starts a server with `--batch-invariant true` and a pool of about a third of what its sessions hold, plays
sessions, and asks every turn that a cache helped again under a fresh cache_salt: tokens and log-probabilities must be
equal, with no tolerance. Arms that stand in OUT.json already are left out, so that a run may be interrupted. Adapters'
sessions are played at one time with equal prompts and one salt by every adapter and by none.

    dense     the tiny model, with its own weights
    hybrid    four layers of Qwen3.5's kind (linear and full attention) with drawn weights
    drafting  a model of that kind with a trained drafting layer (MTP): the fixture of openinfer-qwen35's tests
"""

import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

import openinfer_tiny_model
from openinfer_bench.served import OPENINFER, Served, served
from openinfer_core.provenance import provenance

ROOT = Path(__file__).resolve().parents[2]
DRAFTING = ROOT / "packages" / "openinfer-qwen35" / "tests" / "fixtures_mtp"
HYBRID = ROOT / "packages" / "openinfer-bench" / "tests" / "fixtures" / "hybrid" / "config.json"
SHAPE = ("--turns", "13", "--first-tokens", "64", "--new-tokens", "23", "--output-tokens", "33")
SHAPE = (*SHAPE, "--wait-s", "0.05", "--agents-share", "0.4")
POOL = ("--num-blocks", "96")
"""Of 16 tokens; eleven sessions end with 8,000 tokens, and what runs at once is preempted now and then."""
WIDE, WIDER = ("--num-blocks", "400"), ("--num-blocks", "1200")
"""Where nothing but the pool keeps a session: a pool of a third would forget each before its next turn."""
STATES = ("--state-snapshot-bytes", str(4 << 20))
HOST, DISK = ("--kv-tier", "host=64MiB"), ("--kv-tier", "disk={folder},256MiB")
NGRAM, FP8 = ("--speculative", "ngram,k=4"), ("--kv-cache-dtype", "fp8")
EARLY = ("--scheduler-option", "early-loads=true")
ADAPTERS = ("legal", "medical")
LORA = tuple(text for name in ADAPTERS for text in ("--lora", f"{name}={{folder}}/{name}"))
COUNTED = (
    "openinfer_num_preemptions_total",
    "openinfer_spec_decode_num_accepted_tokens_total",
    "openinfer_kv_tier_early_blocks_total",
)


@dataclass(frozen=True, slots=True)
class Arm:
    """`flags` are the server's; `{folder}` in them is a scratch folder."""

    model: str
    flags: tuple[str, ...]
    has_adapters: bool = False
    restarts: bool = False


ARMS: Mapping[str, Arm] = {
    "dense": Arm("dense", WIDE),
    "dense-ngram": Arm("dense", (*WIDE, *NGRAM)),
    "dense-host": Arm("dense", (*POOL, *HOST)),
    "dense-host-ngram-fp8": Arm("dense", (*POOL, *HOST, *NGRAM, *FP8)),
    "dense-host-early": Arm("dense", (*POOL, *HOST, *EARLY)),
    "dense-host-early-ngram-fp8": Arm("dense", (*POOL, *HOST, *EARLY, *NGRAM, *FP8)),
    "dense-disk-early-restarted": Arm("dense", (*POOL, *DISK, *EARLY), restarts=True),
    "dense-disk-restarted": Arm("dense", (*POOL, *DISK), restarts=True),
    "dense-fp8": Arm("dense", (*WIDE, *FP8)),
    "dense-lora": Arm("dense", (*WIDER, *LORA), has_adapters=True),
    "dense-lora-host-ngram-fp8": Arm("dense", (*POOL, *LORA, *HOST, *NGRAM, *FP8), has_adapters=True),
    "hybrid": Arm("hybrid", (*WIDE, *STATES)),
    "hybrid-ngram": Arm("hybrid", (*WIDE, *STATES, *NGRAM)),
    "hybrid-host": Arm("hybrid", (*POOL, *STATES, *HOST)),
    "hybrid-host-ngram-fp8": Arm("hybrid", (*POOL, *STATES, *HOST, *NGRAM, *FP8)),
    "hybrid-host-early": Arm("hybrid", (*POOL, *STATES, *HOST, *EARLY)),
    "hybrid-disk-restarted": Arm("hybrid", (*POOL, *STATES, *DISK), restarts=True),
    "drafting-mtp": Arm("drafting", (*WIDE, *STATES, "--speculative", "mtp,k=2")),
    "drafting-mtp-host": Arm("drafting", (*POOL, *STATES, *HOST, "--speculative", "mtp,k=2")),
}


def make_models(folder: Path) -> Mapping[str, Path]:
    hybrid, drafting = folder / "hybrid", folder / "drafting"
    hybrid.mkdir()
    shutil.copy(openinfer_tiny_model.model_dir() / "tokenizer.json", hybrid)
    # drawn weights sample every id, and the server has no text for ids beyond its tokenizer's
    num_ids = Tokenizer.from_file(str(hybrid / "tokenizer.json")).get_vocab_size()
    (hybrid / "config.json").write_text(json.dumps(json.loads(HYBRID.read_text()) | {"vocab_size": num_ids}))
    shutil.copytree(DRAFTING, drafting)
    vocabulary = {f"<{index}>": index for index in range(128)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<0>")).save(str(drafting / "tokenizer.json"))
    return {"dense": openinfer_tiny_model.model_dir(), "hybrid": hybrid, "drafting": drafting}


def write_adapter(folder: Path, *, seed: int) -> None:
    """A PEFT folder for the tiny model: random factors of rank 8 for the attention's q and v of every layer."""
    folder.mkdir()
    config = json.loads((openinfer_tiny_model.model_dir() / "config.json").read_bytes())
    rng, tensors = np.random.default_rng(seed), dict[str, Any]()
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    widths = {"q": config["num_attention_heads"] * head_dim, "v": config["num_key_value_heads"] * head_dim}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            tensors[f"{at}.lora_A.weight"] = rng.normal(0, 0.05, (8, hidden)).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = rng.normal(0, 0.05, (width, 8)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [f"{name}_proj" for name in widths]
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 32, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def run(arm: Arm, model: Path, scratch: Path) -> dict[str, Any]:
    for seed, name in enumerate(ADAPTERS if arm.has_adapters else ()):
        write_adapter(scratch / name, seed=seed)
    flags = ["--model", str(model), "--model-name", "base", "--batch-invariant", "true", "--max-num-seqs", "16"]
    flags += [
        "--max-step-tokens",
        "128",
        "--log-level",
        "warning",
        *(flag.format(folder=scratch) for flag in arm.flags),
    ]
    flags += ["--load-format", "dummy"] if arm.model == "hybrid" else []
    flags += ["--grammar-compiler", "none"]
    ids, most = ("120", "500") if arm.model == "drafting" else ("2000", "1200")
    if arm.restarts:
        with served(flags) as server:
            play(server, ["base"], "--num-token-ids", ids, "--max-tokens", most, "--salt", "kept")
    with served(flags) as server:
        names = ["base", *(ADAPTERS if arm.has_adapters else ())]
        found = play(
            server,
            names,
            "--num-token-ids",
            ids,
            "--max-tokens",
            most,
            "--salt",
            "kept",
            "--check",
            "1000",
            "--tolerance",
            "0",
        )
        counters = counted(server)
    checked = [each for report in found for each in report["checked"]]
    verdicts = {name: sum(each["verdict"] == name for each in checked) for name in ("same", "tie", "different")}
    return {
        "flags": list(arm.flags),
        "turns": sum(report["totals"]["turns"] for report in found),
        "failed": sum(report["totals"]["failed"] for report in found),
        "checked": len(checked),
        **verdicts,
        "unanswered": sum(each["verdict"] == "unanswered" for each in checked),
        "not_the_same": [each for each in checked if each["verdict"] != "same"][:20],
        "tiers": [report["totals"]["tiers"] for report in found],
        "hits_of_allowed": [report["totals"]["hits_of_allowed"] for report in found],
        **counters,
    }


def play(server: Served, names: Sequence[str], *flags: str) -> list[dict[str, Any]]:
    """Reports of sessions that all names play at once."""
    with tempfile.TemporaryDirectory(prefix="sessions-") as folder, ThreadPoolExecutor() as pool:

        def ask(name: str) -> dict[str, Any]:
            report = Path(folder) / f"{name}.json"
            command = [*OPENINFER, "bench", "sessions", "--url", f"http://127.0.0.1:{server.port}"]
            command += ["--served-model", name, "--json", str(report), *SHAPE]
            command += ["--sessions", "4" if len(names) > 1 else "11", *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not report.exists():
                sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
            return json.loads(report.read_bytes())

        return list(pool.map(ask, names))


def counted(server: Served) -> dict[str, int]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return {
        name: round(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))) for name in COUNTED
    }


def main() -> int:
    out, *arms = sys.argv[1:]
    file = Path(out)
    report = json.loads(file.read_bytes()) if file.exists() else {"arms": {}}
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        models_by_kind = make_models(Path(folder))
        for name in arms or ARMS:
            if name in report["arms"]:
                continue
            scratch = Path(folder) / "scratch" / name
            scratch.mkdir(parents=True)
            found = report["arms"][name] = run(ARMS[name], models_by_kind[ARMS[name].model], scratch)
            totals = {key: sum(each[key] for each in report["arms"].values()) for key in ("turns", "checked", "same")}
            report = {**msgspec.to_builtins(provenance()), "shape": " ".join(SHAPE), **totals, "arms": report["arms"]}
            file.write_text(json.dumps(report, indent=1) + "\n")
            print(
                name, {key: value for key, value in found.items() if key not in ("not_the_same", "flags")}, flush=True
            )
    wrong = [name for name, each in report["arms"].items() if each["failed"] or each["checked"] != each["same"]]
    print(f"{report['checked']} turns checked; not right: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
