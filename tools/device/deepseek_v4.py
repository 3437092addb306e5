"""DeepSeek-V4-Flash at its real widths with four layers and few experts: a GPU's logits against the CPU's, in float32.

    python3 tools/device/deepseek_v4.py record FILE.npz              the CPU's logits, some minutes on two cores
    python3 tools/device/deepseek_v4.py compare FILE.npz [JSON]      the GPU's against them, however the prompt is cut

Recorded are the truth, what rounding to BF16 alone makes of it, and what a mistake does, which must not pass; what
passes is `logit_errors.py`'s.
Weights are dummies in the published formats (FP8 and FP4 codes, BF16, float32), the same on both sides. All entries are
selected: equal scores, of which rounding takes others, are the conformance kit's. The engine with its captured steps is
`packages/openinfer-deepseek-v4/tests/test_gpu.py`'s.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from logit_errors import MAX_RATIO, LogitErrors
from published_configs import DEEPSEEK_V4_FLASH
from source_packages import folders

sys.path[:0] = folders()

import numpy as np  # noqa: E402

from openinfer_deepseek_v4.family import DeepseekV4Definition  # noqa: E402
from openinfer_engine.distributed.communicator import SoloCommunicator  # noqa: E402
from openinfer_engine.model import Shard  # noqa: E402
from openinfer_engine.testing import QueriesOneOff, RoundedOps  # noqa: E402
from openinfer_engine.weights.dummy import DummyWeights  # noqa: E402
from openinfer_engine.worker.paged_tensors import make_pool  # noqa: E402
from openinfer_kernels import AttentionBatch  # noqa: E402
from openinfer_kv_cache import KvDtype, KvLayout  # noqa: E402

CONFIG = {
    **{key: value for key, value in DEEPSEEK_V4_FLASH.items() if key not in ("compress_ratios", "num_hash_layers")},
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    # few, for the CPU's sake:
    "num_hidden_layers": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}
TOKENS, EVERY = 700, 7
BLOCK_TOKENS, BLOCKS_OF_ROW, NUM_ROWS = 128, 6, 8
CUTS = {
    "whole": (),
    "chunks of 1 to 256 tokens": (256, 257, 300, 512),
    "640, then token by token": tuple(range(640, TOKENS)),
}


class Weights:
    """Dummies; what mixes, biases and weighs is far from neutral."""

    def __init__(self, definition: DeepseekV4Definition, config: Any) -> None:
        self._dummies = DummyWeights(definition.tensors(config), rank=0, size=1)

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> Any:
        found = self._dummies.read(name, shard)
        if name.endswith("_scale"):
            return np.linspace(0.6, 1.3, found.size, dtype=np.float32)
        if name.endswith(("_base", "attn_sink", "ape", "gate.bias")):
            return np.random.default_rng(len(name)).standard_normal(found.shape, np.float32)
        return found

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> Any:
        return self._dummies.read_stored(name, shard)


class Run:
    """A model with room for a few sequences."""

    def __init__(self, ops: Any, dtype: KvDtype) -> None:
        definition = DeepseekV4Definition()
        config = definition.parse(CONFIG)
        self._ops = ops
        self._model = definition.load(
            config, Weights(definition, config), ops=ops, communicator=SoloCommunicator(), max_model_tokens=1024
        )
        dtypes = {"kv_dtype": dtype, "state_dtype": dtype}
        spec = definition.kv_spec(config, model_tag="dummy", **dtypes, num_ranks=1, rank_index=0)
        layout = KvLayout.from_spec(spec, block_size_tokens=BLOCK_TOKENS)
        self._pool = make_pool(layout, num_blocks=NUM_ROWS * BLOCKS_OF_ROW, ops=ops)
        self._states = {
            f"{group.name}.{tensor.name}": ops.zeros(
                (NUM_ROWS, group.num_layers, *tensor.shape), None if tensor.dtype is dtype else np.float32
            )
            for group in spec.slots
            for tensor in group.tensors
        }
        self._blocks = np.random.default_rng(0).permutation(NUM_ROWS * BLOCKS_OF_ROW).reshape(NUM_ROWS, -1)
        self._lengths = np.zeros(NUM_ROWS, np.int64)

    def step(self, rows: Mapping[int, Sequence[int]]) -> np.ndarray:
        """Logits of the next tokens of some sequences, by their slots."""
        slots, counts = np.array([*rows]), np.array([len(tokens) for tokens in rows.values()])
        owners = np.repeat(slots, counts)
        starts = np.concatenate(([0], np.cumsum(counts)))
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], counts) + self._lengths[owners]
        self._lengths[slots] += counts
        upload = self._ops.upload
        places = self._blocks[owners, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        batch = AttentionBatch(
            positions=upload(positions.astype(np.int32)),
            query_starts=upload(starts.astype(np.int32)),
            context_lens=upload(self._lengths[slots].astype(np.int32)),
            block_tables=(upload(self._blocks[slots].astype(np.int32)),),
            cache_slots=(upload(places.astype(np.int64)),),
            max_query_tokens=int(counts.max()),
            max_context_tokens=int(self._lengths[slots].max()),
            block_tokens=BLOCK_TOKENS,
            caches=self._pool.tensors,
            state_slots=upload(slots.astype(np.int32)),
            states=self._states,
        )
        token_ids = upload(np.concatenate([*rows.values()]).astype(np.int32))
        hidden = self._model.forward(token_ids, batch=batch, kv_cache=self._pool.layers)
        return self._ops.download(self._model.logits(hidden))


def prompt() -> list[int]:
    return np.random.default_rng(7).integers(0, CONFIG["vocab_size"], TOKENS).tolist()


def record(path: Path) -> None:
    from openinfer_kernels.cpu import CpuOps

    made = {"logits": CpuOps(), "rounded": RoundedOps(), "mistaken": QueriesOneOff()}
    found = {name: Run(ops, KvDtype.FLOAT32).step({0: prompt()})[::EVERY] for name, ops in made.items()}
    print(f"logits of {len(found['logits'])} tokens, spread {found['logits'].std():.2f}")
    bounds(found)
    np.savez_compressed(path, **found)


def bounds(recorded: Mapping[str, np.ndarray]) -> LogitErrors:
    """What rounding costs.

    Raises:
        AssertionError: the mistake passes.
    """
    rounded, mistaken = (LogitErrors.between(recorded[name], recorded["logits"]) for name in ("rounded", "mistaken"))
    rounded.show("CPU, results rounded")
    mistaken.show("CPU, queries one off")
    assert not mistaken.pass_beside(rounded), "the bound does not find a mistake"
    return rounded


def compare(path: Path, report: Path | None) -> bool:
    from openinfer_kernels.cuda import CudaOps

    ops, tokens = CudaOps(), prompt()
    run, recorded = Run(ops, KvDtype.BFLOAT16), np.load(path)
    expected, rounded = recorded["logits"], bounds(recorded)
    found: dict[str, LogitErrors] = {}
    for slot, (name, shards) in enumerate(CUTS.items()):
        pieces = [
            run.step({slot: tokens[first:end]}) for first, end in zip((0, *shards), (*shards, TOKENS), strict=True)
        ]
        found[name] = LogitErrors.between(np.concatenate(pieces)[::EVERY], expected)
    first = run.step({6: tokens[:128], 7: tokens[:200]})[:128]
    rest = run.step({6: tokens[128:], 7: tokens[200:201]})[: TOKENS - 128]
    found["beside another sequence"] = LogitErrors.between(np.concatenate((first, rest))[::EVERY], expected)
    for name, each in found.items():
        each.show(name)
    passes = all(each.pass_beside(rounded) for each in found.values())
    if report is not None:
        runs = {name: each._asdict() for name, each in found.items()}
        facts = {"gpu": ops.device.name, "config": CONFIG, "max_ratio": MAX_RATIO, "passes": passes}
        report.write_text(json.dumps(facts | {"cpu_rounded": rounded._asdict(), "runs": runs}, indent=1) + "\n")
    return passes


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", path]:
            record(Path(path))
        case ["compare", path, *report]:
            sys.exit(0 if compare(Path(path), Path(report[0]) if report else None) else 1)
        case _:
            sys.exit(__doc__)
