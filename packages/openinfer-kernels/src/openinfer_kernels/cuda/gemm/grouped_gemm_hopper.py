"""Products of several BF16 matrices with many tokens each: `csrc/gemm/grouped_gemm_hopper.cu`. Hopper only."""

import ctypes

from openinfer_kernels.cuda.common.arrays import address, fits_vectors
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.tensor_maps import TensorBox, TensorMaps
from openinfer_kernels.cuda.gemm.grouped_gemm import Epilogue, Plan
from openinfer_kernels.ops import Array, LinearWeight, QuantisedWeight

_STEM = "grouped_gemm_hopper"
_BF16_BYTES = 2
_CHUNK = 64
_TOKENS = 128
_COLUMNS = 256
_STAGES = 4
_THREADS = 384
_SHARED_BYTES = _STAGES * ((_TOKENS + _COLUMNS) * _CHUNK * _BF16_BYTES + 16) + 1024
"""Of `Shared`, which is aligned to 1,024."""


class GroupedGemmHopper:
    """The products on one device; on GPUs other than Hopper it serves none."""

    def __init__(self, device: Device) -> None:
        names = list(Epilogue) if device.has(_STEM) else []
        self._kernels = {each: device.kernel(_STEM, f"{_STEM}_{each}", shared_bytes=_SHARED_BYTES) for each in names}
        self._num_multiprocessors = device.num_multiprocessors
        self._maps = TensorMaps()

    def serves(self, weight: LinearWeight, plan: Plan, *, limit: float) -> bool:
        """Whether it multiplies `weight [matrices, out, in]`: many tokens for each, no limit, whole groups of rows."""
        if isinstance(weight, QuantisedWeight) or not self._kernels or limit != float("inf"):
            return False
        _, rows, k = weight.shape
        return plan.tile_tokens == _TOKENS and rows % 16 == 0 and k % 8 == 0 and fits_vectors(weight)

    def multiply(self, x: Array, weight: Array, out: Array, *, epilogue: Epilogue, plan: Plan) -> None:
        """Writes the products of every position, as `GroupedGemm.multiply` does; `x [positions, in]` is sorted."""
        matrices, rows, k = weight.shape
        row_bytes = k * _BF16_BYTES
        swiglu = epilogue is Epilogue.SWIGLU
        second, third = (rows // 2, 8) if swiglu else (8, 16)
        groups = (matrices * rows - rows // 2) // 8 if swiglu else matrices * rows // 16
        weight_box = TensorBox(
            address(weight),
            (k, 8, 2, groups),
            (row_bytes, second * row_bytes, third * row_bytes),
            (_CHUNK, 8, 2, _COLUMNS // 16),
        )
        x_box = TensorBox(address(x), (k, len(x)), (row_bytes,), (_CHUNK, _TOKENS))
        features = out.shape[1]
        tile_features = _COLUMNS // 2 if swiglu else _COLUMNS
        most_tiles = len(plan.tiles)
        arguments = [self._maps.of(weight_box), self._maps.of(x_box), plan.tiles, ctypes.c_int(most_tiles), out]
        arguments += [ctypes.c_int(features), ctypes.c_int(k)]
        blocks = min(self._num_multiprocessors, most_tiles * -(-features // tile_features))
        self._kernels[epilogue]((blocks, 1, 1), (_THREADS, 1, 1), arguments, overlap=True)
