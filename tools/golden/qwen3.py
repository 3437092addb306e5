"""Records tiny Qwen3 models and the logits that transformers computes with them, in float32.

Usage: python tools/golden/qwen3.py [FOLDER]
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from recording import begin, begin_model, record, write
from transformers import Qwen3Config, Qwen3ForCausalLM

FIXTURES = Path(__file__).parents[2] / "packages/openinfer-qwen3/tests/fixtures"
SEQUENCE_TOKENS = (90, 41, 7)
MOST_BYTES = 700_000

SPEC = {
    "vocab_size": 257,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass
class Fixture:
    config: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    max_shard_size: str = "1GB"
    old_rope_spelling: bool = False


FIXTURES_BY_NAME = {
    "tied": Fixture(SPEC),
    "untied_yarn": Fixture(
        SPEC | {"num_hidden_layers": 2, "tie_word_embeddings": False, "rope_parameters": YARN}, max_shard_size="200KB"
    ),
    "attention_bias": Fixture(
        SPEC
        | {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 24,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
    ),
    "odd_sizes": Fixture(
        SPEC
        | {
            "vocab_size": 131,
            "hidden_size": 45,
            "intermediate_size": 51,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 14,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        dtype=torch.float32,
        old_rope_spelling=True,
    ),
}


def main() -> None:
    folder = begin(FIXTURES)
    for seed, (name, fixture) in enumerate(FIXTURES_BY_NAME.items()):
        target = folder / name
        begin_model(target, seed=seed)
        model = Qwen3ForCausalLM(Qwen3Config(**fixture.config, attn_implementation="eager"))
        randomise(model.eval())
        recorded = record(model, SEQUENCE_TOKENS, vocab_size=model.config.vocab_size)
        model.to(fixture.dtype).save_pretrained(target, max_shard_size=fixture.max_shard_size)
        if fixture.old_rope_spelling:
            respell(target / "config.json")
        write(target, recorded, most_bytes=MOST_BYTES)


def randomise(model: Qwen3ForCausalLM) -> None:
    """Weights that let every part of the model matter: peaked attention, norms and biases far from neutral."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            values = torch.empty_like(parameter).uniform_(1.0, 2.0)
        elif name.endswith("norm.weight"):
            values = torch.empty_like(parameter).uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            values = torch.randn_like(parameter) * 0.5
        else:
            values = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 * 1.5
        parameter.copy_(values.bfloat16().float())


def respell(path: Path) -> None:
    """`rope_parameters` as transformers before 5 wrote it."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
