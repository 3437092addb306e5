"""Drafters of blocks in float64, by the equations of the published code, and what else their tests share.

DFlash by vLLM's `qwen3_dflash`; DSpark by DeepSpec's `modeling/dspark` (`qwen3/modeling.py`: `_forward_backbone`,
`sample_draft_tokens`; `markov_head.py`: `VanillaMarkov.sample_block_tokens`), with greedy drafts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from openinfer_engine import Checkpoint
from openinfer_engine.testing import (
    DraftLog,
    agreeing_logits,
    record_drafts,
)
from openinfer_engine.testing.random_weights import spread_tensors
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels.cpu import CpuOps
from openinfer_qwen3.family import Qwen3Definition

TOLERANCE = 2e-3
MODEL = Path(__file__).parent / "fixtures" / "tied"
LAYERS: dict[str, Any] = {
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 112,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 257,
}


@dataclass(frozen=True, slots=True)
class Blocks64:
    """The layers, and the logits of each draft."""

    tensors: dict[str, NDArray[Any]]
    embedding: NDArray[Any]
    """Of the model, its head as well."""
    mask_token_id: int
    drafts_at_anchor: bool = False
    shift: int = 0
    """A mutant's: hidden states of another row."""
    is_causal: bool = False
    """A mutant's: places do not see those after them."""
    is_unnormed: bool = False
    """A mutant's: the context before its norm."""
    is_shifted_place: bool = False
    """A mutant's: drafts are read one place too late or too early."""
    markov: str = "token before"
    """Mutants': "none", "last token" for all places, or "draft after"."""

    def logits(self, token_ids: list[int], taps: NDArray[Any], drafts: list[int]) -> NDArray[np.float64]:
        """`[drafts, V_d]`, each after the drafts before it; `taps [tokens - 1, taps h]`."""
        count, first = len(drafts), int(not self.drafts_at_anchor)
        context = np.roll(taps, self.shift, axis=0).astype(np.float64) @ self._of("fc").T
        context = context if self.is_unnormed else self._norm(context, "hidden_norm")
        block = [token_ids[-1]] + [self.mask_token_id] * (count - 1 + first)
        x = self._embedding[block]
        for index in range(LAYERS["num_hidden_layers"]):
            layer = f"layers.{index}"
            x = x + self._attention(self._norm(x, f"{layer}.input_layernorm"), context, layer)
            y = self._norm(x, f"{layer}.post_attention_layernorm")
            gate, up = y @ self._of(f"{layer}.mlp.gate_proj").T, y @ self._of(f"{layer}.mlp.up_proj").T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self._of(f"{layer}.mlp.down_proj").T
        places = np.arange(count) + (first if not self.is_shifted_place else 1 - first)
        hidden = self._norm(x, "norm")[places.clip(0, len(x) - 1)]
        logits = hidden @ (self._of("lm_head") if "lm_head.weight" in self.tensors else self.embedding).T
        return logits + self._transitions(token_ids[-1], drafts)

    def _transitions(self, last_id: int, drafts: list[int]) -> NDArray[np.float64] | float:
        """What the token before each draft adds."""
        if "markov_head.markov_w1.weight" not in self.tensors or self.markov == "none":
            return 0.0
        before = [last_id, *drafts[:-1]]
        if self.markov == "last token":
            before = [last_id] * len(drafts)
        if self.markov == "draft after":
            before = [*drafts[1:], drafts[-1]]
        return self._of("markov_head.markov_w1")[before] @ self._of("markov_head.markov_w2").T

    @property
    def _embedding(self) -> NDArray[np.float64]:
        own = self.tensors.get("embed_tokens.weight")
        return (self.embedding if own is None else own).astype(np.float64)

    def _of(self, name: str) -> NDArray[np.float64]:
        return self.tensors[f"{name}.weight"].astype(np.float64)

    def _norm(self, x: NDArray[Any], name: str) -> NDArray[np.float64]:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + LAYERS["rms_norm_eps"]) * self._of(name)

    def _attention(self, x: NDArray[Any], context: NDArray[Any], layer: str) -> NDArray[np.float64]:
        dim, known = LAYERS["head_dim"], len(context)
        both = np.concatenate((context, x))
        q = (x @ self._of(f"{layer}.self_attn.q_proj").T).reshape(len(x), -1, dim)
        k, v = ((both @ self._of(f"{layer}.self_attn.{name}_proj").T).reshape(len(both), -1, dim) for name in "kv")
        q = _rotated(self._norm(q, f"{layer}.self_attn.q_norm"), first=known)
        k = _rotated(self._norm(k, f"{layer}.self_attn.k_norm"), first=0)
        out = np.empty_like(q)
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = q[:, head] @ k[:, group].T * dim**-0.5
            if self.is_causal:
                scores[np.triu(np.ones(scores.shape, bool), known + 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, group]
        return out.reshape(len(x), -1) @ self._of(f"{layer}.self_attn.o_proj").T


def _rotated(x: NDArray[Any], *, first: int) -> NDArray[Any]:
    frequencies = LAYERS["rope_theta"] ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = np.outer(first + np.arange(len(x)), frequencies)[:, None]
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate(
        (low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)), -1
    )


def save_random_weights(folder: Path, specs: dict[str, TensorSpec], **given: NDArray[Any]) -> None:
    """In float32; `given` by the names' last parts before `.weight`, or whole."""
    tensors: dict[str, NDArray[Any]] = {**spread_tensors(specs), **given}
    save_file(tensors, folder / "model.safetensors")


def recorded(factory: Any, folder: Path, *, max_drafts: int) -> DraftLog:
    named = {"drafter_options": {"model": str(folder)}}
    return record_drafts(Qwen3Definition(), MODEL, factory, vocab_size=257, max_drafts=max_drafts, **named)


def models_embedding() -> NDArray[Any]:
    with Checkpoint.open(MODEL) as checkpoint:
        return CpuOps().upload_weight(checkpoint.read("model.embed_tokens.weight"))


def wrong_drafts(
    log: DraftLog, drafter: Blocks64, *, limit: int = 1000, ids_of_head: NDArray[Any] | None = None
) -> int:
    """Contexts of which a draft is not the formula's; near ties are right either way.

    Args:
        log: of the drafter.
        drafter: the formula.
        limit: of contexts.
        ids_of_head: token id of the model -> id of the head, -1 where it has none; None: the same.
    """
    wrong = 0
    for context in log.contexts[:limit]:
        ids = list(context.token_ids)
        taps = np.stack([np.concatenate(log.taps[tuple(ids[: n + 1])]) for n in range(len(ids) - 1)])
        own = context.drafts if ids_of_head is None else ids_of_head[context.drafts].tolist()
        assert min(own) >= 0
        logits = drafter.logits(ids, taps, context.drafts)
        wrong += not all(
            agreeing_logits(each, draft, tolerance=TOLERANCE) for each, draft in zip(logits, own, strict=True)
        )
    return wrong
