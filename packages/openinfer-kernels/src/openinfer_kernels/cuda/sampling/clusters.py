"""The cluster of blocks that share one row of logits: `csrc/sampling/cluster.cuh`."""

import numpy as np

from openinfer_kernels.cuda.common.arrays import require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16
from openinfer_kernels.ops import Array

THREADS = 256
"""Of each block: `kThreads` in `csrc/common/block.cuh`."""
_BLOCKS = 8
"""`kClusterSize` in `csrc/sampling/cluster.cuh`, on GPUs with thread block clusters."""
_CLUSTER_CAPABILITY = (9, 0)
"""Hopper, the first with thread block clusters."""
_MULTIPLE = 128


def cluster_blocks(device: Device) -> int:
    return _BLOCKS if device.capability >= _CLUSTER_CAPABILITY else 1


def slice_columns(num_columns: int, num_blocks: int) -> int:
    """Columns that one block looks at: a multiple of what its warps read at once."""
    return -(-num_columns // (num_blocks * _MULTIPLE)) * _MULTIPLE


def require_logits(logits: Array) -> None:
    is_single = getattr(logits, "dtype", None) == np.float32
    require(logits, np.dtype(np.float32) if is_single else bfloat16, ndim=2, what="the logits")
