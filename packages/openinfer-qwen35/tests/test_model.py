"""Loading: which tensors are read, how they are cut, and what of a checkpoint is left alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from openinfer_core import InvalidCheckpoint, read_config
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.model import Shard
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_engine.weights.dummy import DummyWeights
from openinfer_kernels.cpu import CpuOps
from openinfer_kv_cache import KvDtype
from openinfer_qwen35.family import Qwen35Definition
from openinfer_qwen35.model import Qwen35Config, load

QWEN35_4B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
}
definition = Qwen35Definition()


class RecordingWeights:
    """A `WeightSource` that notes what is read."""

    def __init__(self, shapes: Any) -> None:
        self._dummy = DummyWeights(shapes, rank=0, size=1)
        self.shards: dict[str, Shard] = {}

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> NDArray[Any]:
        assert name not in self.shards, f"{name} is read twice"
        self.shards[name] = shard
        return self._dummy.read(name, shard)


def parse(model_dir: Path) -> Qwen35Config:
    return definition.parse(read_config(model_dir))


def test_tensors_of_the_published_4b_count_as_published() -> None:
    config = definition.parse(QWEN35_4B)
    shapes = definition.tensors(config)
    assert len(shapes) == 426
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 4_205_751_296
    assert shapes["model.language_model.layers.0.linear_attn.in_proj_qkv.weight"] == (8192, 2560)
    assert shapes["model.language_model.layers.3.self_attn.q_proj.weight"] == (8192, 2560)
    assert config.rotary_dim == 64
    for ranks in (1, 2, 4):
        definition.check_ranks(config, ranks)


def test_kept_inputs_take_less_than_the_copies_that_the_ledger_of_a_gpu_counts() -> None:
    """States of a sequence slot are copied before a step with drafts, or inputs of up to 15 tokens are kept instead."""
    config, dtypes = definition.parse(QWEN35_4B), {"kv_dtype": KvDtype.BFLOAT16, "state_dtype": KvDtype.BFLOAT16}
    spec = definition.kv_spec(config, model_tag="plan", **dtypes, num_ranks=1, rank_index=0)
    (group,) = spec.slots
    shapes = {tensor.name: (1, group.num_layers, *tensor.shape) for tensor in group.tensors}
    conv, state = (np.broadcast_to(np.zeros((), np.uint16), shapes[name]) for name in ("conv", "state"))
    kept = CpuOps().keep_inputs(conv=conv, state=state, most_tokens=15)
    assert kept is not None
    kept_bytes = kept.conv_inputs.nbytes + kept.keys_values.nbytes + kept.gates.nbytes
    assert 0 < kept_bytes < group.bytes_per_slot / 4


def test_load_reads_every_tensor_once_and_no_other(model_dir: Path) -> None:
    config = parse(model_dir)
    weights = RecordingWeights(definition.tensors(config))
    (communicator,) = LocalGroup(1).communicators
    load(config, weights, ops=CpuOps(), communicator=communicator, max_model_tokens=8)
    assert weights.shards.keys() == definition.tensors(config).keys()


def test_vision_tower_and_drafting_layer_are_left_alone_and_nothing_else(fixtures: Path, tmp_path: Path) -> None:
    source = fixtures / "vision_language"
    config = parse(source)
    with Checkpoint.open(source) as checkpoint:
        assert any(name.startswith("model.visual.") for name in checkpoint.tensors)
        checkpoint.validate(definition.tensors(config), ignorable=definition.ignorable_tensors(config))
    few = {"mtp.fc.weight": np.ones((2, 2), np.float32), "model.vision.other": np.ones(2, np.float32)}
    save_file(few, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(InvalidCheckpoint) as refused:
        checkpoint.validate({}, ignorable=definition.ignorable_tensors(config))
    assert "model.vision.other is not a tensor of this model" in str(refused.value)
    assert "mtp" not in str(refused.value)


def test_fixtures_have_the_dtypes_of_published_checkpoints(model_dir: Path) -> None:
    with Checkpoint.open(model_dir) as checkpoint:
        in_float32 = {name for name, info in checkpoint.tensors.items() if info.dtype == "F32"}
    assert in_float32
    assert all(name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")) for name in in_float32)


def test_text_only_export_of_a_vision_language_checkpoint_computes_the_same(
    fixtures: Path, tmp_path: Path, harness: Any
) -> None:
    """The same weights under the other prefix, and the text model's config alone."""
    import json

    source = fixtures / "vision_language"
    weights = load_bits(source / "model.safetensors")
    save_file(
        {
            name.replace("model.language_model.", "model."): array
            for name, array in weights.items()
            if "visual" not in name
        },
        tmp_path / "model.safetensors",
    )
    text = json.loads((source / "config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(text))
    tokens = {"a": list(range(1, 80))}
    np.testing.assert_array_equal(harness(tmp_path).step(tokens)["a"], harness(source).step(tokens)["a"])


def load_bits(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors in float32, which NumPy has where it has no BF16."""
    with Checkpoint.open(path.parent) as checkpoint:
        return {name: CpuOps().upload_weight(checkpoint.read(name)) for name in checkpoint.tensors}


def test_unknown_tensor_and_missing_tensor_are_refused(fixtures: Path, tmp_path: Path) -> None:
    config = parse(fixtures / "text_tied")
    weights = load_bits(fixtures / "text_tied" / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"] = weights.pop("model.layers.0.linear_attn.A_log")
    save_file(weights, tmp_path / "model.safetensors")
    assert "model.layers.0.linear_attn.A_log" not in load_file(tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(InvalidCheckpoint) as refused:
        checkpoint.validate(definition.tensors(config), ignorable=definition.ignorable_tensors(config))
    assert "model.layers.0.linear_attn.A_log is missing" in str(refused.value)
    assert "model.layers.0.self_attn.q_proj.weight is not a tensor of this model" in str(refused.value)
