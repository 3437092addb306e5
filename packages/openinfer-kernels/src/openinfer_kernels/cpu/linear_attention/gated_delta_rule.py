"""The gated delta rule: a linear attention whose state forgets, and corrects what it holds for a key.

    S_t = e^{g_t} S_{t-1} + k_t d_t^T     d_t = beta_t (v_t - (e^{g_t} S_{t-1})^T k_t)     o_t = S_t^T q_t

Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", eq. 10; the chunked form is their section 3.3, with the
inverse of its triangular matrix applied by forward substitution. Decays are handled as logarithms, and an exponent
above the diagonal, where it would overflow, is never taken.

Shapes below: `N` value heads, `S [N, dk, dv]`, `C` tokens of a chunk.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.linear_attention.state_rows import batch_slots, long_rows, read_states, single_rows
from openinfer_kernels.ops import AttentionBatch, KeptInputs

CHUNK_TOKENS = 64
_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What the rule reads, per token and value head; keys and queries are of length 1 and `dk ** -0.5`."""

    q: NDArray[Any]
    """`[T, N, dk]`"""
    k: NDArray[Any]
    """`[T, N, dk]`"""
    v: NDArray[Any]
    """`[T, N, dv]`"""
    beta: NDArray[Any]
    """`[T, N]` in (0, 1)"""
    log_decay: NDArray[Any]
    """`[T, N]`, at most 0"""

    def at(self, tokens: NDArray[Any] | slice) -> "_Inputs":
        return _Inputs(self.q[tokens], self.k[tokens], self.v[tokens], self.beta[tokens], self.log_decay[tokens])


@np.errstate(over="ignore", invalid="ignore")
def gated_delta_rule(
    qkv: NDArray[Any],
    gates: NDArray[Any],
    *,
    a_log: NDArray[Any],
    dt_bias: NDArray[Any],
    state: NDArray[Any],
    layer: int,
    batch: AttentionBatch,
    chunk_tokens: int = CHUNK_TOKENS,
) -> NDArray[Any]:
    """Rows of several tokens take the chunked form; with `chunk_tokens` 1 every token takes the recurrent one."""
    inputs = _inputs(qkv, gates, a_log, dt_bias, state)
    out = np.empty_like(inputs.v)
    slots = batch_slots(batch)
    single = single_rows(batch)
    if len(single.rows):
        states = read_states(state, layer, slots[single.rows], single.begins)
        out[single.first_tokens] = _step(inputs.at(single.first_tokens), states)
        state[slots[single.rows], layer] = states
    for row, tokens, begins in long_rows(batch):
        states = read_states(state, layer, slots[[row]], np.array([begins]))
        # The state goes from chunk to chunk, so chunks of a row are computed in order.
        for first in range(tokens.start, tokens.stop, chunk_tokens):
            piece = slice(first, min(first + chunk_tokens, tokens.stop))
            some = inputs.at(piece)
            out[piece] = _step(some, states) if chunk_tokens == 1 else _chunk(some, states[0])
        if batch.kept is not None and batch.kept_rows is not None and batch.kept_rows[row]:
            _keep(batch.kept, inputs.at(tokens), qkv[tokens], slot=int(slots[row]), layer=layer)
        else:
            state[slots[row], layer] = states[0]
    return out.reshape(len(qkv), -1)


def _keep(kept: KeptInputs, inputs: _Inputs, qkv: NDArray[Any], *, slot: int, layer: int) -> None:
    count = len(qkv)
    kept.keys_values[slot, layer, :count] = qkv[:, -kept.keys_values.shape[3] :]
    kept.gates[slot, layer, :count, :, 0], kept.gates[slot, layer, :count, :, 1] = inputs.log_decay, inputs.beta


