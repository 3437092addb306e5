"""`KvSpec`: what one rank of a model asks of memory.

    KvSpec
    ├── paged: PagedGroup …    grows with the tokens; lives in blocks, sealed in place, shared between sequences
    │   └── PagedTensor …      per token and layer `[num_heads, head_dim]`
    └── slots: StateSlotGroup …     fixed size per sequence, rewritten in place; copied to be kept
        └── StateTensor …       per layer `shape`

All layers of a group hold the same tensors; a model whose layers differ has one group per kind of layer.
"""

import math
from enum import StrEnum

import msgspec

from openinfer_kv_cache.checks import MAX_LAYERS, check_count, check_distinct, check_name, check_tag
from openinfer_kv_cache.errors import KvConfigError


class KvDtype(StrEnum):
    """Element types of stored KV and state."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"
    UINT8 = "uint8"

    @property
    def itemsize_bytes(self) -> int:
        return _ITEMSIZE_BYTES[self]


_ITEMSIZE_BYTES = {
    KvDtype.FLOAT32: 4,
    KvDtype.FLOAT16: 2,
    KvDtype.BFLOAT16: 2,
    KvDtype.FLOAT8_E4M3: 1,
    KvDtype.FLOAT8_E5M2: 1,
    KvDtype.INT8: 1,
    KvDtype.UINT8: 1,
}


class PagedTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a paged group; a block holds it as `[num_heads, rows, head_dim]` per layer.

    `rows` is `ceil(block_size_tokens / tokens_per_row)`: a block has room for the rows that end at one of its tokens.

    Raises:
        KvConfigError: a field is out of range.
    """

    name: str
    num_heads: int
    """Heads of this rank; 1 for a latent that all heads share."""
    head_dim: int
    dtype: KvDtype
    tokens_per_row: int = 1
    """More where one row stands for several tokens: compressed entries."""

    def __post_init__(self) -> None:
        check_name("a tensor's name", self.name)
        check_count(f"num_heads of tensor {self.name!r}", self.num_heads)
        check_count(f"head_dim of tensor {self.name!r}", self.head_dim)
        check_count(f"tokens_per_row of tensor {self.name!r}", self.tokens_per_row)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one layer; a fraction where a row stands for several tokens."""
        row_bytes = self.num_heads * self.head_dim * self.dtype.itemsize_bytes
        return row_bytes if self.tokens_per_row == 1 else row_bytes / self.tokens_per_row


class PagedGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers whose KV grows with the tokens.

    Raises:
        KvConfigError: a field is out of range.
    """

    name: str
    num_layers: int
    tensors: tuple[PagedTensor, ...]
    rope_tag: str = "none"
    """What was done to the keys before they were stored, e.g. `half:theta=1000000:dim=128`."""
    quantization_tag: str = "none"
    """How the numbers stand for values, where the dtype does not say it, e.g. `fp8:scale=per-tensor`."""
    window_tokens: int | None = None
    """How many tokens a token of these layers sees, its own among them; None: all. KV before that is given back."""

    def __post_init__(self) -> None:
        _check_group(self)
        if self.window_tokens is not None:
            check_count(f"window_tokens of group {self.name!r}", self.window_tokens)

    @property
    def bytes_per_token(self) -> float:
        return self.num_layers * sum(tensor.bytes_per_token for tensor in self.tensors)


FP8_KV_TAG = "e4m3:per-token-head:f32"
"""`PagedGroup.quantization_tag` of keys and values in FP8, as `attention_group` lays them out."""
FP8_SCALE_BYTES = 4
"""Of the float32 scale that each token of a head has there."""


