"""Records tiny mixtures of Qwen3.5 and the logits that transformers computes with them, in float32.

The text model alone has its experts one by one, as transformers saves them; the other has them stacked, as published.

Usage: python tools/golden/qwen35_moe.py [FOLDER]
"""

from pathlib import Path
from typing import Any

from qwen35 import IMAGE_TOKENS, TEXT, VISION, randomise, round_weights
from recording import begin, begin_model, record_whole, write
from safetensors.torch import save_file
from transformers import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
)

FIXTURES = Path(__file__).parents[2] / "packages/openinfer-qwen35/tests/fixtures_moe"
NUM_TOKENS = 90
FIRST_IMAGE_TOKEN = 120
MOST_BYTES = 600_000

MIXTURE: dict[str, Any] = {key: value for key, value in TEXT.items() if key != "intermediate_size"} | {
    "vocab_size": 131,
    "hidden_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": False,
}
SMALL = MIXTURE | {"num_hidden_layers": 2, "full_attention_interval": 2, "num_experts": 4, "num_experts_per_tok": 2}


def main() -> None:
    folder = begin(FIXTURES)
    for seed, (name, make) in enumerate(MODELS.items()):
        target = folder / name
        begin_model(target, seed=seed)
        model = make().eval()
        randomise(model)
        recorded = record_whole(model, NUM_TOKENS, vocab_size=FIRST_IMAGE_TOKEN)
        round_weights(model)
        model.save_pretrained(target)
        if name == "vision_language":
            save_file(
                {each: parameter.data for each, parameter in model.named_parameters()}, target / "model.safetensors"
            )
        write(target, recorded, most_bytes=MOST_BYTES)


def make_text() -> Any:
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**MIXTURE, attn_implementation="eager"))


def make_vision_language() -> Any:
    """The layout of the published checkpoints: the text model beside a vision tower."""
    images = {name: FIRST_IMAGE_TOKEN + index for index, name in enumerate(IMAGE_TOKENS)}
    vision = VISION | {"out_hidden_size": SMALL["hidden_size"]}
    config = Qwen3_5MoeConfig(text_config=SMALL, vision_config=vision, tie_word_embeddings=False, **images)
    return Qwen3_5MoeForConditionalGeneration._from_config(config, attn_implementation="eager")  # noqa: SLF001


MODELS = {"text": make_text, "vision_language": make_vision_language}


if __name__ == "__main__":
    main()
