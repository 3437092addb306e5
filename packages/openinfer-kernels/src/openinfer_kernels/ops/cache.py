"""`PagedCache`: one layer of the paged KV cache, as cache operators are handed it."""

from dataclasses import dataclass
from enum import StrEnum

from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops.arrays import Array


class CacheFormat(StrEnum):
    """How a cache stores its numbers."""

    COMPUTE = "compute"
    """In the compute dtype, as they were computed."""
    FP8 = "fp8"
    """E4M3 codes, with a float32 scale for each token and head in `PagedCache.scales`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCache:
    """One layer of the paged cache, made once per worker: no step changes where it lies."""

    data: Array
    """`[blocks, layers, 2, K, B, D]`, keys, then values; of latents `[blocks, layers, 1, 1, B, r + dr]`."""
    layer: int
    """Index into the layer axis of `data`, not of the model: a block may hold only some of its layers."""
    table: int = 0
    """Which of `AttentionBatch.block_tables` and `cache_slots` it is found by."""
    is_first_layer: bool = True
    """False where every step computes another layer of the cache first: then its inputs have long been written, and an
    operator may read the batch, and all tokens but this step's, before the operator ahead of it has ended."""
    format: CacheFormat = CacheFormat.COMPUTE
    scales: Array | None = None
    """`[blocks, layers, 2, K, B]` float32, of a format that has them."""

    def in_compute_dtype(self) -> Array:
        """`data`, for operators that read no other format.

        Raises:
            ArrayMismatchError: the cache has another format.
        """
        if self.format is not CacheFormat.COMPUTE:
            raise ArrayMismatchError(
                f"this operator reads a KV cache in the compute dtype, and was given one in {self.format}; "
                f"keep the cache as {CacheFormat.COMPUTE}, or choose a kernel provider that reads {self.format}"
            )
        return self.data
