"""Records tiny Qwen3.5 models and the logits that transformers computes with them, in float32.

Usage: python tools/golden/qwen35.py [FOLDER]
"""

from pathlib import Path
from typing import Any

import torch
from recording import begin, begin_model, record, write
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

FIXTURES = Path(__file__).parents[2] / "packages/openinfer-qwen35/tests/fixtures"
SEQUENCE_TOKENS = (150, 41, 7)
MOST_BYTES = 800_000

TEXT: dict[str, Any] = {
    "vocab_size": 263,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
UNTIED = TEXT | {
    "hidden_size": 45,
    "intermediate_size": 54,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "tie_word_embeddings": False,
    "linear_conv_kernel_dim": 3,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
IMAGE_TOKENS = {"image_token_id": 259, "video_token_id": 260, "vision_start_token_id": 261, "vision_end_token_id": 262}


def main() -> None:
    folder = begin(FIXTURES)
    for seed, (name, make) in enumerate(MODELS.items()):
        target = folder / name
        begin_model(target, seed=seed)
        model = make().eval()
        randomise(model)
        recorded = record(model, SEQUENCE_TOKENS, vocab_size=IMAGE_TOKENS["image_token_id"])
        round_weights(model)
        model.save_pretrained(target)
        write(target, recorded, most_bytes=MOST_BYTES)


def make_text(config: dict[str, Any]) -> Any:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config, attn_implementation="eager"))


def make_vision_language() -> Any:
    """The layout of the published checkpoints: the text model beside a vision tower."""
    text = TEXT | {"num_hidden_layers": 2, "full_attention_interval": 2}
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True, **IMAGE_TOKENS)
    return Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager")  # noqa: SLF001


MODELS = {
    "text_tied": lambda: make_text(TEXT),
    "text_untied": lambda: make_text(UNTIED),
    "vision_language": make_vision_language,
}


def randomise(model: Any) -> None:
    """Weights that let every part of the model matter: peaked attention, norms and decays far from neutral."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            values = torch.empty_like(parameter).uniform_(0.2, 3.0).log()
        elif name.endswith("dt_bias"):
            values = torch.randn_like(parameter)
        elif name.endswith("linear_attn.norm.weight"):
            values = torch.empty_like(parameter).uniform_(0.5, 1.5)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            values = torch.empty_like(parameter).uniform_(0.0, 1.0)
        elif name.endswith("norm.weight"):
            values = torch.empty_like(parameter).uniform_(-0.5, 0.5)
        elif name.endswith("conv1d.weight"):
            values = torch.randn_like(parameter) * 0.5
        else:
            values = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 * 1.5
        parameter.copy_(values if is_float32(name) else values.bfloat16().float())


def is_float32(name: str) -> bool:
    """Whether published checkpoints have this tensor in float32."""
    return name.endswith(("A_log", "linear_attn.norm.weight"))


def round_weights(model: Any) -> None:
    """Every tensor in the dtype that published checkpoints have it in; no value changes."""
    for name, parameter in model.named_parameters():
        if not is_float32(name):
            parameter.data = parameter.data.bfloat16()


if __name__ == "__main__":
    main()
