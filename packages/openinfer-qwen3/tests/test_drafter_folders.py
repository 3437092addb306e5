"""A folder of one drafter that is named to another is refused at the start, whichever two they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks_in_float64 import LAYERS, MODEL
from safetensors.numpy import save_file

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_engine import EngineOptions, resolve
from openinfer_qwen3.family import Qwen3Definition

FOLDERS: dict[str, dict[str, Any]] = {
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
    },
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": 8,
        "mask_token_id": 7,
        "target_layer_ids": [0, 2],
    },
    "draft-model": {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 4096},
}
PAIRS = [(drafter, other) for drafter in FOLDERS for other in FOLDERS if drafter != other]


@pytest.mark.parametrize(("drafter", "other"), PAIRS)
def test_the_folder_of_another_drafter_is_refused(tmp_path: Path, drafter: str, other: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LAYERS | {"block_size": 8} | FOLDERS[other]))
    save_file({"norm.weight": np.ones(96, np.float32)}, tmp_path / "model.safetensors")
    given = EngineOptions(num_blocks=40, speculative=f"{drafter},model={tmp_path}")
    with pytest.raises((Refused, InvalidCheckpoint), match=rf"drafter {drafter} "):
        resolve(Qwen3Definition(), MODEL, given)
