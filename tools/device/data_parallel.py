"""Data-parallel attention with experts dealt out against tensor parallelism, on as many GPUs each.

    python3 tools/device/data_parallel.py MODEL OUT.json [--ranks 2] [--sizes 256x512 64x1024 2x1024] [--device cpu]

MODEL needs the config.json of a DeepSeek over latents alone: weights are random, the same for both. Ways take turns
(tensor, data, tensor), each an engine in a process of its own. Tokens of KV are those that all ranks hold;
log-probabilities are of the same prompts. Last, how choices spread over experts, in a model of fewer layers on one GPU.
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from experts_hit import PROMPT_TOKENS, Run, ops_of
from tensor_parallel import answers, describe
from timed_steps import timed

from openinfer_core import claim, list_plugins, read_config
from openinfer_core.plugins import MODELS
from openinfer_core.provenance import provenance
from openinfer_engine import resolve
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.launch import build_engine_loop
from openinfer_engine.worker.process_group import start_workers

WAYS = ("tensor", "data", "spread")
LIMIT_S = 50
SPREAD_LAYERS, SPREAD_ROWS = 4, 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=["256x512", "64x1024", "2x1024"])
    parser.add_argument("--options", type=json.loads, default={}, help="further options of the engines, as JSON")
    parser.add_argument("--turns", nargs="+", choices=WAYS, default=["tensor", "data", "tensor", "spread"])
    parser.add_argument("--way", choices=WAYS)
    given = parser.parse_args()
    if given.way is not None:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # ranks that wait for each other: where each thread is
        one_way(given)
        return
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn, way in enumerate(given.turns):
            out = Path(folder) / f"{turn}.json"
            again = [argument for argument in sys.argv[1:] if argument not in (str(given.out),)]
            command = [sys.executable, __file__, *again[:1], str(out), *again[1:], "--way", way]
            done = subprocess.run(command, check=False, env=os.environ)
            if done.returncode or not out.exists():
                print(f"{way}: ended with {done.returncode}", flush=True)
                continue
            runs.append({"way": way, **json.loads(out.read_text())})
            print(json.dumps({name: value for name, value in runs[-1].items() if name != "answers"}), flush=True)
    said = {run["way"]: np.asarray(run.pop("answers")) for run in runs if "answers" in run}
    drift = describe("data against tensor", said["data"], said["tensor"]) if len(said) == 2 else None
    report = {"ranks": given.ranks, "options": given.options, "drift": drift, "runs": runs}
    set_up = msgspec.to_builtins(provenance(commit=os.environ.get("COMMIT")))
    given.out.write_text(json.dumps({**set_up, **report}, indent=2) + "\n")


def one_way(given: argparse.Namespace) -> None:
    if given.way == "spread":
        given.out.write_text(json.dumps(spread(given.model, given.device, ranks=given.ranks)))
        return
    family: Any = claim(read_config(given.model), list_plugins(MODELS))[0]
    sizes = [tuple(map(int, size.split("x"))) for size in given.sizes]
    # Rows and tokens of a step are a data-parallel rank's own.
    share = given.ranks if given.way == "data" else 1
    rows, step_tokens = max(batch for batch, _ in sizes), 8192
    asked = {"device": given.device, "load_format": "dummy", "prefix_cache": False, "grammar_compiler": "none"}
    spare = 0 if share == 1 else rows // 16  # ranks need not have equally many
    asked |= {"max_num_seqs": -(-rows // share) + spare, "max_step_tokens": step_tokens // share}
    asked |= {f"{given.way}_parallel_size": given.ranks, **given.options}
    options = msgspec.convert(asked, family.options_type)
    begin_s = time.perf_counter()
    processes = start_workers(EngineSpec.of(family.definition, given.model, options), options)
    loop: Any = build_engine_loop(resolve(family.definition, given.model, options), processes)
    found: dict[str, Any] = {"start_s": round(time.perf_counter() - begin_s, 2), "rows": []}
    found["kv_tokens"] = loop.info.num_blocks * loop.info.block_size_tokens
    found["memory_bytes"] = dict(loop.info.memory_bytes)
    first, second = answers(loop), answers(loop)
    found["is_repeatable"] = bool(np.array_equal(first, second))
    for batch, prompt in sizes:
        timed(loop, batch=batch, prompt=prompt)  # what is thrown away
        found["rows"].append(timed(loop, batch=batch, prompt=prompt))
        print(given.way, found["rows"][-1], flush=True)
    loop.close()
    given.out.write_text(json.dumps({**found, "answers": first.tolist()}))


class Choices(Run):
    """Counts what each expert of each layer was chosen for."""

    def top_experts(self, *given: Any, **keywords: Any) -> Any:
        choice = self._ops.top_experts(*given, **keywords)
        self.hit.append(np.bincount(self._ops.download(choice.ids).reshape(-1), minlength=choice.num_experts))
        return choice


def spread(model: Path, device: str, *, ranks: int) -> dict[str, Any]:
    """Of the choices of one decode step: busiest expert and busiest rank, of the mean."""
    config = dict(read_config(model))
    family: Any = claim(config, list_plugins(MODELS))[0]
    layers = min(SPREAD_LAYERS, config["num_hidden_layers"])
    few = family.definition.parse(config | {"num_hidden_layers": layers})
    run, rng = Choices(family.definition, few, ops_of(device), rows=SPREAD_ROWS), np.random.default_rng(1)
    run.step(0, rng.integers(0, few.vocab_size, (SPREAD_ROWS, PROMPT_TOKENS)))
    run.step(PROMPT_TOKENS, rng.integers(0, few.vocab_size, (SPREAD_ROWS, 1)))
    chosen = np.asarray(run.hit)  # [layers, experts]
    of_ranks = chosen.reshape(len(chosen), ranks, -1).sum(axis=2)
    return {
        "rows": SPREAD_ROWS,
        "layers": len(chosen),
        "busiest_expert": round(float((chosen.max(axis=1) / chosen.mean(axis=1)).max()), 3),
        "busiest_rank": round(float((of_ranks.max(axis=1) / of_ranks.mean(axis=1)).max()), 3),
        "experts_hit": round(float((chosen > 0).sum(axis=1).mean()), 1),
    }


if __name__ == "__main__":
    main()
