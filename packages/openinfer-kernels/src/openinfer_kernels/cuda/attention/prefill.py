"""Attention of the rows of a step that have several query tokens: prompts and chunks of prompts."""

import ctypes

from openinfer_kernels.cuda.attention.layer_cache import FP8_SUFFIX, LayerCache, layer_cache
from openinfer_kernels.cuda.attention.variant import Variant, stem_of_variants
from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.ops import Array, AttentionBatch, PagedCache

_STEM = "attention_prefill"
_WARPS_AND_KEYS = {32: (8, 64), 64: (8, 64), 128: (8, 64), 256: (4, 32)}
"""By head dimension: warps of a block, each with 16 query rows (pairs of token and query head), and keys of a tile."""
_QUERY_ROWS_OF_WARP = 16
_SCRATCH_BYTES = 64


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("cache", LayerCache),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_starts", "context_lens")),
        *((name, ctypes.c_int) for name in ("num_rows", "table_stride", "group", "least_tokens")),
        ("scale", ctypes.c_float),
    )


class _VariantArguments(ctypes.Structure):
    _fields_ = (("variant", Variant), ("others", _Arguments))


class AttentionPrefill:
    """The prefill kernels of one device, for any GPU."""

    def __init__(
        self, device: Device, *, least_tokens: int = 2, for_variants: bool = False, for_fp8: bool = False
    ) -> None:
        """Rows of a step with fewer query tokens than `least_tokens` are left alone.

        Args:
            device: whose kernels.
            least_tokens: see above.
            for_variants: the kernels of attention with a window, a soft cap or sinks.
            for_fp8: those that read a cache in FP8.
        """
        self._least_tokens = least_tokens
        stem = stem_of_variants(_STEM) if for_variants else _STEM + FP8_SUFFIX * for_fp8
        self._kernels = {
            head_dim: device.kernel(
                stem,
                f"{stem}_{head_dim}",
                shared_bytes=2 * head_dim * (warps * _QUERY_ROWS_OF_WARP + 4 * keys) + _SCRATCH_BYTES,
            )
            for head_dim, (warps, keys) in _WARPS_AND_KEYS.items()
        }

    def launch(
        self,
        q: Array,
        cache: PagedCache,
        out: Array,
        *,
        batch: AttentionBatch,
        scale: float,
        variant: Variant | None = None,
    ) -> None:
        """`scale` is of powers of two."""
        num_rows, num_kv_heads, head_dim = len(batch.context_lens), cache.data.shape[3], cache.data.shape[5]
        group = q.shape[1] // num_kv_heads
        warps = _WARPS_AND_KEYS[head_dim][0]
        arguments = _Arguments(
            address(q),
            address(out),
            layer_cache(cache),
            *map(address, (batch.block_tables[cache.table], batch.query_starts, batch.context_lens)),
            num_rows,
            batch.block_tables[cache.table].shape[1],
            group,
            self._least_tokens,
            scale,
        )
        blocks = most_tiles(len(q), num_rows, group, query_rows=warps * _QUERY_ROWS_OF_WARP) * num_kv_heads
        given = arguments if variant is None else _VariantArguments(variant, arguments)
        self._kernels[head_dim]((blocks, 1, 1), (warps * 32, 1, 1), [given], overlap=True)


def most_tiles(num_tokens: int, num_rows: int, group: int, *, query_rows: int) -> int:
    """Tiles of `query_rows` pairs of token and query head that any division of the tokens into rows can need."""
    return num_tokens * group // query_rows + min(num_rows, num_tokens)
