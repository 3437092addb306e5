"""Train a tiny Qwen3.5 with its drafting layer on text, byte by byte, and write it in the Hugging Face layout.

PYTHONPATH=tools python -m tiny_model.train_mtp TEXT_FILE FOLDER --minutes 8

The model is a fixture: it shows that the drafting layer of `openinfer_qwen35.mtp` drafts what a layer trained by its
published definition is sure of. Equations are those of transformers' `modeling_qwen3_5`, in float32, token by token
where the state of linear attention is concerned. The layer reads hidden states after the final norm.
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
    "architectures": ["Qwen3_5ForCausalLM"],
    "attention_bias": False,
    "attn_output_gate": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 192,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 512,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 128,
}
TOKENS, ROWS = 80, 24


def main() -> None:
    """Read the command line, train, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text = torch.tensor([byte for byte in arguments.text.read_bytes() if byte < CONFIG["vocab_size"]])
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in initial().items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    begin, step = time.monotonic(), 0
    while (spent := (time.monotonic() - begin) / 60 / arguments.minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 40) * (0.02 + 0.98 * (1 + math.cos(math.pi * spent)) / 2)
        places = torch.randint(0, len(text) - TOKENS, (ROWS,))
        ids = torch.stack([text[place : place + TOKENS] for place in places.tolist()])
        losses = losses_of(weights, ids)
        optimizer.zero_grad()
        sum(losses).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        step += 1
        if step % 25 == 0:
            told = " ".join(f"{loss.item():.3f}" for loss in losses)
            print(f"{step} {spent:.2f} {told}", flush=True)
    write(weights, arguments.folder)


def initial() -> dict[str, Tensor]:
    """Random weights under the names of checkpoints."""
    c = CONFIG
    h, d, f = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    n, values = c["linear_num_value_heads"], c["linear_num_value_heads"] * c["linear_value_head_dim"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns) * columns**-0.5

    def layer(*, is_full: bool) -> dict[str, Tensor]:
        tensors = {f"{name}_layernorm.weight": torch.zeros(h) for name in ("input", "post_attention")}
        tensors |= {"mlp.gate_proj.weight": matrix(f, h), "mlp.up_proj.weight": matrix(f, h)}
        tensors |= {"mlp.down_proj.weight": matrix(h, f)}
        if is_full:
            rows = {"q": 2 * heads * d, "k": kv * d, "v": kv * d}
            tensors |= {f"self_attn.{name}_proj.weight": matrix(size, h) for name, size in rows.items()}
            tensors |= {"self_attn.o_proj.weight": matrix(h, heads * d)}
            return tensors | {f"self_attn.{name}_norm.weight": torch.zeros(d) for name in "qk"}
        rows = {"qkv": 2 * keys + values, "z": values, "b": n, "a": n}
        tensors |= {f"linear_attn.in_proj_{name}.weight": matrix(size, h) for name, size in rows.items()}
        return tensors | {
            "linear_attn.conv1d.weight": torch.randn(2 * keys + values, 1, 4) * 0.5,
            "linear_attn.A_log": torch.log(torch.linspace(0.2, 3, n)),
            "linear_attn.dt_bias": torch.zeros(n) - 2,
            "linear_attn.norm.weight": torch.ones(c["linear_value_head_dim"]),
            "linear_attn.out_proj.weight": matrix(h, values),
        }

    tensors = {"model.embed_tokens.weight": torch.randn(c["vocab_size"], h) * 0.3, "model.norm.weight": torch.zeros(h)}
    for index, kind in enumerate(c["layer_types"]):
        tensors |= {f"model.layers.{index}.{name}": t for name, t in layer(is_full=kind == "full_attention").items()}
    tensors |= {f"mtp.layers.0.{name}": tensor for name, tensor in layer(is_full=True).items()}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return tensors | {"mtp.fc.weight": matrix(h, 2 * h)} | {f"mtp.{name}.weight": torch.zeros(h) for name in norms}


def losses_of(weights: dict[str, Any], ids: Tensor) -> list[Tensor]:
    """Of the model, and of the first and second draft."""
    embedding = weights["model.embed_tokens.weight"]
    x = functional.embedding(ids, embedding)
    for index, kind in enumerate(CONFIG["layer_types"]):
        x = decoder_layer(x, weights, f"model.layers.{index}", is_full=kind == "full_attention")
    hidden = norm(x, weights["model.norm.weight"])
    losses = [cross_entropy(hidden[:, :-1] @ embedding.T, ids[:, 1:])]
    for depth in (1, 2):  # hidden of token i and the embedding of token i + depth foretell token i + depth + 1
        e = norm(functional.embedding(ids[:, depth:], embedding), weights["mtp.pre_fc_norm_embedding.weight"])
        h = norm(hidden[:, :-1], weights["mtp.pre_fc_norm_hidden.weight"])
        y = torch.cat((e, h), dim=-1) @ weights["mtp.fc.weight"].T
        hidden = norm(decoder_layer(y, weights, "mtp.layers.0", is_full=True), weights["mtp.norm.weight"])
        losses.append(cross_entropy(hidden[:, :-1] @ embedding.T, ids[:, depth + 1 :]))
    return losses


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * (1 + weight)