def attention_group(
    *,
    name: str,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    dtype: KvDtype,
    rope_tag: str,
    window_tokens: int | None = None,
) -> PagedGroup:
    """The layers of full attention: tensors `k` and `v` of `[num_heads, head_dim]` per token and layer.

    With `FLOAT8_E4M3` they are bytes, `head_dim + 4` of a token and head: in a block a head's codes
    `[block_size_tokens, head_dim]` come first and then its scales, float32 `[block_size_tokens]`, one for each token.
    A value is code times scale. Codes and scales of a head are one range of bytes, so that one copy brings both, and
    nothing that moves blocks can bring one without the other. `quantization_tag` says all this in the layout's digest.

    Raises:
        KvConfigError: a field is out of range.
    """
    is_fp8 = dtype is KvDtype.FLOAT8_E4M3
    width, stored = (head_dim + FP8_SCALE_BYTES, KvDtype.UINT8) if is_fp8 else (head_dim, dtype)
    return PagedGroup(
        name=name,
        num_layers=num_layers,
        tensors=tuple(PagedTensor(name=each, num_heads=num_heads, head_dim=width, dtype=stored) for each in "kv"),
        rope_tag=rope_tag,
        quantization_tag=FP8_KV_TAG if is_fp8 else "none",
        window_tokens=window_tokens,
    )


class StateTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a group of state slots.

    Raises:
        KvConfigError: a field is out of range.
    """

    name: str
    shape: tuple[int, ...]
    dtype: KvDtype

    def __post_init__(self) -> None:
        check_name("a tensor's name", self.name)
        if not self.shape:
            raise KvConfigError(f"shape of tensor {self.name!r} is (); it needs at least one dimension")
        for size in self.shape:
            check_count(f"a dimension of tensor {self.name!r}", size)

    @property
    def bytes_per_slot(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize_bytes


class StateSlotGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers with a state of fixed size per sequence: recurrent state, convolution inputs, a sliding window.

    Raises:
        KvConfigError: a field is out of range.
    """

    name: str
    num_layers: int
    tensors: tuple[StateTensor, ...]
    rope_tag: str = "none"
    quantization_tag: str = "none"

    def __post_init__(self) -> None:
        _check_group(self)

    @property
    def bytes_per_slot(self) -> int:
        return self.num_layers * sum(tensor.bytes_per_slot for tensor in self.tensors)


class KvSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that one rank keeps between steps.

    Raises:
        KvConfigError: a field is out of range.
    """

    model_tag: str
    """Names the weights that compute the KV, so that no store ever mixes two checkpoints of one shape: best a
    fingerprint of the checkpoint."""
    paged: tuple[PagedGroup, ...]
    slots: tuple[StateSlotGroup, ...] = ()
    num_ranks: int = 1
    rank_index: int = 0
    """Which share of the heads this is."""

    def __post_init__(self) -> None:
        check_tag("model_tag", self.model_tag)
        if not self.paged:
            raise KvConfigError("the spec has no paged group; it needs at least one")
        check_distinct("the spec", (group.name for group in (*self.paged, *self.slots)))
        check_ranks(self.num_ranks, self.rank_index)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of all paged groups, without padding."""
        return sum(group.bytes_per_token for group in self.paged)

    @property
    def bytes_per_slot(self) -> int:
        return sum(group.bytes_per_slot for group in self.slots)

    def without_windows(self) -> "KvSpec":
        """The same KV, all of it kept: what is laid out for one block table."""
        groups = tuple(msgspec.structs.replace(group, window_tokens=None) for group in self.paged)
        return msgspec.structs.replace(self, paged=groups)


def check_ranks(num_ranks: int, rank_index: int) -> None:
    check_count("num_ranks", num_ranks)
    if not 0 <= rank_index < num_ranks:
        raise KvConfigError(f"rank_index is {rank_index}; with num_ranks {num_ranks} it must be 0 .. {num_ranks - 1}")


def _check_group(group: PagedGroup | StateSlotGroup) -> None:
    check_name("a group's name", group.name)
    where = f"of group {group.name!r}"
    check_count(f"num_layers {where}", group.num_layers, most=MAX_LAYERS)
    check_tag(f"rope_tag {where}", group.rope_tag)
    check_tag(f"quantization_tag {where}", group.quantization_tag)
    if not group.tensors:
        raise KvConfigError(f"group {group.name!r} has no tensors; it needs at least one")
    check_distinct(f"group {group.name!r}", (tensor.name for tensor in group.tensors))
