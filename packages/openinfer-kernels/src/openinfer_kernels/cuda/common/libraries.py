"""The libraries that this folder stands on: they carry no types, and are not installed where only code is checked.

`cupy` owns memory, streams and graphs; `driver` is the CUDA driver's API, for launches that CuPy cannot make;
`bfloat16` is the dtype of all activations and weights.
"""

import importlib
from typing import Any

import numpy as np

from openinfer_kernels.errors import CUDA_IS_BROUGHT_BY, DeviceUnavailableError


def _required(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise DeviceUnavailableError(
            f"the CUDA operators need the module {name}, which is not installed: {CUDA_IS_BROUGHT_BY}"
        ) from missing


cupy: Any = _required("cupy")
driver: Any = _required("cuda.bindings.driver")
bfloat16: np.dtype[Any] = np.dtype(_required("ml_dtypes").bfloat16)
