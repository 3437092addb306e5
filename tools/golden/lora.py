"""Records LoRA adapters that PEFT makes of the tiny models here, and what transformers computes with them, in float32.

Usage: python tools/golden/lora.py

Run it after the scripts that make the models. A fresh adapter has B = 0, and would change nothing: every factor is
drawn anew, large enough that log-probabilities move.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from recording import begin, record_whole, write
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

PACKAGES = Path(__file__).parents[2] / "packages"
NUM_TOKENS = 24
MOST_BYTES = 400_000
LEAST_EFFECT = 0.05  # mean |difference| of log-probabilities
ALL_SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass
class Fixture:
    model: str  # below `packages/`
    config: dict[str, Any]
    spread: float = 0.4  # of B
    dtype: torch.dtype = field(default=torch.bfloat16)


QWEN3, QWEN35 = "openinfer-qwen3/tests/fixtures/tied", "openinfer-qwen35/tests/fixtures/text_tied"
FIXTURES = {
    "openinfer-qwen3/tests/adapters/rank_1": Fixture(
        QWEN3, {"r": 1, "lora_alpha": 2, "target_modules": ALL_SEVEN}, dtype=torch.float32
    ),
    "openinfer-qwen3/tests/adapters/rank_8": Fixture(QWEN3, {"r": 8, "lora_alpha": 8, "target_modules": ALL_SEVEN}),
    "openinfer-qwen3/tests/adapters/rslora_16": Fixture(
        QWEN3,
        {"r": 16, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
        dtype=torch.float16,
    ),
    "openinfer-qwen3/tests/adapters/rank_40": Fixture(
        QWEN3, {"r": 40, "lora_alpha": 20, "target_modules": ["o_proj", "down_proj"]}
    ),
    "openinfer-qwen3/tests/adapters/patterns": Fixture(
        QWEN3,
        {
            "r": 4,
            "lora_alpha": 4,
            "target_modules": ["q_proj", "k_proj", "up_proj"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 12, "up_proj": 3},
            "alpha_pattern": {"k_proj": 16, "model.layers.2.mlp.up_proj": 9},
        },
    ),
    "openinfer-qwen3/tests/adapters/mixture": Fixture(
        "openinfer-qwen3/tests/fixtures_moe/mixture",
        {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    ),
    "openinfer-qwen35/tests/adapters/all": Fixture(
        QWEN35,
        {
            "r": 6,
            "lora_alpha": 6,
            "target_modules": [
                *ALL_SEVEN,
                *(f"in_proj_{name}" for name in ("qkv", "z", "b", "a")),
                "out_proj",
            ],
        },
    ),
    "openinfer-llama/tests/adapter": Fixture(
        "openinfer-llama/tests/fixture", {"r": 8, "lora_alpha": 16, "target_modules": ALL_SEVEN}
    ),
}


def draw(model: Any, spread: float) -> None:
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[1] ** 0.5)
        elif "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape) * spread / parameter.shape[1] ** 0.5)


def rounded(model: Any, dtype: torch.dtype) -> None:
    """The factors as they are saved."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(parameter.to(dtype).float())


def make(target: Path, fixture: Fixture, seed: int) -> None:
    shutil.rmtree(target, ignore_errors=True)
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(PACKAGES / fixture.model, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **fixture.config)).eval()
    draw(model, fixture.spread)
    rounded(model, fixture.dtype)
    model.save_pretrained(target)
    (target / "README.md").unlink(missing_ok=True)
    weights = target / "adapter_model.safetensors"
    save_file({name: each.to(fixture.dtype) for name, each in load_file(weights).items()}, weights)
    config = target / "adapter_config.json"  # without the path of this machine
    config.write_text(config.read_text().replace(str(PACKAGES / fixture.model), fixture.model))
    recorded = record_whole(model, NUM_TOKENS)
    token_ids = torch.tensor(recorded["token_ids"], dtype=torch.int64)
    with model.disable_adapter():
        plain = model(input_ids=token_ids[None]).logits[0].log_softmax(-1)
    effect = float((torch.tensor(recorded["logits"]).log_softmax(-1) - plain).abs().mean())
    print(f"effect {effect:.3f}")
    if effect < LEAST_EFFECT:
        raise SystemExit(f"{target} changes log-probabilities by {effect:.3f}; that is too little to test")
    write(target, recorded, most_bytes=MOST_BYTES)


def main() -> None:
    begin(PACKAGES)
    for seed, (name, fixture) in enumerate(FIXTURES.items()):
        make(PACKAGES / name, fixture, 100 + seed)


if __name__ == "__main__":
    main()
