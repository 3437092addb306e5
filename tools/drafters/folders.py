"""Folders of models and drafters for comparisons on a CPU: tests' fixtures with a tokenizer, and random drafters."""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from openinfer_core import read_config
from openinfer_deepseek.family import DeepseekV3Definition
from openinfer_deepseek.mtp import mtp_tensors
from openinfer_deepseek_v4 import weights as v4_weights
from openinfer_deepseek_v4.family import DeepseekV4Definition
from openinfer_engine import Checkpoint
from openinfer_engine.testing.quantised_checkpoints import write_safetensors
from openinfer_engine.testing.random_weights import spread_tensors
from openinfer_engine.weights.stored_tensor import StoredTensor
from openinfer_kernels.cpu import CpuOps
from openinfer_qwen3.block_drafter import block_tensors
from openinfer_qwen3.dflash import read_dflash
from openinfer_qwen3.family import Qwen3Definition

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
QWEN3 = PACKAGES / "openinfer-qwen3/tests/fixtures/tied"
EAGLE3 = PACKAGES / "openinfer-qwen3/tests/fixtures_eagle3"
QWEN35 = PACKAGES / "openinfer-qwen35/tests/fixtures_mtp"
DEEPSEEK = PACKAGES / "openinfer-deepseek/tests/fixtures_v3/moonlight"
DEEPSEEK_V4 = PACKAGES / "openinfer-deepseek-v4/tests/fixtures/all_kinds"
_BLOCKS: dict[str, Any] = {
    "block_size": 8,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 112,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 257,
}


@dataclass(frozen=True, slots=True)
class DraftedModel:
    """A model folder, and how `--speculative` names a drafter for it."""

    family: str
    model_dir: Path
    speculative: str


def make_drafted_model(drafter: str, target: Path) -> DraftedModel:
    """Writes what a drafter is compared with into an empty folder."""
    return _MAKERS[drafter](target)


def with_tokenizer(source: Path, target: Path) -> Path:
    """A copy of a model folder whose ids stand for single characters, so that grammars can be asked for."""
    shutil.copytree(source, target)
    config = read_config(source)
    ends = [f"<{name}>" for name in ("begin", "end")]
    added = [config["bos_token_id"], config["eos_token_id"]]
    ids = [token_id for token_id in range(int(config["vocab_size"])) if token_id not in added]
    vocab = dict(zip(_alphabet(), ids, strict=False))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": text, "special": True, **flags}
            for token_id, text in zip(added, ends, strict=True)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    (target / "tokenizer.json").write_text(json.dumps(content))
    return target


def _alphabet() -> list[str]:
    """What BPE files write for each byte, printed ASCII first: GPT-2's `bytes_to_unicode`."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    characters = {byte: chr(byte) for byte in printed}
    characters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [characters[byte] for byte in (*range(32, 127), *range(32), *range(127, 256))]


def _written(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _of_dflash(target: Path) -> DraftedModel:
    config = _BLOCKS | {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
    }
    folder = _written(target / "drafter", config)
    read = read_dflash(folder, Qwen3Definition().parse(read_config(QWEN3)), {})
    save_file(spread_tensors(block_tensors(read)), folder / "model.safetensors")
    return DraftedModel("qwen3", with_tokenizer(QWEN3, target / "model"), f"dflash,k=5,model={folder}")


def _of_dspark(target: Path) -> DraftedModel:
    """Bigrams of the model's own answers, so that drafts are accepted, as its tests have them."""
    sys.path.append(str(PACKAGES / "openinfer-qwen3/tests"))
    from dspark_bigrams import make_bigram_folder

    folder = target / "drafter"
    folder.mkdir()
    made = make_bigram_folder(folder)
    return DraftedModel("qwen3", with_tokenizer(EAGLE3 / "model", target / "model"), f"dspark,k=5,model={made}")


def _of_eagle3(target: Path) -> DraftedModel:
    return DraftedModel(
        "qwen3", with_tokenizer(EAGLE3 / "model", target / "model"), f"eagle3,k=3,model={EAGLE3 / 'drafter'}"
    )


