"""Records tiny mixtures of Qwen3 and the logits that transformers computes with them, in float32.

Usage: python tools/golden/qwen3_moe.py [FOLDER]
"""

from pathlib import Path
from typing import Any

import torch
from qwen3 import YARN, randomise
from recording import begin, begin_model, record_whole, write
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

FIXTURES = Path(__file__).parents[2] / "packages/openinfer-qwen3/tests/fixtures_moe"
NUM_TOKENS = 72
MOST_BYTES = 500_000

SPEC: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 60,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
# Layers 1 and 3 would be mixtures, and 1 is not.
SPARSE = SPEC | {
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "tie_word_embeddings": True,
    "rope_parameters": YARN,
}
ONE_EXPERT = SPEC | {"num_hidden_layers": 2, "num_experts": 5, "num_experts_per_tok": 1, "norm_topk_prob": False}
CHOSEN = 2
MODELS = {"mixture": SPEC, "sparse_step": SPARSE, "one_expert": ONE_EXPERT}


def main() -> None:
    folder = begin(FIXTURES)
    for seed, (name, config) in enumerate(MODELS.items()):
        target = folder / name
        begin_model(target, seed=seed)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config, attn_implementation="eager")).eval()
        randomise(model)
        if name == "one_expert":
            choose(model, CHOSEN)
        recorded = record_whole(model, NUM_TOKENS)
        model.to(torch.bfloat16).save_pretrained(target)
        write(target, recorded, most_bytes=MOST_BYTES)


def choose(model: Any, expert: int) -> None:
    """Sends all tokens to one expert, with weights that differ: channel 0 of the residual stream is a constant."""
    model.model.embed_tokens.weight[:, 0] = 2.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.experts.down_proj[:, 0] = 0.0
        layer.mlp.gate.weight[:, 0] = 0.0
        layer.mlp.gate.weight[expert, 0] = 4.0


if __name__ == "__main__":
    main()
