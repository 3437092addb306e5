"""Records tiny DeepSeek-V3 models, in FP8 with groups of experts and in BF16 without a query bottleneck.

The second is Moonlight's kind. The first has a drafting layer after its own, which nothing may read.

Usage: python tools/golden/deepseek_v3.py [FOLDER]
"""

import json
from pathlib import Path
from typing import Any

import torch
from kimi_k2 import FP8_CONFIG, K2, MOST_BYTES, fp8_blocks, give_values, is_in_fp8, published, quantised, randomise
from recording import begin, begin_model, record_whole, write
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

FIXTURES = Path(__file__).parents[2] / "packages/openinfer-deepseek/tests/fixtures_v3"
NUM_TOKENS = 96

V3: dict[str, Any] = K2 | {
    "hidden_size": 144,  # blocks of 128 end in the middle of it, and ranks cut them
    "moe_intermediate_size": 32,
    "max_position_embeddings": 2560,
    "n_routed_experts": 16,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    },
}
MOONLIGHT = K2 | {
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.446,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
MODELS = {"fp8_groups": V3, "moonlight": MOONLIGHT}


def main() -> None:
    folder = begin(FIXTURES)
    for seed, (name, config) in enumerate(MODELS.items()):
        target = folder / name
        begin_model(target, seed=seed)
        target.mkdir(parents=True)
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**config, attn_implementation="eager")).eval()
        randomise(model)
        stored = published(model)
        if name == "fp8_groups":
            stored = quantised(stored, is_in_fp8, fp8_blocks)
        give_values(model, stored)
        if name == "fp8_groups":
            stored[f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"] = torch.ones(2, 4).bfloat16()
        write_config(target / "config.json", config, is_quantised=name == "fp8_groups")
        save_file(stored, target / "model.safetensors")
        write(target, record_whole(model, NUM_TOKENS), most_bytes=MOST_BYTES)


def write_config(path: Path, config: dict[str, Any], *, is_quantised: bool) -> None:
    rope = dict(config["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    text = {key: value for key, value in config.items() if key != "rope_parameters"}
    text |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1 if is_quantised else 0,
        "rope_scaling": rope | {"type": kind} if rope else None,
        "rope_theta": theta,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    if is_quantised:
        text["quantization_config"] = FP8_CONFIG
    path.write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
