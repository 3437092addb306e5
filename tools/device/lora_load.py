"""What loading a new adapter takes, part by part, on the host: reading, checking, hashing, and a slot's layout.

    python3 tools/device/lora_load.py MODEL [--rank R] [--repeats N] [--commit C] [--json FILE]

MODEL is a folder with a config.json. The adapter has all projections, its file is BF16 and in the page cache. What a
slot has is written to ordinary memory, in the place of a GPU's pinned memory; both are made anew for every load.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = folders()

import numpy as np  # noqa: E402
from made_adapters import made_adapters  # noqa: E402

from openinfer_core import read_config  # noqa: E402
from openinfer_engine.lora import adapter_folder  # noqa: E402
from openinfer_engine.lora.adapter_folder import read_adapter  # noqa: E402
from openinfer_engine.lora.arena import AdapterArena, adapted_modules, piece_of  # noqa: E402
from openinfer_kernels.cpu import CpuOps  # noqa: E402


class HalfOps(CpuOps):
    """Numbers of two bytes, as a GPU's slots have them."""

    def zeros(self, shape: Any, dtype: Any = np.float16) -> Any:
        return np.zeros(shape, dtype)

    def host_weights(self, num_values: int) -> Any:
        return np.empty(num_values, np.float16)


def arena_of(matrices: Any, rank: int) -> AdapterArena:
    """Of one rank, with a product for each matrix."""
    arena = AdapterArena(ops=HalfOps(), num_slots=1, max_rank=rank)
    for matrix, shard in matrices:
        arena.add(np.zeros(1), [piece_of(matrix, shard, rank=0, size=1)])
    return arena


def seconds(run: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with made_adapters(given.model, count=1, rank=given.rank) as made:
        folder = made.folder / made.names[0]
        num_bytes = (folder / adapter_folder.WEIGHTS_FILE).stat().st_size
        matrices = made.definition.adapted_matrices(made.definition.parse(read_config(given.model)))
        modules, arena = adapted_modules(matrices), arena_of(matrices, given.rank)

        def read() -> Any:
            return read_adapter(folder, modules=modules, max_rank=given.rank)

        adapter = read()
        found = {
            "read_s": seconds(read, given.repeats),
            "share_s": seconds(lambda: arena.share_of(adapter), given.repeats),
            "load_s": seconds(lambda: arena.share_of(read()), given.repeats),
        }
    record = {
        "model": given.model.name,
        "commit": given.commit,
        "rank": given.rank,
        "adapter_bytes": num_bytes,
        "cpus": os.cpu_count(),
        **found,
        "gb_per_s": num_bytes / found["load_s"] / 1e9,
    }
    print(
        "  ".join(
            f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in record.items()
        )
    )
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