def _of_mtp(target: Path) -> DraftedModel:
    return DraftedModel("qwen35", with_tokenizer(QWEN35, target / "model"), "mtp,k=3")


def _of_draft_model(target: Path) -> DraftedModel:
    """A trained model without its last layer drafts for the whole one."""
    model = with_tokenizer(EAGLE3 / "model", target / "model")
    draft = with_tokenizer(EAGLE3 / "model", target / "draft")
    config = json.loads((draft / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    (draft / "config.json").write_text(json.dumps(config | {"num_hidden_layers": last}))
    with Checkpoint.open(EAGLE3 / "model") as checkpoint:
        kept = {
            name: (info.dtype, checkpoint.read(name))
            for name, info in checkpoint.tensors.items()
            if not name.startswith(f"model.layers.{last}.")
        }
        write_safetensors(draft / "model.safetensors", kept)
    return DraftedModel("qwen3", model, f"draft-model,k=4,model={draft}")


def _of_draft_model_with_states(target: Path) -> DraftedModel:
    """A model of attention alone drafts for one with recurrent states; both were trained on the same text."""
    model, draft = with_tokenizer(QWEN35, target / "model"), with_tokenizer(EAGLE3 / "model", target / "draft")
    return DraftedModel("qwen35", model, f"draft-model,k=4,model={draft}")


def _of_deepseek_mtp(target: Path) -> DraftedModel:
    published = json.loads((DEEPSEEK / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    with Checkpoint.open(DEEPSEEK) as checkpoint:
        tensors: dict[str, Any] = {
            name: np.asarray(CpuOps().upload_weight(checkpoint.read(name)), np.float32) for name in checkpoint.tensors
        }
    rng = np.random.default_rng(1)
    for name, spec in mtp_tensors(DeepseekV3Definition().parse(published), {}).items():
        shape = spec.shape if isinstance(spec, StoredTensor) else spec
        is_vector = len(shape) == 1
        mean, spread = float(is_vector and "bias" not in name), 0.1 if is_vector else 1.5 * shape[-1] ** -0.5
        tensors[name] = rng.normal(mean, spread, shape).astype(np.float32)
    model = with_tokenizer(DEEPSEEK, target / "model")
    (model / "config.json").write_text(json.dumps(published))
    save_file(tensors, model / "model.safetensors")
    return DraftedModel("deepseek_v3", model, "deepseek-mtp,k=3")


def _of_deepseek_v4_mtp(target: Path) -> DraftedModel:
    with Checkpoint.open(DEEPSEEK_V4) as checkpoint:
        definition = DeepseekV4Definition()
        config = definition.as_stored(definition.parse(read_config(DEEPSEEK_V4)), checkpoint.tensors)
        parts = {name: checkpoint.read(name) for name in checkpoint.tensors}
        tensors: dict[str, Any] = {
            name: np.array(part) if name.endswith("tid2eid") else np.asarray(CpuOps().upload_weight(part), np.float32)
            for name, part in parts.items()
        }
    rng = np.random.default_rng(1)
    for name, spec in v4_weights.mtp_tensors(config).items():
        shape = spec.shape if isinstance(spec, StoredTensor) else spec
        values = rng.normal(size=shape) * (1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
        tensors[name] = values.astype(np.float32)
    model = with_tokenizer(DEEPSEEK_V4, target / "model")
    save_file(tensors, model / "model.safetensors")
    return DraftedModel("deepseek_v4", model, "deepseek-v4-mtp,k=3")


_MAKERS = {
    "eagle3": _of_eagle3,
    "dflash": _of_dflash,
    "dspark": _of_dspark,
    "mtp": _of_mtp,
    "draft-model": _of_draft_model,
    "draft-model, states": _of_draft_model_with_states,
    "deepseek-mtp": _of_deepseek_mtp,
    "deepseek-v4-mtp": _of_deepseek_v4_mtp,
}
DRAFTED = tuple(_MAKERS)
"""Drafters that are models."""
