"""A model of V3's shape with its drafting layer, whose drafts are often right though all weights are random.

What follows a token is mostly a matter of the token: the residual stream is mostly its embedding, in the model and in
the layer, which have one embedding and one head. Attention, experts and the hidden state before it change the rest.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from openinfer_deepseek.family import DeepseekV3Definition
from openinfer_deepseek.model import tensors
from openinfer_deepseek.mtp import mtp_tensors
from openinfer_engine.testing.random_weights import bf16_exact
from openinfer_engine.weights.stored_tensor import StoredTensor

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "max_position_embeddings": 2048,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 128,
    "n_group": 2,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "v_head_dim": 128,
    "vocab_size": 1024,
}
"""Attention of the published sizes: GPUs have no other."""
_BRANCH = 0.25
"""What layers add to the residual stream, of what they would with other weights."""
_HIDDEN = 0.3
"""The same of the hidden state, next to the embedding in what the drafting layer reads."""
_HEAD = 4.0


def make_mtp_model(folder: Path) -> Path:
    """Weights are BF16's numbers, so that all devices compute with the same ones."""
    rng = np.random.default_rng(0)
    config = DeepseekV3Definition().parse(CONFIG)
    weights: dict[str, Any] = {}
    for name, spec in {**tensors(config), **mtp_tensors(config, {})}.items():
        shape = spec.shape if isinstance(spec, StoredTensor) else spec
        values = rng.normal(size=shape)
        is_branch = any(part in name for part in ("o_proj", "down_proj"))
        if name.endswith("e_score_correction_bias"):
            weights[name] = (0.01 * values).astype(np.float32)
            continue
        scaled = 1 + values / 10 if len(shape) == 1 else values * shape[-1] ** -0.5 * (_BRANCH if is_branch else 1)
        weights[name] = bf16_exact(scaled.astype(np.float32))
    own = f"model.layers.{config.num_hidden_layers}"
    weights["model.embed_tokens.weight"] = bf16_exact(rng.normal(size=(1024, 256)).astype(np.float32))
    weights["lm_head.weight"] = bf16_exact(_HEAD * weights["lm_head.weight"])
    for theirs, name in (("model.embed_tokens", "embed_tokens"), ("lm_head", "shared_head.head")):
        weights[f"{own}.{name}.weight"] = weights[f"{theirs}.weight"]
    width = config.hidden_size
    random = rng.normal(size=(width, width)) * width**-0.5
    weights[f"{own}.eh_proj.weight"] = bf16_exact(np.hstack((np.eye(width), _HIDDEN * random)).astype(np.float32))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors")
    return folder
