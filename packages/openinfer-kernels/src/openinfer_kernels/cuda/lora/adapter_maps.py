"""What a product of many tokens is told of adapters: `csrc/gemm/adapter_maps.cuh`."""

import ctypes

from openinfer_kernels.cuda.common.tensor_maps import TensorMap

MOST_PIECES = 3


class AdapterMaps(ctypes.Structure):
    """The struct of that name."""

    _fields_ = (
        ("b", TensorMap * MOST_PIECES),
        ("shrunk", TensorMap),
        ("a", TensorMap),
        *((name, ctypes.c_void_p) for name in ("slots", "out")),
        ("starts", ctypes.c_int * MOST_PIECES),
        *((name, ctypes.c_int) for name in ("pieces", "columns", "rank", "halves", "shrink_tiles", "parts")),
        ("steps", ctypes.c_void_p),
        ("padding", ctypes.c_int * 16),  # to a multiple of its alignment, 128
    )
