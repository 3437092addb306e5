"""Records tiny DeepSeek-V2 models and the logits that transformers computes with them, in float32.

Usage: python tools/golden/deepseek_v2.py [FOLDER]
"""

import json
from pathlib import Path
from typing import Any

import torch
from recording import begin, begin_model, record, write
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

FIXTURES = Path(__file__).parents[2] / "packages/openinfer-deepseek/tests/fixtures"
SEQUENCE_TOKENS = (150, 41, 7)
MOST_BYTES = 800_000

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 64,
}
LITE: dict[str, Any] = {
    "vocab_size": 271,
    "hidden_size": 56,
    "intermediate_size": 112,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2560,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": YARN,
}
GROUPS = LITE | {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 0,
    "q_lora_rank": 32,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 16.0,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MODELS = {"lite": LITE, "groups": GROUPS}


def main() -> None:
    folder = begin(FIXTURES)
    for seed, (name, config) in enumerate(MODELS.items()):
        target = folder / name
        begin_model(target, seed=seed)
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**config, attn_implementation="eager")).eval()
        randomise(model)
        recorded = record(model, SEQUENCE_TOKENS, vocab_size=model.config.vocab_size)
        model.to(torch.bfloat16).save_pretrained(target)
        if name == "lite":
            respell(target / "config.json")
        write(target, recorded, most_bytes=MOST_BYTES)


def randomise(model: Any) -> None:
    """Weights that let every part of the model matter: peaked attention, norms far from neutral, spread routing."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            values = torch.empty_like(parameter).uniform_(0.5, 1.5)
        else:
            values = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 * 1.5
        parameter.copy_(values.bfloat16().float())


def respell(path: Path) -> None:
    """The rotary embedding as the published checkpoint has it, from before transformers 5."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    config |= {"rope_theta": theta, "rope_scaling": rope | {"type": kind}}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