def decoder_layer(x: Tensor, weights: dict[str, Any], prefix: str, *, is_full: bool) -> Tensor:
    mixer = attention if is_full else linear_attention
    x = x + mixer(norm(x, weights[f"{prefix}.input_layernorm.weight"]), weights, prefix)
    y = norm(x, weights[f"{prefix}.post_attention_layernorm.weight"])
    gate, up = (y @ weights[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (functional.silu(gate) * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T


def attention(x: Tensor, weights: dict[str, Any], prefix: str) -> Tensor:
    rows, tokens, d = x.shape[0], x.shape[1], CONFIG["head_dim"]
    q, k, v = (x @ weights[f"{prefix}.self_attn.{name}_proj.weight"].T for name in "qkv")
    q, gate = q.reshape(rows, tokens, -1, 2, d).unbind(3)
    k, v = k.reshape(rows, tokens, -1, d), v.reshape(rows, tokens, -1, d)
    q, k = (rotate(norm(y, weights[f"{prefix}.self_attn.{name}_norm.weight"])) for y, name in ((q, "q"), (k, "k")))
    group = q.shape[2] // k.shape[2]
    k, v = (y.repeat_interleave(group, 2).transpose(1, 2) for y in (k, v))
    out = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)
    return (out * torch.sigmoid(gate)).reshape(rows, tokens, -1) @ weights[f"{prefix}.self_attn.o_proj.weight"].T


def rotate(x: Tensor) -> Tensor:
    rotated = int(x.shape[-1] * CONFIG["partial_rotary_factor"])
    frequencies = CONFIG["rope_parameters"]["rope_theta"] ** (-torch.arange(0, rotated, 2) / rotated)
    angles = (torch.arange(x.shape[1])[:, None] * frequencies)[:, None]
    first, second, rest = x[..., : rotated // 2], x[..., rotated // 2 : rotated], x[..., rotated:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def linear_attention(x: Tensor, weights: dict[str, Any], prefix: str) -> Tensor:
    c, rows, tokens = CONFIG, x.shape[0], x.shape[1]
    u, z, b, a = (x @ weights[f"{prefix}.linear_attn.in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
    kernel = weights[f"{prefix}.linear_attn.conv1d.weight"]
    padded = functional.pad(u.transpose(1, 2), (kernel.shape[-1] - 1, 0))
    u = functional.silu(functional.conv1d(padded, kernel, groups=len(kernel))).transpose(1, 2)
    keys, n = c["linear_num_key_heads"] * c["linear_key_head_dim"], c["linear_num_value_heads"]
    q, k, v = u[..., :keys], u[..., keys : 2 * keys], u[..., 2 * keys :].reshape(rows, tokens, n, -1)
    q, k = (y.reshape(rows, tokens, -1, c["linear_key_head_dim"]) for y in (q, k))
    q, k = (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    q, k = (y.repeat_interleave(n // q.shape[2], 2) for y in (q * c["linear_key_head_dim"] ** -0.5, k))
    decay = torch.exp(
        -weights[f"{prefix}.linear_attn.A_log"].exp()
        * functional.softplus(a + weights[f"{prefix}.linear_attn.dt_bias"])
    )
    beta = torch.sigmoid(b)
    state = x.new_zeros(rows, n, c["linear_key_head_dim"], c["linear_value_head_dim"])
    outputs: list[Tensor] = []
    for token in range(tokens):
        key = k[:, token, :, :, None]
        state = state * decay[:, token, :, None, None]
        correction = (v[:, token] - (state * key).sum(2)) * beta[:, token, :, None]
        state = state + key * correction[:, :, None]
        outputs.append((state * q[:, token, :, :, None]).sum(2))
    o = torch.stack(outputs, 1)
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + c["rms_norm_eps"])
    o = o * weights[f"{prefix}.linear_attn.norm.weight"] * functional.silu(z.reshape(o.shape))
    return o.reshape(rows, tokens, -1) @ weights[f"{prefix}.linear_attn.out_proj.weight"].T


def write(weights: dict[str, Any], folder: Path) -> None:
    """In BF16, as checkpoints are, but for what these keep in float32."""
    in_float32 = ("linear_attn.A_log", "linear_attn.norm.weight")
    stored = {
        name: weight.detach() if name.endswith(in_float32) else weight.detach().to(torch.bfloat16)
        for name, weight in weights.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


if __name__ == "__main__":
    main()
