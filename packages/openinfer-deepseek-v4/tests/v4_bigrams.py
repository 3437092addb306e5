"""A model of V4's shape with its drafting block, whose drafts are often right though all weights are random.

What follows a token is mostly a matter of the token: the streams are mostly its embedding, in the model and in the
block. Attention, experts and the streams before it change the rest.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from openinfer_deepseek_v4.family import DeepseekV4Definition
from openinfer_deepseek_v4.weights import mtp_tensors
from openinfer_engine.testing.random_weights import bf16_exact
from openinfer_engine.weights.dummy import dummy_array
from openinfer_engine.weights.stored_tensor import StoredTensor

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_n_heads": 16,
    "index_topk": 32,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "max_position_embeddings": 1024,
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_attention_heads": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "vocab_size": 1024,
}
"""Attention of the published sizes: GPUs have no other."""
_BRANCH = 0.15
"""What sublayers add to the streams, of what they would with other weights."""
_STREAMS = 0.3
"""The same of the streams before a token, next to its embedding in what the block reads."""
_HEAD = 4.0


def make_mtp_model(folder: Path) -> Path:
    """Weights are BF16's numbers, so that all devices compute with the same ones."""
    rng, definition = np.random.default_rng(0), DeepseekV4Definition()
    config = definition.parse(CONFIG)
    weights: dict[str, Any] = {}
    for name, spec in {**definition.tensors(config), **mtp_tensors(config)}.items():
        if isinstance(spec, StoredTensor):
            weights[name] = dummy_array(spec, seed=1)
            continue
        values = rng.normal(size=spec).astype(np.float32)
        if name.endswith(("norm.weight", "_scale")):
            values = 1 + values / 10
        elif not name.endswith(("_base", "attn_sink", "ape", "gate.bias")):
            is_branch = ".wo_b." in name or ".w2." in name
            values *= np.float32(spec[-1] ** -0.5 * (_BRANCH if is_branch else 1))
        weights[name] = bf16_exact(values)
    h = config.hidden_size
    weights["embed.weight"] = bf16_exact(rng.normal(size=(config.vocab_size, h)).astype(np.float32))
    weights["head.weight"] = bf16_exact(_HEAD * weights["head.weight"])
    weights["mtp.0.e_proj.weight"] = np.eye(h, dtype=np.float32)
    weights["mtp.0.h_proj.weight"] = bf16_exact(_STREAMS * weights["mtp.0.h_proj.weight"])
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors")
    return folder
