"""Qwen3 in PyTorch for training and measuring: parameter names and arithmetic of the published architecture.

What the product computes is compared with `transformers`, not with this file.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the toy checkpoint, under the names of `config.json`."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048


@dataclass(slots=True)
class Cache:
    """Keys and values of one batch: per layer `[2, batch, kv_heads, positions, head_dim]`."""

    layers: list[Tensor]

    @classmethod
    def empty(cls, shape: Shape, batch: int, positions: int, device: torch.device) -> "Cache":
        """Allocate zeros for `batch` sequences of at most `positions` tokens."""
        size = (2, batch, shape.num_key_value_heads, positions, shape.head_dim)
        return cls([torch.zeros(size, device=device) for _ in range(shape.num_hidden_layers)])

    def keep(self, rows: Tensor) -> None:
        """Drop all sequences but `rows`."""
        self.layers = [layer[:, rows] for layer in self.layers]


class Norm(nn.RMSNorm):
    """RMSNorm whose weight takes the input's dtype, which keeps PyTorch's fused kernel under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        assert self.weight is not None
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention with a norm per head before the rotary embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, key_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, slots: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Attend within `x` `[batch, tokens, hidden]`, or over a cache `[2, batch, …]` written at `positions`."""
        heads = (*x.shape[:2], -1, self.shape.head_dim)
        q = _rotate(self.q_norm(self.q_proj(x).view(heads)), rope).transpose(1, 2)
        k = _rotate(self.k_norm(self.k_proj(x).view(heads)), rope).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        if slots is not None:
            cache, positions = slots
            where = positions[:, None, :, None].expand_as(k)
            cache[0].scatter_(2, where, k)
            cache[1].scatter_(2, where, v)
            k, v = cache[0], cache[1]
        grouped = q.unflatten(1, (self.shape.num_key_value_heads, -1)).flatten(2, 3)
        out = self._attend(grouped if x.shape[1] == 1 else q, k.to(q.dtype), v.to(q.dtype), mask.to(q.dtype))
        return self.o_proj(out.reshape(q.shape).transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attend; a single token's query heads stand as the rows of their KV head, so that nothing is copied."""
        if q.shape[1] != k.shape[1]:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[…, hidden]` to itself."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, slots: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Map `[batch, tokens, hidden]` to itself."""
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, slots)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Everything but the head, which is the embedding again."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Qwen3(nn.Module):
    """The language model; `state_dict()` has the published tensor names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.apply(self._initialise)

    def hidden(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the normed hidden states `[batch, tokens, hidden]`; `mask` is added to the scores."""
        rope = _rope(positions, self.shape)
        x = self.model.embed_tokens(ids)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, rope, mask, None if cache is None else (cache.layers[index], positions))
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `hidden` times the transposed embedding."""
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)


def additive(allowed: Tensor) -> Tensor:
    """Turn a boolean mask into one that is added to scores: 0 or minus infinity."""
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, float("-inf"))


def _rope(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cos and sin `[batch, tokens, 1, head_dim / 2]` in float32."""
    half = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None, None].float() * shape.rope_theta ** (-half / shape.head_dim)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (part.to(x.dtype) for part in rope)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
