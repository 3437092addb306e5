"""The `config.json` of models that are published and too large to keep here, for runs with dummy weights.

    python3 tools/device/published_configs.py FOLDER      writes FOLDER/NAME/config.json for each of them
    openinfer bench offline --model FOLDER/deepseek-v4-flash --option device=cuda --option load_format=dummy \
        --option tensor_parallel_size=8 --option max_model_tokens=8192 --size 1x1024 64x1024

Only the keys that shape the model or say how it is stored.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEEPSEEK_V4_FLASH: Mapping[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0, *(128 if layer % 2 else 4 for layer in range(2, 43)), 0],
    "num_hash_layers": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 1,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
DEEPSEEK_V2_LITE: Mapping[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "vocab_size": 102400,
    "eos_token_id": 100001,
}
KIMI_K2: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "vocab_size": 163840,
    "eos_token_id": 163585,
}
"""Of K2-Instruct, without its weights' format."""
QWEN3_4B: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
}
QWEN3_8B: Mapping[str, Any] = {
    **QWEN3_4B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
FP8_BLOCKS = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
AWQ_INT4 = {
    "quantization_config": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    }
}
GPTQ_INT4 = {
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
}


def compressed_tensors(layout: str, activations: Mapping[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """The config of a checkpoint that compressed-tensors wrote."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": activations}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
    }


W4A16 = compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128)
W4A16_GROUP_32 = compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
PER_TOKEN: Mapping[str, Any] = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
W8A8 = compressed_tensors("int-quantized", {**PER_TOKEN, "type": "int"}, num_bits=8, type="int", strategy="channel")
FP8_ROWS = compressed_tensors(
    "float-quantized", {**PER_TOKEN, "type": "float"}, num_bits=8, type="float", strategy="channel"
)
MXFP4 = compressed_tensors("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
NVFP4 = compressed_tensors("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
KIMI_K2_INT4 = W4A16_GROUP_32
QWEN3_30B_A3B: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "eos_token_id": 151645,
}
QWEN35_35B_A3B: Mapping[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
    "eos_token_id": 248044,
}
"""The text model of Qwen3.5-35B-A3B and Qwen3.6-35B-A3B."""
QWEN35_4B: Mapping[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 248320,
    "eos_token_id": 248044,
}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "deepseek-v4-flash": DEEPSEEK_V4_FLASH,
    "kimi-k2-int4": {**KIMI_K2, **KIMI_K2_INT4},
    "kimi-k2-fp8": {**KIMI_K2, **FP8_BLOCKS},
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3.5-35b-a3b": QWEN35_35B_A3B,
    "qwen3.5-4b": QWEN35_4B,
    "qwen3-30b-a3b-fp8": {**QWEN3_30B_A3B, **FP8_BLOCKS},
    "qwen3-30b-a3b-awq": {**QWEN3_30B_A3B, **AWQ_INT4},
    "qwen3.5-35b-a3b-fp8": {**QWEN35_35B_A3B, **FP8_BLOCKS},
    "qwen3.5-35b-a3b-awq": {**QWEN35_35B_A3B, **AWQ_INT4},
    "qwen3-4b": QWEN3_4B,
    "qwen3-4b-fp8-rows": {**QWEN3_4B, **FP8_ROWS},
    "qwen3-4b-gptq": {**QWEN3_4B, **GPTQ_INT4},
    "qwen3-4b-w4a16": {**QWEN3_4B, **W4A16},
    "qwen3-4b-w4a16-g32": {**QWEN3_4B, **W4A16_GROUP_32},
    "qwen3-4b-w8a8": {**QWEN3_4B, **W8A8},
    "qwen3-4b-mxfp4": {**QWEN3_4B, **MXFP4},
    "qwen3-4b-nvfp4": {**QWEN3_4B, **NVFP4},
    "qwen3-4b-fp8": {**QWEN3_4B, **FP8_BLOCKS},
    "qwen3-4b-awq": {**QWEN3_4B, **AWQ_INT4},
    "qwen3-8b": QWEN3_8B,
    "qwen3-8b-fp8": {**QWEN3_8B, **FP8_BLOCKS},
    "qwen3-8b-awq": {**QWEN3_8B, **AWQ_INT4},
}


def write(folder: Path) -> None:
    """Writes all of them."""
    for name, config in PUBLISHED.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
