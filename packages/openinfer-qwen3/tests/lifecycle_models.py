"""Small Qwen3 models, and adapters of them, for engines that sleep and change their weights; on a CPU and on a GPU."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from openinfer_core import Refused
from openinfer_engine.engine_plan import resolve
from openinfer_engine.launch import build_loop
from openinfer_engine.loop import StepLoop
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions
from openinfer_engine.testing import random_weights
from openinfer_engine.testing.adapters import write_adapter
from openinfer_qwen3.family import Qwen3Definition

CPU_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 128,
}
RANKS = [
    pytest.param({}, id="one-rank"),
    pytest.param({"tensor_parallel_size": 2}, id="two-threads"),
    pytest.param({"tensor_parallel_size": 2, "rank_host": "process"}, id="two-processes"),
]
SMALL: Mapping[str, Any] = {"num_blocks": 64, "block_size_tokens": 8, "max_num_seqs": 8, "batch_invariant": True}
"""Options of an engine of such a model on a CPU."""
LEVELS = [pytest.param(True, id="level-1"), pytest.param(False, id="level-2")]
"""Of sleep, as `keeps_weights`."""
Weights = Mapping[str, NDArray[np.float32]]


def changed(weights: Weights, *, seed: int) -> dict[str, NDArray[np.float32]]:
    """Other numbers of the same shapes: every tensor differs."""
    rng = np.random.default_rng(seed)
    return {name: each * rng.uniform(0.7, 1.3, each.shape).astype(np.float32) for name, each in weights.items()}


def write_model(folder: Path, weights: Weights, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / "model.safetensors")
    return folder


def write_adapted(folder: Path, config: Mapping[str, Any], adapters: Mapping[str, int]) -> Path:
    """Two models of one config, `old` and `new`, and adapters, by name with their ranks."""
    weights = random_weights(Qwen3Definition(), config)
    write_model(folder / "old", weights, config)
    write_model(folder / "new", changed(weights, seed=1), config)
    for seed, (name, rank) in enumerate(adapters.items()):
        write_adapter(folder / name, Qwen3Definition(), config, rank=rank, seed=seed)
    return folder


MakeLoop = Callable[..., StepLoop]


@contextmanager
def opened_loops(*, skips_refused: bool = False) -> Iterator[MakeLoop]:
    """Makes loops of a folder and options, of Qwen3 unless `definition` says otherwise; all are closed at the end.

    Args:
        skips_refused: whether a test is skipped where an engine is refused, as where there is no GPU.
    """
    loops: list[StepLoop] = []

    def make(folder: Path, *, definition: ModelDefinition[Any] | None = None, **options: Any) -> StepLoop:
        try:
            loops.append(build_loop(resolve(definition or Qwen3Definition(), folder, EngineOptions(**options))))
        except Refused as reason:
            if not skips_refused:
                raise
            pytest.skip(str(reason))
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()
