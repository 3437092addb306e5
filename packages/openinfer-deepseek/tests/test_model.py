"""Loading: which tensors are read, where they go on each rank, and what of a step is left out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from openinfer_core import InvalidCheckpoint, read_config
from openinfer_deepseek.family import DeepseekV2Definition
from openinfer_deepseek.model import DeepseekConfig, DeepseekModel, load
from openinfer_engine.distributed.communicator import SoloCommunicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.model import LastTokenModel, Shard, WeightSource
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights
from openinfer_engine.weights.dummy import DummyWeights
from openinfer_kernels.cpu import CpuOps

PUBLISHED: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
}
definition = DeepseekV2Definition()


class RecordingWeights:
    """A `WeightSource` that notes what is read."""

    def __init__(self, shapes: Any, *, rank: int = 0, size: int = 1) -> None:
        self._dummy = DummyWeights(shapes, rank=rank, size=size)
        self.shards: dict[str, Shard] = {}

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> NDArray[Any]:
        assert name not in self.shards, f"{name} is read twice"
        self.shards[name] = shard
        return self._dummy.read(name, shard)


def parse(model_dir: Path) -> DeepseekConfig:
    return definition.parse(read_config(model_dir))


def load_alone(config: DeepseekConfig, weights: WeightSource) -> DeepseekModel:
    return load(config, weights, ops=CpuOps(), communicator=SoloCommunicator(), max_model_tokens=8)


def test_tensors_of_the_published_checkpoint_count_as_published() -> None:
    shapes = definition.tensors(definition.parse(PUBLISHED))
    assert len(shapes) == 5291
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 15_706_484_224
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (10944, 2048)
    assert shapes["model.layers.1.mlp.shared_experts.down_proj.weight"] == (2048, 2816)
    assert shapes["model.layers.26.mlp.experts.63.up_proj.weight"] == (1408, 2048)


def test_load_reads_every_tensor_once_and_no_other(model_dir: Path) -> None:
    config = parse(model_dir)
    weights = RecordingWeights(definition.tensors(config))
    load_alone(config, weights)
    assert weights.shards.keys() == definition.tensors(config).keys()


def test_a_rank_reads_its_own_experts_whole_and_a_piece_of_the_shared_ones(fixtures: Path) -> None:
    config = parse(fixtures / "lite")
    communicator = LocalGroup(4).communicators[2]
    weights = RecordingWeights(definition.tensors(config), rank=2, size=4)
    load(config, weights, ops=CpuOps(), communicator=communicator, max_model_tokens=8)
    prefix = "model.layers.1.mlp"
    experts = {name.split(".")[5] for name in weights.shards if name.startswith(f"{prefix}.experts.")}
    assert experts == {"8", "9", "10", "11"}
    assert weights.shards[f"{prefix}.experts.8.down_proj.weight"] is Shard.WHOLE
    assert weights.shards[f"{prefix}.shared_experts.down_proj.weight"] is Shard.ROW_PARALLEL
    assert weights.shards["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"] is Shard.WHOLE
    assert weights.shards["model.layers.1.self_attn.kv_b_proj.weight"] is Shard.COLUMN_PARALLEL


def test_experts_are_stacked_gate_above_up(fixtures: Path) -> None:
    config = parse(fixtures / "lite")
    with Checkpoint.open(fixtures / "lite") as checkpoint:
        model = load_alone(config, RankWeights(checkpoint, rank=0, size=1))
        mlp = model.weights.layers[2].experts
        assert mlp is not None
        up = CpuOps().upload_weight(checkpoint.read("model.layers.2.mlp.experts.5.up_proj.weight"))
    assert mlp.gate_up_proj.shape == (16, 2 * config.moe_intermediate_size, config.hidden_size)
    np.testing.assert_array_equal(mlp.gate_up_proj[5, config.moe_intermediate_size :], up)


def test_tied_head_is_the_embedding(fixtures: Path, tmp_path: Path) -> None:
    config = definition.parse(read_config(fixtures / "lite") | {"tie_word_embeddings": True})
    assert "lm_head.weight" not in definition.tensors(config)
    assert "lm_head.weight" in definition.ignorable_tensors(config)
    weights = load_alone(config, DummyWeights(definition.tensors(config), rank=0, size=1)).weights
    assert np.shares_memory(weights.lm_head, weights.embed_tokens)


def test_unknown_tensor_and_missing_tensor_are_refused(fixtures: Path, tmp_path: Path) -> None:
    config = parse(fixtures / "lite")
    with Checkpoint.open(fixtures / "lite") as checkpoint:
        weights = {name: CpuOps().upload_weight(checkpoint.read(name)) for name in checkpoint.tensors}
    weights["model.layers.1.mlp.gate.e_score_correction_bias"] = weights.pop("model.layers.1.mlp.gate.weight")
    save_file(weights, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(InvalidCheckpoint) as refused:
        checkpoint.validate(definition.tensors(config), ignorable=definition.ignorable_tensors(config))
    assert "model.layers.1.mlp.gate.weight is missing" in str(refused.value)
    assert "e_score_correction_bias is not a tensor of this model" in str(refused.value)


def test_wanted_tokens_alone_get_the_same_hidden_states(model_dir: Path, harness: Any) -> None:
    assert issubclass(DeepseekModel, LastTokenModel)
    model = harness(model_dir)
    tokens = list(range(3, 60))
    whole = model.step({"a": tokens, "b": [7, 8, 9]})
    wanted = harness(model_dir).step_last_tokens({"a": tokens, "b": [7, 8, 9]})
    for sequence, logits in wanted.items():
        np.testing.assert_allclose(logits, whole[sequence][-1:], rtol=1e-4, atol=1e-4)
