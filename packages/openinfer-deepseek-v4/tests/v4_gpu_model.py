"""A small model of V4's shape, with attention of the published sizes: GPUs have no other."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from openinfer_engine.testing import bf16_exact
from openinfer_engine.weights.dummy import dummy_array
from openinfer_engine.weights.stored_tensor import StoredTensor, TensorSpec

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
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "max_position_embeddings": 1024,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_attention_heads": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
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


def bf16_weights(specs: Mapping[str, TensorSpec], rng: np.random.Generator, *, branch: float = 1.0) -> dict[str, Any]:
    """Random numbers that BF16 holds exactly, so that all devices compute with the same ones.

    Args:
        specs: of the tensors.
        rng: that they are drawn from.
        branch: what sublayers add to the streams, of what they would with weights like the others.
    """
    weights: dict[str, Any] = {}
    for name, spec in specs.items():
        if isinstance(spec, StoredTensor):
            weights[name] = dummy_array(spec, seed=1)
            continue
        values = rng.normal(size=spec).astype(np.float32)
        if name.endswith(("norm.weight", "_scale")):
            values = 1 + values / 10
        elif not name.endswith(("_base", "attn_sink", "ape", "gate.bias")):
            is_branch = ".wo_b." in name or ".w2." in name
            values *= np.float32(spec[-1] ** -0.5 * (branch if is_branch else 1))
        weights[name] = bf16_exact(values)
    return weights
