"""Records tiny Llama and Mistral models and the logits that transformers computes with them, in float32.

Usage: python tools/golden/llama.py [FOLDER]
"""

from pathlib import Path

import torch
from recording import begin, begin_model, record_whole, write
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

FIXTURES = Path(__file__).parents[2] / "packages/openinfer-llama/tests"
NUM_TOKENS = 90
MOST_BYTES = 300_000
CONFIG = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


# narrower than the sequence, and no multiple of a block; heads whose sizes do not add up to the hidden size
MISTRAL = CONFIG | {
    "head_dim": 16,
    "tie_word_embeddings": False,
    "sliding_window": 21,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def main() -> None:
    folder = begin(FIXTURES)
    write_model(folder / "fixture", LlamaForCausalLM, LlamaConfig(**CONFIG, attn_implementation="eager"))
    write_model(folder / "fixture_mistral", MistralForCausalLM, MistralConfig(**MISTRAL, attn_implementation="eager"))


def write_model(folder: Path, model_class: type, config: object) -> None:
    begin_model(folder, seed=0)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            values = torch.empty_like(parameter).uniform_(0.5, 1.5)
        else:
            values = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 * 1.5
        parameter.copy_(values.bfloat16().float())
    recorded = record_whole(model, NUM_TOKENS)
    model.bfloat16().save_pretrained(folder)
    write(folder, recorded, most_bytes=MOST_BYTES)


if __name__ == "__main__":
    main()
