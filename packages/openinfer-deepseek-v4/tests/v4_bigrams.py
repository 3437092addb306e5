"""A model of V4's shape with its drafting block, whose drafts are often right though all weights are random.

What follows a token is mostly a matter of the token: the streams are mostly its embedding, in the model and in the
block. Attention, experts and the streams before it change the rest.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from v4_gpu_model import CONFIG as GPU_CONFIG
from v4_gpu_model import bf16_weights

from openinfer_deepseek_v4.family import DeepseekV4Definition
from openinfer_deepseek_v4.weights import mtp_tensors
from openinfer_engine.testing import bf16_exact

_LAYERS = 3
CONFIG: dict[str, Any] = GPU_CONFIG | {
    "layer_types": GPU_CONFIG["layer_types"][:_LAYERS],
    "mlp_layer_types": GPU_CONFIG["mlp_layer_types"][:_LAYERS],
    "num_hidden_layers": _LAYERS,
    "num_nextn_predict_layers": 1,
}
_BRANCH = 0.15
"""What sublayers add to the streams, of what they would with other weights."""
_STREAMS = 0.3
"""The same of the streams before a token, next to its embedding in what the block reads."""
_HEAD = 4.0


def make_mtp_model(folder: Path) -> Path:
    rng, definition = np.random.default_rng(0), DeepseekV4Definition()
    config = definition.parse(CONFIG)
    weights = bf16_weights({**definition.tensors(config), **mtp_tensors(config)}, rng, branch=_BRANCH)
    h = config.hidden_size
    weights["embed.weight"] = bf16_exact(rng.normal(size=(config.vocab_size, h)).astype(np.float32))
    weights["head.weight"] = bf16_exact(_HEAD * weights["head.weight"])
    weights["mtp.0.e_proj.weight"] = np.eye(h, dtype=np.float32)
    weights["mtp.0.h_proj.weight"] = bf16_exact(_STREAMS * weights["mtp.0.h_proj.weight"])
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors")
    return folder
