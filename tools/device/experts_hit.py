"""How many experts of a layer the tokens of one step choose, and what such a step has to read at least.

    python3 tools/device/experts_hit.py MODEL ... [--layers N] [--rows 1 8 64] [--device cpu] [--json FILE]

Each MODEL needs the config.json of a mixture alone. Its first layers have random weights; rows have random prompts of
32 tokens, then the experts of one more token each are counted. Bytes are those of the config's format: of all weights
that every step reads, and of the experts that were hit, both of all the model's layers; not those of KV and states.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = folders()

import numpy as np  # noqa: E402

from openinfer_core import claim, list_plugins, read_config  # noqa: E402
from openinfer_core.plugins import MODELS  # noqa: E402
from openinfer_engine.distributed.communicator import SoloCommunicator  # noqa: E402
from openinfer_engine.weights.dummy import DeviceDummyWeights  # noqa: E402
from openinfer_engine.weights.stored_tensor import spec_bytes  # noqa: E402
from openinfer_engine.worker.paged_tensors import make_pool  # noqa: E402
from openinfer_kernels import AttentionBatch  # noqa: E402
from openinfer_kv_cache import KvDtype, KvLayout  # noqa: E402

BLOCK_TOKENS, PROMPT_TOKENS = 64, 32
BYTES_PER_S = 4.3e12
"""Of an H200, usable."""


class Run:
    """The first layers of a model with one block per row."""

    def __init__(self, definition: Any, config: Any, ops: Any, *, rows: int) -> None:
        self._ops, self._rows, self.hit = ops, rows, []
        self._model = definition.load(
            config,
            DeviceDummyWeights(definition.tensors(config), rank=0, size=1),
            ops=self,
            communicator=SoloCommunicator(),
            max_model_tokens=BLOCK_TOKENS,
        )
        dtype = KvDtype(str(ops.zeros((1,)).dtype))
        spec = definition.kv_spec(
            config, model_tag="dummy", kv_dtype=dtype, state_dtype=dtype, num_ranks=1, rank_index=0
        )
        self._pool = make_pool(KvLayout.from_spec(spec, block_size_tokens=BLOCK_TOKENS), num_blocks=rows, ops=ops)
        self._states = {
            f"{group.name}.{tensor.name}": ops.zeros(
                (rows, group.num_layers, *tensor.shape), None if tensor.dtype is dtype else np.float32
            )
            for group in spec.slots
            for tensor in group.tensors
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def top_experts(self, *given: Any, **keywords: Any) -> Any:
        choice = self._ops.top_experts(*given, **keywords)
        self.hit.append(len(np.unique(self._ops.download(choice.ids))))
        return choice

    def step(self, first: int, token_ids: np.ndarray) -> None:
        """`token_ids [rows, tokens]` at positions from `first` on."""
        rows, count = token_ids.shape
        upload, self.hit = self._ops.upload, []
        positions = np.tile(np.arange(first, first + count, dtype=np.int32), rows)
        slots = np.repeat(np.arange(rows, dtype=np.int64), count) * BLOCK_TOKENS + positions
        batch = AttentionBatch(
            positions=upload(positions),
            query_starts=upload(np.arange(rows + 1, dtype=np.int32) * count),
            context_lens=upload(np.full(rows, first + count, np.int32)),
            block_tables=(upload(np.arange(rows, dtype=np.int32)[:, None]),),
            cache_slots=(upload(slots),),
            max_query_tokens=count,
            max_context_tokens=first + count,
            block_tokens=BLOCK_TOKENS,
            caches=self._pool.tensors,
            state_slots=upload(np.arange(rows, dtype=np.int32)),
            states=self._states,
        )
        self._model.forward(upload(token_ids.reshape(-1).astype(np.int32)), batch=batch, kv_cache=self._pool.layers)


def measure(definition: Any, given: dict[str, Any], ops: Any, *, layers: int, rows: int) -> dict[str, Any]:
    few, whole = definition.parse(given | {"num_hidden_layers": layers}), definition.parse(given)
    run, rng = Run(definition, few, ops, rows=rows), np.random.default_rng(rows)
    run.step(0, rng.integers(0, whole.vocab_size, (rows, PROMPT_TOKENS)))
    run.step(PROMPT_TOKENS, rng.integers(0, whole.vocab_size, (rows, 1)))
    hit, experts = float(np.mean(run.hit)), whole.num_experts + whole.experts(0).routing.shared_expert
    specs = definition.tensors(whole)
    sizes = {name: spec_bytes(spec, itemsize_bytes=2) for name, spec in specs.items() if "embed_tokens" not in name}
    all_bytes = sum(sizes.values())
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name or ".shared_expert." in name)
    read = all_bytes - of_experts + hit / experts * of_experts
    return {
        "rows": rows,
        "experts_hit": round(hit, 1),
        "of": experts,
        "weights_read_gb": round(read / 1e9, 2),
        "floor_ms": round(1e3 * read / BYTES_PER_S, 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="+")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="the CPU takes small models")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    ops, found = ops_of(given.device), []
    for model in given.model:
        config = dict(read_config(model))
        family: Any = claim(config, list_plugins(MODELS))[0]
        for rows in given.rows:
            hit = measure(family.definition, config, ops, layers=given.layers, rows=rows)
            found.append({"model": model.name, **hit})
            print(found[-1], flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps(found, indent=2) + "\n")


def ops_of(device: str) -> Any:
    if device == "cpu":
        from openinfer_kernels.cpu import CpuOps

        return CpuOps()
    from openinfer_kernels.cuda import CudaOps, Device

    return CudaOps(Device.open())


if __name__ == "__main__":
    main()
