"""Records a tiny Llama model and the logits that transformers computes with it, in float32, for the example package.

Usage: python tools/golden/llama.py [FOLDER]
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FIXTURE = Path(__file__).parents[2] / "examples/openinfer-llama/tests/fixture"
NUM_TOKENS = 90
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


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURE
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="eager")).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            values = torch.empty_like(parameter).uniform_(0.5, 1.5)
        else:
            values = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 * 1.5
        parameter.copy_(values.bfloat16().float())
    token_ids = torch.randint(0, model.config.vocab_size, (NUM_TOKENS,))
    logits = model(token_ids[None]).logits[0]
    shutil.rmtree(folder, ignore_errors=True)
    model.bfloat16().save_pretrained(folder)
    np.savez_compressed(folder / "logits.npz", token_ids=token_ids.to(torch.int32).numpy(), logits=logits.numpy())
    for path in folder.iterdir():
        path.chmod(0o644)
        print(path.name, path.stat().st_size)
    print(f"largest logit {float(logits.abs().max()):.1f}")


if __name__ == "__main__":
    main()
