"""The operator contract: what a model and the sampler may ask of a device.

`Ops` is one `Protocol`. `openinfer_kernels.cpu.CpuOps` (NumPy) and a CUDA module implement it with the same
names, and one parametrised test compares them. A model receives `ops` and never asks which one it is.

Letters used for shapes: `T` tokens of this step over all rows, `R` rows (sequences) of this step, `h` hidden
size, `H`/`K` query/KV heads on this rank, `D` head dimension, `F` MLP width on this rank, `V` vocabulary
rows, `B` tokens per KV block. `x @ W.T` always means a weight stored `[out, in]`, as checkpoints publish it.

Compute dtype: float32 on the CPU (BF16 weights are widened when they are uploaded); BF16 storage with float32
accumulation on a GPU. Integer arrays are int32 unless said otherwise.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.weights import WeightPart

Array: TypeAlias = NDArray[Any]
"""An array of the device the operators run on: `numpy.ndarray`, or `cupy.ndarray`, which has the same face."""

HostArray: TypeAlias = NDArray[Any]
"""An array in host memory, whatever the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Where the tokens of one step stand. A chunk of a prompt and a decode row are the same kind of row.

    The tokens of row `r` are `query_starts[r] : query_starts[r + 1]`, at least one, with consecutive
    positions; the last one has position `context_lens[r] - 1`. No row's context holds a token that another row of
    this step appends. Arrays are on the device; the plain integers are known to the host.
    """

    positions: Array
    """`[T]` position of each token in its sequence, from 0."""
    query_starts: Array
    """`[R + 1]` first token of each row, then T."""
    context_lens: Array
    """`[R]` tokens in the cache of each row once this step's have been appended."""
    block_tables: Array
    """`[R, max_blocks]` KV block of each B tokens of the row's context; unused entries are any block's id.

    What a cache holds beyond a row's context (in blocks it does not use, or behind the last token of its last block)
    may be anything, NaN included, and never changes a result.
    """
    cache_slots: Array
    """`[T]` int64, block id * B + offset: where each token's K and V are written; below 0, for padding, nowhere."""
    max_query_tokens: int
    """Largest number of tokens in one row."""
    max_context_tokens: int
    """Largest entry of `context_lens`."""
    state_slots: Array | None = None
    """`[R]` slot of each row's recurrent states; None for a model that has none.

    What a slot holds when a row begins at position 0 may be anything, NaN included, and never changes a result.
    """
    states: Mapping[str, Array] = field(default_factory=dict[str, Array])
    """Name -> `[slots, layers, *shape]`: all recurrent states of this rank; operators change those of their rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Additive changes of single logits, for the rows that have any; `-inf` forbids a token."""

    rows: Array
    """`[b]` rows of the logits, each once; -1 names none."""
    counts: Array
    """`[b]` changes of each row, from the front of the next two."""
    token_ids: Array
    """`[b, n]`, of one row each once."""
    values: Array
    """`[b, n]` float32, finite or `-inf`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties for the rows that ask for any; other rows are not named."""

    rows: Array
    """`[p]` rows of the logits, each once; -1 names none."""
    presence: Array
    """`[p]` float32, subtracted once from every token that occurs in the output."""
    frequency: Array
    """`[p]` float32, subtracted once per occurrence in the output."""
    repetition: Array
    """`[p]` float32 > 0: positive logits of tokens seen in prompt or output are divided by it, others multiplied."""
    output_counts: Array
    """`[p, V]` occurrences of each token in the output so far."""
    prompt_seen: Array
    """`[p, V]` bool, whether a token occurs in the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMask:
    """Which tokens a grammar allows, for the rows that have one."""

    rows: Array
    """`[m]` rows of the logits, each once; -1 names none."""
    bits: Array
    """`[m, ceil(V / 32)]` uint32; bit `i % 32` of word `i // 32` set: token i may be sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """How each row of a `[R, V]` logits array is sampled; all arrays `[R]` unless said otherwise.

    The order is: repetition, frequency and presence penalties; bias; token mask; division by the temperature;
    min-p; top-k; top-p over what top-k left, renormalised; one draw. Ids from `num_token_ids` on are padding
    of the embedding and never sampled. Rows with temperature 0 take the largest logit (the lowest id among
    equals) after penalties, bias and mask.

    Among equal logits top-k and top-p keep the lower ids first, so that top-k 1 is the greedy choice and
    exactly k tokens are kept. Top-p keeps the fewest of the likeliest tokens whose probabilities sum to at
    least `top_p`.

    A row has no answer where its largest logit after penalties, bias and mask is not finite: every token is
    forbidden, or a NaN came out of the model. Its token is -1, the other rows are sampled as ever, and the
    engine fails that request alone.

    The draw of a row depends on its seed and position only, never on the batch: the uniform number in [0, 1)
    is made from the first word of Philox-4x32-10 (Salmon et al., SC 2011), `word * 2**-32`, with the seed as
    key and the position as counter (low words first, the upper two counter words 0), and the token is found
    by inverting the cumulative distribution in order of token id.
    """

    num_token_ids: int
    temperature: Array
    """float32, >= 0."""
    top_k: Array
    """0 keeps all."""
    top_p: Array
    """float32 in (0, 1]; 1 keeps all."""
    min_p: Array
    """float32 in [0, 1]; 0 keeps all. Drops tokens less likely than `min_p` times the likeliest."""
    seeds: Array
    """uint64."""
    positions: Array
    """int64, the position in its sequence that the sampled token will have."""
    bias: Bias | None = None
    penalties: Penalties | None = None
    token_mask: TokenMask | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log-probabilities of chosen tokens under the unmodified logits (natural logarithm).

    A chosen id of -1 (a row that `Ops.sample` had no answer for) gives NaN and rank 0.
    """

    chosen: Array
    """`[R]` float32 of the chosen ids."""
    ranks: Array
    """`[R]` 1 + the number of tokens with a strictly larger logit, over the whole vocabulary: the true rank."""
    top_ids: Array
    """`[R, top]` the likeliest tokens, best first, equal ones by lower id."""
    top: Array
    """`[R, top]` float32, of `top_ids`."""


class Ops(Protocol):
    """The operators of one device. Inputs are checked by the caller once per shape, not per call.

    Every method returns new arrays unless its docstring says what it mutates.
    """

    @property
    def name(self) -> str:
        """`cpu` or `cuda`: for `openinfer plan` and messages, never for a branch in a model."""
        ...

    # --- memory -----------------------------------------------------------------------------------------

    def upload(self, host: HostArray) -> Array:
        """Copies a host array to the device, dtype unchanged."""
        ...

    def upload_weight(self, *parts: WeightPart) -> Array:
        """Brings a weight to the device in the compute dtype.

        Args:
            parts: one or more, which lie below each other in the result: rows of the same shape. Arrays are float32,
                float16, or uint16 holding BF16 bit patterns, of any strides; a `RandomWeight` is computed there.

        Raises:
            WeightDtypeError: an array of any other dtype.
            ValueError: the parts' rows differ in shape.
        """
        ...

    def loading(self, progress: Callable[[int], None] = ...) -> AbstractContextManager[None]:
        """Within it `upload_weight` may return before its array is filled; leaving it waits for all of them.

        Until then the arrays handed over must not change, and those returned must not be read.

        Args:
            progress: called with the bytes that have come since the last call, from any thread; not by an
                implementation that copies at once.
        """
        ...

    def download(self, array: Array) -> HostArray:
        """Copies to the host and waits for it."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type[Any] | None = None) -> Array:
        """A zeroed device array; `dtype` None is the compute dtype."""
        ...

    # --- dense ------------------------------------------------------------------------------------------

    def embedding(self, token_ids: Array, table: Array) -> Array:
        """Rows of `table [V, h]`, of the compute dtype or float32, for `token_ids [T]`: `[T, h]`."""
        ...

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """`x [T, in] @ weight [out, in].T (+ bias [out])`: `[T, out]`."""
        ...

    def logits(self, hidden: Array, head: Array) -> Array:
        """`hidden [T, h] @ head [V, h].T`: `[T, V]`, float32 whatever the compute dtype, the sums unrounded.

        Rounding them to BF16 would move a logit of 30 by up to 0.06, and make equals of the likeliest tokens.
        """
        ...

    def linear_swiglu(self, x: Array, gate_up: Array) -> Array:
        """`silu(x @ gate.T) * (x @ up.T)`: `[T, F]`, with `gate_up [2 F, h]` = gate rows, then up rows.

        SwiGLU: Shazeer 2020, "GLU Variants Improve Transformer", eq. 6 without the outer projection.
        """
        ...

    # --- norms ------------------------------------------------------------------------------------------

    def rms_norm(self, x: Array, weight: Array, *, eps: float) -> Array:
        """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, statistics in float32.

        The normalised vector is rounded to the input dtype before the multiplication, as the reference does.
        Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
        """
        ...

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
        """Adds `x [T, h]` into `residual [T, h]` in place and returns `rms_norm(residual)`."""
        ...

    def zero_centred_rms_norm(self, x: Array, weight: Array, *, eps: float) -> Array:
        """`(1 + weight) * x / sqrt(mean(x^2) + eps)` over the last axis, all in float32, rounded once at the end.

        Gemma's convention: a weight of zeros changes nothing. Reference: `Qwen3_5RMSNorm` of transformers.
        """
        ...

    def add_zero_centred_rms_norm(self, x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
        """Adds `x [T, h]` into `residual [T, h]` in place and returns `zero_centred_rms_norm(residual)`."""
        ...

    def gated_rms_norm(self, x: Array, gate: Array, weight: Array, *, eps: float) -> Array:
        """`rms_norm` of each head, times `silu(gate)`, which is computed in float32: `[T, heads n]`.

        Args:
            x: `[T, heads n]`; statistics are over each head's `n` values.
            gate: `[T, heads n]`.
            weight: `[n]` of the compute dtype or float32, shared by all heads; not zero-centred.
            eps: added to the mean.
        """
        ...

    # --- attention --------------------------------------------------------------------------------------

    def qk_norm_rope_append(
        self,
        qkv: Array,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        kv_cache: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> Array:
        """Per-head RMSNorm of Q and K, then RoPE in half layout, then K and V into the cache.

        Args:
            qkv: `[T, (H + 2 K) D]`, query heads, then key heads, then value heads.
            q_norm: `[D]`, shared by all query heads.
            k_norm: `[D]`, shared by all key heads.
            eps: of both norms.
            rope: `[2, positions, D / 2]` float32, cosines then sines (`rope_table`).
            kv_cache: `[blocks, layers, 2, K, B, D]`, mutated: the entries that `batch.cache_slots` name in this layer.
            layer: index into the layer axis.
            batch: positions and cache slots of the tokens.

        Returns:
            `[T, H, D]` queries after norm and rope. Pairs are `(i, i + D/2)`: Su et al. 2021, eq. 34, in the
            half layout of GPT-NeoX.
        """
        ...

    def paged_attention(self, q: Array, kv_cache: Array, *, layer: int, batch: AttentionBatch, scale: float) -> Array:
        """Causal attention of each row's tokens over its paged context, softmax in float32.

        Query head `j` reads KV head `j // (H / K)`. A token at position p sees positions 0..p.

        Args:
            q: `[T, H, D]`.
            kv_cache: `[blocks, layers, 2, K, B, D]`, this step's tokens already appended.
            layer: index into the layer axis.
            batch: rows of any length.
            scale: multiplies the scores, usually `D ** -0.5`.

        Returns:
            `[T, H * D]`.
        """
        ...

    def gated_qk_norm_rope_append(
        self,
        projected: Array,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        kv_cache: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> Array:
        """Zero-centred RMSNorm of Q and K per head, then RoPE of their first dimensions, then K and V into the cache.

        Args:
            projected: `[T, (2 H + 2 K) D]`: per query head `D` query values, then `D` gate values, which are left to
                `output_gate`; behind them key heads, then value heads.
            q_norm: `[D]`, shared by all query heads.
            k_norm: `[D]`, shared by all key heads.
            eps: of both norms.
            rope: `[2, positions, r / 2]` float32, cosines then sines; the first `r <= D` dimensions are rotated, in
                pairs `(i, i + r/2)`, and the others left as they are.
            kv_cache: `[blocks, layers, 2, K, B, D]`, mutated: the entries that `batch.cache_slots` name in this layer.
            layer: index into the layer axis.
            batch: positions and cache slots of the tokens.

        Returns:
            `[T, H, D]` queries after norm and rope. Partial rotation: Black et al. 2022, "GPT-NeoX-20B", section 2.1.
        """
        ...

    def output_gate(self, attended: Array, projected: Array, *, head_dim: int) -> Array:
        """`attended * sigmoid(gate)`: `[T, H D]`.

        Qiu et al. 2025, "Gated Attention for Large Language Models", section 2.2: a gate per element, after attention.

        Args:
            attended: `[T, H D]`, of `paged_attention`.
            projected: `[T, (2 H + 2 K) D]`, as `gated_qk_norm_rope_append` takes it.
            head_dim: `D`.
        """
        ...

    # --- linear attention -------------------------------------------------------------------------------

    def causal_conv_silu(self, x: Array, weight: Array, *, state: Array, layer: int, batch: AttentionBatch) -> Array:
        """Depthwise convolution over the tokens of each row, then `silu`: `[T, C]`.

        `y_t[c] = silu(sum_j weight[c, j] * x_{t - W + 1 + j}[c])`; what lies before a sequence's first token is zero.

        Args:
            x: `[T, C]`.
            weight: `[C, W]`, the last tap for the token itself.
            state: `[slots, layers, C, W - 1]`, the last inputs of each sequence, oldest first; mutated: those of
                `batch.state_slots` in this layer.
            layer: index into the layer axis.
            batch: rows of any length.
        """
        ...

    def gated_delta_rule(
        self,
        qkv: Array,
        gates: Array,
        *,
        a_log: Array,
        dt_bias: Array,
        state: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> Array:
        """Linear attention with decay and delta rule, in float32 throughout: `[T, N dv]`.

        Per value head: `S <- e^g S`, `S <- S + k (beta (v - S^T k))^T`, `o = S^T q`, with `beta = sigmoid(b)` and
        `g = -exp(a_log) softplus(a + dt_bias)`. `q` and `k` are divided by `sqrt(sum of squares + 1e-6)`, then `q` by
        `sqrt(dk)`. Value head `j` reads key head `j // (N / Hk)`. Yang et al. 2024, "Gated Delta Networks", eq. 10.

        Args:
            qkv: `[T, 2 Hk dk + N dv]`, query heads, then key heads, then value heads.
            gates: `[T, 2 N]`, `b` of each value head, then `a`.
            a_log: `[N]` float32.
            dt_bias: `[N]`, of the compute dtype or float32.
            state: `[slots, layers, N, dk, dv]` float32, `S` of each sequence; mutated: those of `batch.state_slots` in
                this layer.
            layer: index into the layer axis.
            batch: rows of any length.
        """
        ...

    # --- sampling ---------------------------------------------------------------------------------------

    def sample(self, logits: Array, sampling: SamplingBatch) -> Array:
        """One token per row of `logits [R, V]` (not mutated): `[R]` int32, -1 where a row has no finite maximum.

        See `SamplingBatch` for the rules.
        """
        ...

    def logprobs(self, logits: Array, token_ids: Array, *, top: int) -> Logprobs:
        """Log-probabilities and true ranks of `token_ids [R]` and of the `top <= 1024` likeliest tokens per row."""
        ...
