"""Train a tiny Qwen3 on text, byte by byte, and an EAGLE-3 drafter for it; write both in the Hugging Face layout.

PYTHONPATH=tools python -m tiny_model.train_eagle3 TEXT_FILE MODEL_FOLDER DRAFTER_FOLDER --minutes 6

Fixtures: they show that `openinfer_qwen3.eagle3` drafts what a layer trained by its published definition is sure of.
Both are trained at once, the drafter on hidden states that it does not change, and on its own output for two drafts
more.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 192,
    "max_position_embeddings": 512,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 128,
}
DRAFTER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 100,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True},
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 192,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "vocab_size": 128,
}
TAPS: list[int] = DRAFTER["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
TOKENS, ROWS, DRAFTS = 96, 32, 3


def main() -> None:
    """Read the command line, train, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--minutes", type=float, default=6.0)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text = torch.tensor([byte for byte in arguments.text.read_bytes() if byte < CONFIG["vocab_size"]])
    targets = text.bincount(minlength=CONFIG["vocab_size"]).topk(DRAFTER["draft_vocab_size"]).indices.sort().values
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in initial().items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    begin, step = time.monotonic(), 0
    while (spent := (time.monotonic() - begin) / 60 / arguments.minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 40) * (0.02 + 0.98 * (1 + math.cos(math.pi * spent)) / 2)
        places = torch.randint(0, len(text) - TOKENS, (ROWS,))
        ids = torch.stack([text[place : place + TOKENS] for place in places.tolist()])
        losses = losses_of(weights, ids, targets)
        optimizer.zero_grad()
        sum(losses).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        step += 1
        if step % 25 == 0:
            told = " ".join(f"{loss.item():.3f}" for loss in losses)
            print(f"{step} {spent:.2f} {told}", flush=True)
    write(weights, targets, arguments.model, arguments.drafter)


def initial() -> dict[str, Tensor]:
    """Random weights under the names of checkpoints; those of the drafter begin with `drafter.`."""
    c = CONFIG
    h, d, f, heads, kv = (
        c[name]
        for name in ("hidden_size", "head_dim", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns) * columns**-0.5

    def layer(width: int) -> dict[str, Tensor]:
        rows = {"q": heads * d, "k": kv * d, "v": kv * d}
        return {
            **{f"{name}_layernorm.weight": torch.ones(h) for name in ("input", "post_attention")},
            **{f"self_attn.{name}_proj.weight": matrix(size, width) for name, size in rows.items()},
            "self_attn.o_proj.weight": matrix(h, heads * d),
            "mlp.gate_proj.weight": matrix(f, h),
            "mlp.up_proj.weight": matrix(f, h),
            "mlp.down_proj.weight": matrix(h, f),
        }

    tensors = {"model.embed_tokens.weight": torch.randn(c["vocab_size"], h) * 0.3, "model.norm.weight": torch.ones(h)}
    for index in range(c["num_hidden_layers"]):
        of_layer = layer(h) | {f"self_attn.{name}_norm.weight": torch.ones(d) for name in "qk"}
        tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in of_layer.items()}
    own = {f"midlayer.{name}": tensor for name, tensor in layer(2 * h).items()}
    own |= {"midlayer.hidden_norm.weight": torch.ones(h), "norm.weight": torch.ones(h), "fc.weight": matrix(h, 3 * h)}
    own["lm_head.weight"] = matrix(DRAFTER["draft_vocab_size"], h)
    return tensors | {f"drafter.{name}": tensor for name, tensor in own.items()}


def losses_of(weights: dict[str, Any], ids: Tensor, targets: Tensor) -> list[Tensor]:
    """Of the model, and of each draft."""
    embedding = weights["model.embed_tokens.weight"]
    x, tapped = functional.embedding(ids, embedding), []
    for index in range(CONFIG["num_hidden_layers"] + 1):
        if index in TAPS:
            tapped.append(x.detach())
        if index < CONFIG["num_hidden_layers"]:
            prefix = f"model.layers.{index}"
            y = norm(x, weights[f"{prefix}.input_layernorm.weight"])
            x = feed_forward(x + attention(y, weights, prefix), weights, prefix)
    logits = norm(x, weights["model.norm.weight"]) @ embedding.T
    losses = [functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())]
    place_of = torch.full((CONFIG["vocab_size"],), -100)
    place_of[targets] = torch.arange(len(targets))
    likeliest = logits.detach().argmax(-1)  # what greedy decoding would sample, which is what drafts are compared with
    hidden = torch.cat(tapped, dim=-1) @ weights["drafter.fc.weight"].T
    for depth in range(1, DRAFTS + 1):  # hidden of token i and the embedding of i + depth foretell i + depth + 1
        embedded = functional.embedding(ids[:, depth:], embedding.detach())
        hidden, drafted = draft_layer(embedded, hidden[:, :-1], weights)
        places = place_of[likeliest[:, depth:]]
        losses.append(functional.cross_entropy(drafted.flatten(0, 1), places.flatten()))
    return losses


def draft_layer(embedded: Tensor, hidden: Tensor, weights: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The hidden states after it, and logits over the drafter's vocabulary."""
    prefix = "drafter.midlayer"
    both = (
        norm(embedded, weights[f"{prefix}.input_layernorm.weight"]),
        norm(hidden, weights[f"{prefix}.hidden_norm.weight"]),
    )
    x = feed_forward(hidden + attention(torch.cat(both, dim=-1), weights, prefix), weights, prefix)
    return x, norm(x, weights["drafter.norm.weight"]) @ weights["drafter.lm_head.weight"].T


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight


def feed_forward(x: Tensor, weights: dict[str, Any], prefix: str) -> Tensor:
    y = norm(x, weights[f"{prefix}.post_attention_layernorm.weight"])
    gate, up = (y @ weights[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (functional.silu(gate) * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T


def attention(x: Tensor, weights: dict[str, Any], prefix: str) -> Tensor:
    rows, tokens, d = x.shape[0], x.shape[1], CONFIG["head_dim"]
    q, k, v = ((x @ weights[f"{prefix}.self_attn.{name}_proj.weight"].T).reshape(rows, tokens, -1, d) for name in "qkv")
    if f"{prefix}.self_attn.q_norm.weight" in weights:
        q, k = (norm(y, weights[f"{prefix}.self_attn.{name}_norm.weight"]) for y, name in ((q, "q"), (k, "k")))
    group = q.shape[2] // k.shape[2]
    q, k = rotate(q), rotate(k)
    k, v = (y.repeat_interleave(group, 2).transpose(1, 2) for y in (k, v))
    out = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)
    return out.reshape(rows, tokens, -1) @ weights[f"{prefix}.self_attn.o_proj.weight"].T


def rotate(x: Tensor) -> Tensor:
    angles = (torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1]))[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def write(weights: dict[str, Any], targets: Tensor, model: Path, drafter: Path) -> None:
    """In BF16, as checkpoints are."""
    stored = {name: weight.detach().to(torch.bfloat16) for name, weight in weights.items()}
    own = {name.removeprefix("drafter."): weight for name, weight in stored.items() if name.startswith("drafter.")}
    own["d2t"] = targets - torch.arange(len(targets))
    own["t2d"] = torch.zeros(CONFIG["vocab_size"], dtype=torch.bool).scatter(0, targets, value=True)
    of_model = {name: weight for name, weight in stored.items() if not name.startswith("drafter.")}
    for folder, tensors, config in ((model, of_model, CONFIG), (drafter, own, DRAFTER)):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
