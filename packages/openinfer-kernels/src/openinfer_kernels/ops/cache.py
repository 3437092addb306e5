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
    """E4M3 codes, with a float32 scale for each token and head in `PagedCache.scales`: a value is code times scale.

    The scale is the largest size of a token's key or value in a head, by 448 (1 for zeros, and 2^-126 at least); codes
    are rounded to nearest, ties to even. In memory a head's scales of a block follow its codes.
    """


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
    """`[blocks, layers, 2, K, B]` float32, of a format that has them; `data` is uint8 then."""

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

    def in_fp8(self) -> tuple[Array, Array]:
        """Codes and scales of a cache whose format is `FP8`.

        Raises:
            ArrayMismatchError: they are not bytes of the shape that scales ask for.
        """
        if self.scales is None or self.scales.shape != self.data.shape[:-1]:
            told = "none" if self.scales is None else str(self.scales.shape)
            raise ArrayMismatchError(f"a cache of codes {self.data.shape} in FP8 has scales {told}: one per last axis")
        if (str(self.data.dtype), str(self.scales.dtype)) != ("uint8", "float32"):
            raise ArrayMismatchError(
                f"a cache in FP8 has codes of {self.data.dtype} and scales of {self.scales.dtype}: uint8 and float32"
            )
        return self.data, self.scales
