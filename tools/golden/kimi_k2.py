"""Records tiny Kimi-K2 models, plain, in FP8 and in INT4, and the logits that transformers computes, in float32.

What is stored in few bits was packed here, by torch's own FP8 and by arithmetic; the class then has the values that
the codes stand for.

Usage: python tools/golden/kimi_k2.py [FOLDER]
"""

import json
from pathlib import Path
from typing import Any

import torch
from recording import begin, begin_model, record_whole, write
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

FIXTURES = Path(__file__).parents[2] / "packages/openinfer-kimi-k2/tests/fixtures"
NUM_TOKENS = 96
MOST_BYTES = 600_000

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 32.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
K2: dict[str, Any] = {
    "vocab_size": 135,
    "hidden_size": 64,
    "intermediate_size": 88,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": YARN,
}
GROUPS = K2 | {
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-3,
    "rope_parameters": YARN | {"beta_fast": 32.0, "factor": 64.0},
}
# Blocks of 128 that matrices end in the middle of, and that ranks cut.
FP8 = K2 | {"hidden_size": 144, "moe_intermediate_size": 40, "n_routed_experts": 8}
MODELS = {"plain": K2, "groups": GROUPS, "fp8": FP8, "int4": K2}

FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
INT4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "int"},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
}


def main() -> None:
    folder = begin(FIXTURES)
    for seed, (name, config) in enumerate(MODELS.items()):
        target = folder / name
        begin_model(target, seed=seed)
        target.mkdir(parents=True)
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**config, attn_implementation="eager")).eval()
        randomise(model)
        stored = published(model)
        if name == "fp8":
            stored = quantised(stored, is_in_fp8, fp8_blocks)
        elif name == "int4":
            stored = quantised(stored, is_routed_expert, int4_groups)
        give_values(model, stored)
        write_config(target / "config.json", name, config)
        prefix = "language_model." if name == "int4" else ""
        save_file({prefix + key: value for key, value in stored.items()}, target / "model.safetensors")
        write(target, record_whole(model, NUM_TOKENS), most_bytes=MOST_BYTES)


def randomise(model: Any) -> None:
    """Weights that let every part of the model matter: peaked attention, norms far from neutral, spread routing."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.randn_like(tensor) * 0.15)
        elif name.endswith("norm.weight"):
            tensor.copy_(torch.empty_like(tensor).uniform_(0.5, 1.5).bfloat16().float())
        elif name.endswith("weight") or "experts" in name:
            tensor.copy_((torch.randn_like(tensor) / tensor.shape[-1] ** 0.5 * 1.5).bfloat16().float())


def published(model: Any) -> dict[str, torch.Tensor]:
    """The tensors under their published names, BF16 but for the correction bias; experts one by one."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                for part, value in (("gate", gate), ("up", up)):
                    found[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = value.bfloat16()
        elif name.endswith("experts.down_proj"):
            for expert, value in enumerate(tensor):
                found[name.replace("down_proj", f"{expert}.down_proj.weight")] = value.bfloat16()
        else:
            found[name] = tensor.clone() if name.endswith("correction_bias") else tensor.bfloat16()
    return {name: tensor.contiguous() for name, tensor in found.items()}


def is_in_fp8(name: str) -> bool:
    return name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))


def is_routed_expert(name: str) -> bool:
    return ".mlp.experts." in name


def quantised(stored: dict[str, torch.Tensor], chosen: Any, pack: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        found |= pack(name.removesuffix(".weight"), tensor.float()) if chosen(name) else {name: tensor}
    return found


def fp8_blocks(name: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = matrix.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    codes = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            scales[i, j] = matrix[block].abs().max() / 448 * (1 + 0.1 * (i + 2 * j))  # that no two blocks are alike
            codes[block] = (matrix[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}


def int4_groups(name: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = matrix.shape
    groups = matrix.reshape(rows, columns // 32, 32)
    scales = (groups.abs().amax(dim=2) / 7.5).bfloat16()
    numbers = (groups / scales.float()[:, :, None]).round().clamp(-8, 7).reshape(rows, columns).to(torch.int64)
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for nibble in range(8):
        words += (numbers[:, nibble::8] + 8) * 16**nibble
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {
        f"{name}.weight_packed": words,
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }


def give_values(model: Any, stored: dict[str, torch.Tensor]) -> None:
    """Writes what the stored tensors stand for into the class."""
    values = {name: tensor.float() for name, tensor in stored.items() if tensor.dtype == torch.bfloat16}
    for name, codes in stored.items():
        if codes.dtype == torch.float8_e4m3fn:
            scales = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            values[name] = codes.float() * scales[: codes.shape[0], : codes.shape[1]]
        if name.endswith("weight_packed"):
            base = name.removesuffix("_packed")
            words = codes.to(torch.int64) & 0xFFFFFFFF
            numbers = torch.stack([(words >> 4 * nibble & 15) - 8 for nibble in range(8)], dim=2).flatten(1)
            values[base] = numbers * stored[f"{base}_scale"].float().repeat_interleave(32, 1)
    for name, tensor in model.state_dict().items():
        prefix = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            both = [[values[f"{prefix}.{e}.{part}_proj.weight"] for part in ("gate", "up")] for e in range(len(tensor))]
            tensor.copy_(torch.stack([torch.cat(pair) for pair in both]))
        elif name.endswith("experts.down_proj"):
            tensor.copy_(torch.stack([values[f"{prefix}.{e}.down_proj.weight"] for e in range(len(tensor))]))
        elif name in values:
            tensor.copy_(values[name])


def write_config(path: Path, name: str, config: dict[str, Any]) -> None:
    rope = dict(config["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    text = {key: value for key, value in config.items() if key != "rope_parameters"}
    text |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        "model_type": "kimi_k2",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "rope_scaling": rope | {"type": kind},
        "rope_theta": theta,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    if name == "fp8":
        text["quantization_config"] = FP8_CONFIG
    if name == "int4":  # as the text part of a vision-language model
        architectures = ["KimiK25ForConditionalGeneration"]
        text["quantization_config"] = INT4_CONFIG
        text = {"architectures": architectures, "model_type": "kimi_k25", "text_config": text, "vision_config": {}}
    path.write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
