"""The block that drafts tokens, against its published equations written out per token in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from openinfer_core import read_config
from openinfer_deepseek_v4.config import DeepseekV4Config
from openinfer_deepseek_v4.family import DeepseekV4Definition
from openinfer_deepseek_v4.mtp import load_mtp, window_group
from openinfer_deepseek_v4.weights import mtp_tensors
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.model import Shard
from openinfer_engine.weights.checkpoint import shard_for_rank
from openinfer_kernels import AttentionBatch
from openinfer_kernels.cpu import CpuOps
from openinfer_kv_cache import KvDtype

NUM_TOKENS = 30
definition = DeepseekV4Definition()

Arrays = dict[str, NDArray[Any]]


class RandomWeights:
    """A `WeightSource` of given arrays."""

    def __init__(self, arrays: Arrays, *, rank: int, size: int) -> None:
        self._arrays, self._rank, self._size = arrays, rank, size

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> NDArray[Any]:
        return shard_for_rank(self._arrays[name], name, shard, rank=self._rank, size=self._size)

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> Any:
        return self.read(name, shard)


@pytest.fixture(scope="module")
def config() -> DeepseekV4Config:
    return definition.parse(read_config(Path(__file__).parent / "fixtures" / "all_kinds"))


@pytest.fixture(scope="module")
def arrays(config: DeepseekV4Config) -> Arrays:
    rng = np.random.default_rng(0)
    made: Arrays = {}
    for name, spec in {**definition.tensors(config), **mtp_tensors(config)}.items():
        if name.endswith("tid2eid"):
            shape = (config.vocab_size, config.num_experts_per_tok)
            made[name] = np.tile(np.arange(shape[1]), (shape[0], 1))
            continue
        assert isinstance(spec, tuple)
        scale = 1.5 / spec[-1] ** 0.5 if len(spec) > 1 else 1.0
        made[name] = (rng.normal(size=spec) * scale).astype(np.float32)
    return made


def rms(x: NDArray[Any], weight: NDArray[Any] | float = 1.0) -> NDArray[Any]:
    return weight * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    return 1 / (1 + np.exp(-x))


def turned(x: NDArray[Any], position: int, sign: float) -> NDArray[Any]:
    """The last 8 dimensions in pairs, theta 10,000."""
    out = x.copy()
    angle = position * 1e4 ** (-2.0 * np.arange(4) / 8)
    pairs = (out[..., -8::2] + 1j * out[..., -7::2]) * np.exp(sign * 1j * angle)
    out[..., -8::2], out[..., -7::2] = pairs.real, pairs.imag
    return out


class Reference:
    """Section (c) of the published description, token by token; `w(NAME)` is a tensor of the block in float64."""

    def __init__(self, config: DeepseekV4Config, arrays: Arrays) -> None:
        self.config, self.arrays = config, arrays
        self.keys: list[NDArray[Any]] = []

    def w(self, name: str) -> NDArray[Any]:
        return self.arrays[f"mtp.0.{name}"].astype(np.float64)

    def step(self, next_id: int, streams: NDArray[Any], position: int) -> NDArray[Any]:
        embedded = self.w("e_proj.weight") @ rms(self.arrays["embed.weight"][next_id], self.w("enorm.weight"))
        x = np.array([embedded + self.w("h_proj.weight") @ rms(each, self.w("hnorm.weight")) for each in streams])
        x = self.sublayer(x, "hc_attn", lambda a: self.attention(rms(a, self.w("attn_norm.weight")), position))
        x = self.sublayer(x, "hc_ffn", lambda a: self.mixture(rms(a, self.w("ffn_norm.weight"))))
        m = self.w("hc_head_fn") @ rms(x.reshape(-1))
        pre = sigmoid(m * self.w("hc_head_scale") + self.w("hc_head_base")) + 1e-6
        hidden = rms(pre @ x, self.w("norm.weight"))
        return self.arrays["head.weight"].astype(np.float64) @ hidden

    def sublayer(self, x: NDArray[Any], name: str, compute: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[Any]:
        m, base, scale = self.w(f"{name}_fn") @ rms(x.reshape(-1)), self.w(f"{name}_base"), self.w(f"{name}_scale")
        pre = sigmoid(m[:4] * scale[0] + base[:4]) + 1e-6
        post = 2 * sigmoid(m[4:8] * scale[1] + base[4:8])
        mixing = np.exp((m[8:] * scale[2] + base[8:]).reshape(4, 4))
        mixing = mixing / mixing.sum(axis=1, keepdims=True) + 1e-6
        mixing /= mixing.sum(axis=0) + 1e-6
        for _ in range(19):
            mixing /= mixing.sum(axis=1, keepdims=True) + 1e-6
            mixing /= mixing.sum(axis=0) + 1e-6
        return np.outer(post, compute(pre @ x)) + mixing.T @ x

    def attention(self, a: NDArray[Any], position: int) -> NDArray[Any]:
        config = self.config
        low = rms(self.w("attn.wq_a.weight") @ a, self.w("attn.q_norm.weight"))
        q = turned(rms((self.w("attn.wq_b.weight") @ low).reshape(-1, config.head_dim)), position, 1.0)
        self.keys.append(turned(rms(self.w("attn.wkv.weight") @ a, self.w("attn.kv_norm.weight")), position, 1.0))
        keys = np.array(self.keys[-config.sliding_window :])
        weights = np.exp(q @ keys.T * config.head_dim**-0.5)
        total = weights.sum(axis=1) + np.exp(self.w("attn.attn_sink"))
        o = turned(weights @ keys / total[:, None], position, -1.0).reshape(config.o_groups, -1)
        first = self.w("attn.wo_a.weight").reshape(config.o_groups, config.o_lora_rank, -1)
        return self.w("attn.wo_b.weight") @ np.einsum("goi,gi->go", first, o).reshape(-1)

    def mixture(self, b: NDArray[Any]) -> NDArray[Any]:
        config = self.config
        scores = np.sqrt(np.log1p(np.exp(self.w("ffn.gate.weight") @ b)))
        chosen = np.argsort(-(scores + self.w("ffn.gate.bias")))[: config.num_experts_per_tok]
        shares = scores[chosen] / (scores[chosen].sum() + 1e-20) * config.routed_scaling_factor
        routed = sum(
            share * self.mlp(f"ffn.experts.{expert}", b) for share, expert in zip(shares, chosen.tolist(), strict=True)
        )
        return routed + self.mlp("ffn.shared_experts", b)

    def mlp(self, name: str, b: NDArray[Any]) -> NDArray[Any]:
        limit = self.config.swiglu_limit
        gate, up = self.w(f"{name}.w1.weight") @ b, self.w(f"{name}.w3.weight") @ b
        gate = np.minimum(gate, limit)
        return self.w(f"{name}.w2.weight") @ (gate * sigmoid(gate) * np.clip(up, -limit, limit))


def batch_of(first: int, end: int, states: Arrays) -> AttentionBatch:
    return AttentionBatch(
        positions=np.arange(first, end, dtype=np.int32),
        query_starts=np.array([0, end - first], np.int32),
        context_lens=np.array([end], np.int32),
        block_tables=(np.zeros((1, 8), np.int32),),
        cache_slots=(np.arange(first, end),),
        max_query_tokens=end - first,
        max_context_tokens=end,
        block_tokens=8,
        state_slots=np.array([1], np.int32),
        states=states,
    )


@pytest.mark.parametrize("ranks", [1, 4])
def test_drafted_logits_are_those_of_the_equations(config: DeepseekV4Config, arrays: Arrays, ranks: int) -> None:
    rng = np.random.default_rng(1)
    streams = rng.normal(size=(NUM_TOKENS, config.hc_mult, config.hidden_size)).astype(np.float32)
    next_ids = rng.integers(0, config.vocab_size, NUM_TOKENS).astype(np.int32)
    group = window_group(config, KvDtype.FLOAT32)

    def work(communicator: Communicator) -> NDArray[Any]:
        weights, ops = RandomWeights(arrays, rank=communicator.rank, size=ranks), CpuOps()
        shared = {"ops": ops, "communicator": communicator}
        model = definition.load(config, weights, **shared, max_model_tokens=64)
        mtp = load_mtp(config, weights, model, **shared)
        states = {f"{group.name}.kv": np.full((3, 1, *group.tensors[0].shape), np.nan, np.float32)}
        pieces: list[NDArray[Any]] = []
        for first, end in ((0, 17), (17, 18), (18, NUM_TOKENS)):
            hidden = mtp.forward(next_ids[first:end], streams[first:end], batch=batch_of(first, end, states))
            pieces.append(model.logits(hidden))
        return np.concatenate(pieces)

    found = LocalGroup(ranks).run(work)[0]
    reference = Reference(config, arrays)
    expected = np.array([reference.step(int(next_ids[p]), streams[p].astype(np.float64), p) for p in range(NUM_TOKENS)])
    assert expected.std() > 0.5
    assert np.abs(found - expected).max() < 1e-3
