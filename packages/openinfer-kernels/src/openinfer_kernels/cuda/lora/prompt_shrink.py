"""A x of prompts, by a launch ahead of the product that takes it: `csrc/lora/prompt_shrink.cu`. Hopper only."""

import ctypes

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.tensor_maps import TensorBox, TensorMap, TensorMaps
from openinfer_kernels.cuda.gemm.tiles import CHUNK
from openinfer_kernels.cuda.lora.adapter_maps import AdapterMaps
from openinfer_kernels.ops import Array

LEAST_TOKENS = 513
"""From here on products take A x rounded to BF16, as it is made here; of fewer tokens each may have another slot."""
_BF16_BYTES = 2
TILE_TOKENS = 64
"""Of a block, which says of them together what steps they need."""
STEP_COLUMNS = 16
"""Of B, that a product has a box for: of prompts one of four slots of rank 16."""
_UNIT_ROWS, _THREADS = 16, 160
_SHARED_BYTES = 194 << 10
_MOST_SPLITS = 8
_OVERHEAD_CHUNKS = 12
"""What a block does besides its chunks of K, in those: it waits for the first, and leaves and adds up sums."""
_MOST_KEPT = 4096


class _PromptShrink(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "out", "steps")),
        *((name, ctypes.c_int) for name in ("num_tokens", "inner", "pieces", "rank", "num_slots", "columns")),
    )


class PromptShrink:
    """The kernel on one device."""

    def __init__(self, device: Device) -> None:
        self._kernel = device.kernel("prompt_shrink", "prompt_shrink", shared_bytes=_SHARED_BYTES)
        self._most_clusters = {1: device.num_multiprocessors}
        self._splits: dict[tuple[int, int], int] = {}
        self._maps = TensorMaps()

    def serves(self, num_tokens: int) -> bool:
        """Whether so many tokens are many."""
        return num_tokens >= LEAST_TOKENS

    def rows_map(self, a: int, rows: int, inner: int) -> TensorMap:
        """Of all slots' A's, `[rows, k]` at this address, a multiple of 16 rows."""
        return self._maps.of(TensorBox(a, (inner, rows), (inner * _BF16_BYTES,), (CHUNK, _UNIT_ROWS)))

    def shrink(self, x: Array, a: TensorMap, adapters: AdapterMaps, *, num_slots: int) -> None:
        """Writes the A x of `x [T, k]`, and its steps, that the product with these adapters reads."""
        num_tokens, inner = x.shape
        box = TensorBox(address(x), (inner, num_tokens), (inner * _BF16_BYTES,), (CHUNK, TILE_TOKENS))
        sizes = num_tokens, inner, adapters.pieces, adapters.rank, num_slots, adapters.columns
        given = _PromptShrink(adapters.slots, adapters.out, adapters.steps, *sizes)
        splits = self._splits_of(num_tokens, inner)
        blocks = -(-num_tokens // TILE_TOKENS) * splits
        self._kernel((blocks, 1, 1), (_THREADS, 1, 1), [self._maps.of(box), a, given], overlap=True, cluster=splits)

    def _splits_of(self, num_tokens: int, inner: int) -> int:
        """Blocks that divide K: as many as shorten the longest way of a block, in all rounds."""
        key = num_tokens, inner
        if key not in self._splits:
            if len(self._splits) >= _MOST_KEPT:
                self._splits.clear()
            tiles, chunks = -(-num_tokens // TILE_TOKENS), inner // CHUNK

            def cost(splits: int) -> int:
                rounds = -(-tiles // self._clusters_of(splits))
                return rounds * (-(-chunks // splits) + _OVERHEAD_CHUNKS)

            known = range(1, 1 + min(_MOST_SPLITS, chunks))
            self._splits[key] = min((each for each in known if self._clusters_of(each)), key=cost)
        return self._splits[key]

    def _clusters_of(self, blocks: int) -> int:
        """That run at a time."""
        if blocks not in self._most_clusters:
            self._most_clusters[blocks] = self._kernel.most_clusters(blocks, threads=_THREADS)
        return self._most_clusters[blocks]
