"""What operators take and give."""

from typing import Any, TypeAlias

from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""An array of the device the operators run on: `numpy.ndarray`, or `cupy.ndarray`, which has the same face."""

HostArray: TypeAlias = NDArray[Any]
"""An array in host memory, whatever the device."""
