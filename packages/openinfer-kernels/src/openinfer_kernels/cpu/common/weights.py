"""Weights in float32: BF16 is the upper half of a float32, so the conversion is a shift."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.common.random_weight import random_weight
from openinfer_kernels.errors import WeightDtypeError
from openinfer_kernels.weights.foreign import ForeignWeight
from openinfer_kernels.weights.plain import RandomWeight, WeightPart, stacked_shape


def upload_weight(*parts: WeightPart) -> NDArray[np.float32]:
    out = np.empty(stacked_shape(parts), np.float32)
    begin = 0
    for part in parts:
        piece = out[begin : begin + len(part)]
        begin += len(part)
        if isinstance(part, RandomWeight):
            piece[...] = random_weight(part)
        else:
            _convert(part.on_host() if isinstance(part, ForeignWeight) else part, piece)
    return out


def _convert(host: NDArray[Any], out: NDArray[np.float32]) -> None:
    if host.dtype == np.uint16:
        bits = out.view(np.uint32)
        bits[...] = host
        bits <<= 16
    elif host.dtype.name in ("float32", "float16"):
        out[...] = host
    else:
        raise WeightDtypeError(
            f"a weight of dtype {host.dtype} was uploaded; possible are float32, float16, and uint16 for BF16 bits"
        )