def replay_rules(kept: KeptInputs, state: NDArray[Any], slots: NDArray[Any], counts: NDArray[Any]) -> None:
    """Has `state [slots, layers, N, dk, dv]` take in the first tokens that were kept of some slots."""
    num_heads, key_dim, value_dim = state.shape[2:]
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        for token in range(count):
            keys_values, gates = kept.keys_values[slot, :, token], kept.gates[slot, :, token]
            keys = keys_values.shape[1] - num_heads * value_dim
            k = _unit(keys_values[:, :keys], key_dim)
            k = np.repeat(k, num_heads // k.shape[1], axis=1)
            v = keys_values[:, keys:].reshape(-1, num_heads, value_dim)
            _step(_Inputs(q=k, k=k, v=v, beta=gates[..., 1], log_decay=gates[..., 0]), state[slot])


def _inputs(
    qkv: NDArray[Any], gates: NDArray[Any], a_log: NDArray[Any], dt_bias: NDArray[Any], state: NDArray[Any]
) -> _Inputs:
    num_heads, key_dim, value_dim = state.shape[2:]
    values = num_heads * value_dim
    keys = (qkv.shape[1] - values) // 2
    q, k, v = np.split(qkv, [keys, 2 * keys], axis=1)
    repeats = num_heads * key_dim // keys
    b, a = gates[:, :num_heads], gates[:, num_heads:]
    return _Inputs(
        q=np.repeat(_unit(q, key_dim) * np.float32(key_dim**-0.5), repeats, axis=1),
        k=np.repeat(_unit(k, key_dim), repeats, axis=1),
        v=v.reshape(len(v), num_heads, value_dim),
        beta=1.0 / (1.0 + np.exp(-b)),
        # `logaddexp(0, x)` is softplus without its overflow.
        log_decay=-np.exp(a_log) * np.logaddexp(np.float32(0.0), a + dt_bias),
    )


def _unit(x: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Heads of `x [T, heads head_dim]` over their lengths: `[T, heads, head_dim]`."""
    heads = x.reshape(len(x), -1, head_dim)
    return heads / np.sqrt(np.vecdot(heads, heads)[..., None] + np.float32(_L2_EPS))


def _step(inputs: _Inputs, states: NDArray[Any]) -> NDArray[Any]:
    """One token of each of `n` sequences: `[n, N, dv]`; `states [n, N, dk, dv]` are mutated."""
    states *= np.exp(inputs.log_decay)[..., None, None]
    held = (inputs.k[..., None, :] @ states)[..., 0, :]
    correction = inputs.beta[..., None] * (inputs.v - held)
    states += inputs.k[..., :, None] * correction[..., None, :]
    return (inputs.q[..., None, :] @ states)[..., 0, :]


def _chunk(inputs: _Inputs, state: NDArray[Any]) -> NDArray[Any]:
    """`C` tokens of one sequence: `[C, N, dv]`; `state [N, dk, dv]` is mutated."""
    q, k, v = (x.swapaxes(0, 1) for x in (inputs.q, inputs.k, inputs.v))  # [N, C, dim]
    beta = inputs.beta.T[..., None]  # [N, C, 1]
    total = np.cumsum(inputs.log_decay.T, axis=1)  # [N, C], the logarithm of the decay since the chunk began
    since_begin = np.exp(total)[..., None]
    between = _decay_between(total)
    overlaps = beta * (k @ k.swapaxes(1, 2)) * between
    corrections = _substitute(overlaps, beta * (v - since_begin * (k @ state)))
    out = since_begin * (q @ state) + ((q @ k.swapaxes(1, 2)) * between) @ corrections
    until_end = np.exp(total[:, -1:] - total)[..., None]
    state *= np.exp(total[:, -1])[:, None, None]
    state += (k * until_end).swapaxes(1, 2) @ corrections
    return out.swapaxes(0, 1)


def _decay_between(total: NDArray[Any]) -> NDArray[Any]:
    """`[N, C, C]`: `e^{total_i - total_j}` where `j <= i`, else 0."""
    earlier = np.tri(total.shape[1], dtype=np.bool_)
    # Masked before `exp`: later pairs have positive exponents, which may overflow.
    exponents = np.where(earlier, total[:, :, None] - total[:, None, :], -np.inf)
    return np.exp(exponents).astype(total.dtype, copy=False)


def _substitute(overlaps: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    """The `X [N, C, dv]` with `X + strict_lower(overlaps) X = right`; `right` is overwritten with it.

    Not a library's solver: that would refuse the whole step if one sequence held a NaN.
    """
    for token in range(1, right.shape[1]):
        right[:, token] -= (overlaps[:, token, None, :token] @ right[:, :token])[:, 0]
    return right
