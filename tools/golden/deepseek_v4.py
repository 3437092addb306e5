"""Records a tiny DeepSeek-V4 model and the logits that transformers computes with it, in float32.

Usage: python tools/golden/deepseek_v4.py [FOLDER]
"""

from pathlib import Path
from typing import Any

import torch
from recording import begin, begin_model, record, write
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

FIXTURES = Path(__file__).parents[2] / "packages/openinfer-deepseek-v4/tests/fixtures"
SEQUENCE_TOKENS = (140, 53, 9)
MOST_BYTES = 1_400_000

LAYERS = {
    "all_kinds": (
        [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        ["hash_moe", "hash_moe", "moe", "moe"],
    ),
}
CONFIG: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 1.0,
    "sliding_window": 12,
    "o_groups": 8,
    "o_lora_rank": 24,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 5,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def main() -> None:
    folder = begin(FIXTURES)
    for seed, (name, (layer_types, mlp_layer_types)) in enumerate(LAYERS.items()):
        target = folder / name
        begin_model(target, seed=seed)
        layers = {"layer_types": layer_types, "mlp_layer_types": mlp_layer_types}
        config = DeepseekV4Config(**CONFIG, **layers, num_hidden_layers=len(layer_types))
        config._attn_implementation = "eager"  # noqa: SLF001
        model = DeepseekV4ForCausalLM(config).eval()
        randomise(model)
        recorded = record(model, SEQUENCE_TOKENS, vocab_size=model.config.vocab_size, every=4, use_cache=False)
        round_weights(model)
        model.save_pretrained(target)
        write(target, recorded, most_bytes=MOST_BYTES)


def randomise(model: Any) -> None:
    """Weights that let every part of the model matter: what is trivial after initialisation is far from it."""
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        leaf = name.rsplit(".", 1)[-1]
        if "rotary_emb" in name:
            continue
        if leaf == "tid2eid":
            scores = torch.rand(parameter.shape[0], model.config.n_routed_experts)
            parameter.copy_(scores.argsort(dim=1)[:, : parameter.shape[1]])
            continue
        if leaf in ("sinks", "position_bias", "e_score_correction_bias", "base", "hc_base"):
            values = torch.randn_like(parameter)
        elif leaf in ("scale", "hc_scale") or name.endswith("norm.weight") or "layernorm" in name:
            values = torch.empty_like(parameter).uniform_(0.5, 1.5)
        else:
            values = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 * 1.5
        parameter.copy_(values if is_float32(name) else values.bfloat16().float())


def is_float32(name: str) -> bool:
    """Whether published checkpoints have this tensor in float32."""
    leaves = ("sinks", "position_bias", "e_score_correction_bias", "base", "scale", "hc_base", "hc_scale", "hc_fn")
    return name.endswith(leaves) or "_hc.fn" in name


def round_weights(model: Any) -> None:
    """Every tensor in the dtype that published checkpoints have it in where nothing is quantised; no value changes."""
    for name, parameter in model.named_parameters():
        if not is_float32(name):
            parameter.data = parameter.data.bfloat16()


if __name__ == "__main__":
    main()
