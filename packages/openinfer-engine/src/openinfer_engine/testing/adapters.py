"""LoRA adapters of random factors, in the layout that PEFT writes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openinfer_engine.lora.adapter_config import CONFIG_FILE
from openinfer_engine.lora.adapter_folder import WEIGHTS_FILE
from openinfer_engine.lora.arena import adapted_modules
from openinfer_engine.model import ModelDefinition
from openinfer_engine.testing.random_weights import bf16_exact


def write_adapter(
    folder: Path,
    definition: ModelDefinition[Any],
    config: Mapping[str, Any],
    *,
    rank: int,
    seed: int = 0,
    size: float = 0.5,
    scale: float = 1.0,
) -> None:
    """Writes an adapter of every module that can be adapted; its factors are BF16.

    Args:
        folder: made by this.
        definition: of the family.
        config: what `config.json` says.
        rank: of every module.
        seed: of the factors.
        size: of what it adds to an output, where the input's values are of size 1.
        scale: alpha / rank, which `size` is counted without.
    """
    folder.mkdir()
    alpha = scale * rank
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha}))
    rng = np.random.default_rng(seed)
    header: dict[str, Any] = {}
    offset = 0
    factors: list[bytes] = []
    for name, module in adapted_modules(definition.adapted_matrices(definition.parse(config))).items():
        for factor, shape, spread in (
            ("A", (rank, module.columns), module.columns**-0.5),
            ("B", (module.rows, rank), size * rank**-0.5),
        ):
            values = bf16_exact(rng.standard_normal(shape, np.float32) * np.float32(spread))
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            entry = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + bits.nbytes]}
            header[f"base_model.model.model.{name}.lora_{factor}.weight"] = entry
            factors.append(bits.tobytes())
            offset += bits.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # as the format's own writer does, so that tensors are aligned
    (folder / WEIGHTS_FILE).write_bytes(b"".join([len(encoded).to_bytes(8, "little"), encoded, *factors]))
