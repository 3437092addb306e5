"""Loading: which tensors are read, where they go, and what is shared."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from openinfer_core import InvalidCheckpoint, read_config
from openinfer_engine.distributed.communicator import SoloCommunicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.model import Shard
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights
from openinfer_engine.weights.dummy import DummyWeights
from openinfer_kernels import WeightPart
from openinfer_kernels.cpu import CpuOps
from openinfer_qwen3.family import Qwen3Definition
from openinfer_qwen3.model import Qwen3Config, load, tensors

SHAPE_KEYS: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
}
QWEN3_4B = SHAPE_KEYS | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
QWEN3_8B = SHAPE_KEYS | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}


class RecordingWeights:
    """A `WeightSource` that notes what is read."""

    def __init__(self, shapes: Any, *, rank: int = 0, size: int = 1) -> None:
        self._dummy = DummyWeights(shapes, rank=rank, size=size)
        self.shards: dict[str, Shard] = {}

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> NDArray[Any]:
        assert name not in self.shards, f"{name} is read twice"
        self.shards[name] = shard
        return self._dummy.read(name, shard)


def parse(model_dir: Path) -> Qwen3Config:
    return Qwen3Definition().parse(read_config(model_dir))


@pytest.mark.parametrize(
    ("config", "num_tensors", "num_parameters"),
    [(QWEN3_4B, 398, 4_022_468_096), (QWEN3_8B, 399, 8_190_735_360)],
    ids=["4B", "8B"],
)
def test_tensors_of_published_sizes_count_as_published(
    config: dict[str, Any], num_tensors: int, num_parameters: int
) -> None:
    shapes = tensors(Qwen3Definition().parse(config))
    assert len(shapes) == num_tensors
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == num_parameters


def test_load_reads_every_tensor_of_the_list_once_and_no_other(model_dir: Path) -> None:
    config = parse(model_dir)
    weights = RecordingWeights(tensors(config))
    load(config, weights, ops=CpuOps(), communicator=SoloCommunicator(), max_model_tokens=16)
    assert weights.shards.keys() == tensors(config).keys()


def test_second_rank_reads_its_pieces_and_no_bias_of_the_summed_output(fixtures: Path) -> None:
    config = parse(fixtures / "attention_bias")
    weights = RecordingWeights(tensors(config), rank=1, size=2)
    load(config, weights, ops=CpuOps(), communicator=LocalGroup(2).communicators[1], max_model_tokens=16)
    layer = {
        name.removeprefix("model.layers.0."): shard for name, shard in weights.shards.items() if ".layers.0." in name
    }
    rows = {name for name, shard in layer.items() if shard is Shard.COLUMN_PARALLEL}
    columns = {name for name, shard in layer.items() if shard is Shard.ROW_PARALLEL}
    assert rows == {f"self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")} | {
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
    }
    assert columns == {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    assert "self_attn.o_proj.bias" not in layer


class CountingOps(CpuOps):
    """Operators that count the numbers of uploaded weights."""

    num_uploaded = 0

    def upload_weight(self, *parts: WeightPart) -> NDArray[Any]:
        weight = super().upload_weight(*parts)
        self.num_uploaded += weight.size
        return weight


def test_weights_are_uploaded_once_also_where_the_head_is_tied(model_dir: Path) -> None:
    config, ops = parse(model_dir), CountingOps()
    with Checkpoint.open(model_dir) as checkpoint:
        load(
            config,
            RankWeights(checkpoint, rank=0, size=1),
            ops=ops,
            communicator=SoloCommunicator(),
            max_model_tokens=16,
        )
    assert ops.num_uploaded == sum(int(np.prod(shape)) for shape in tensors(config).values())


def test_dummy_weights_give_finite_logits_that_prefer_some_tokens(fixtures: Path) -> None:
    config = parse(fixtures / "tied")
    model = load(
        config,
        DummyWeights(tensors(config), rank=0, size=1),
        ops=CpuOps(),
        communicator=SoloCommunicator(),
        max_model_tokens=16,
    )
    hidden = np.random.default_rng(0).standard_normal((5, config.hidden_size), np.float32)
    logits = model.logits(hidden)
    assert np.isfinite(logits).all()
    assert logits.std() > 1


def test_published_checkpoint_with_a_redundant_head_or_frequencies_is_accepted(fixtures: Path) -> None:
    definition = Qwen3Definition()
    tied, untied = parse(fixtures / "tied"), parse(fixtures / "untied_yarn")
    assert "lm_head.weight" in definition.ignorable_tensors(tied)
    assert "lm_head.weight" not in definition.ignorable_tensors(untied)
    assert "model.layers.1.self_attn.rotary_emb.inv_freq" in definition.ignorable_tensors(untied)
    assert "model.layers.2.self_attn.rotary_emb.inv_freq" not in definition.ignorable_tensors(untied)


def test_checkpoint_of_another_shape_is_refused_before_loading(fixtures: Path) -> None:
    config = Qwen3Definition().parse(
        read_config(fixtures / "tied") | {"intermediate_size": 168, "num_hidden_layers": 4}
    )
    with Checkpoint.open(fixtures / "tied") as checkpoint, pytest.raises(InvalidCheckpoint) as caught:
        checkpoint.validate(tensors(config))
    assert "model.layers.0.mlp.gate_proj.weight has shape [160, 96], not [168, 96]" in str(caught.value)
    assert "more" in str(caught.value)
