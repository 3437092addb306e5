"""Weights in float32: BF16 is the upper half of a float32, so widening is a shift."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.errors import WeightDtypeError


def widened_weight(host: NDArray[Any]) -> NDArray[np.float32]:
    """A float32 copy of a float32 or float16 array, or of BF16 bit patterns in uint16; one allocation.

    Raises:
        WeightDtypeError: any other dtype.
    """
    if host.dtype == np.uint16:
        bits = host.astype(np.uint32, order="C")
        bits <<= 16
        return bits.view(np.float32)
    if host.dtype.name in ("float32", "float16"):
        return host.astype(np.float32, order="C")
    raise WeightDtypeError(
        f"a weight of dtype {host.dtype} was uploaded; possible are float32, float16, and uint16 for BF16 bits"
    )
