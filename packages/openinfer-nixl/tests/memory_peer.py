"""A process that has blocks in its memory or its GPU's: `memory_peer.py KIND NUM_BLOCKS BLOCK_BYTES`.

Says in a line of JSON where they are, how they are read and what their sums are, and ends with its standard input.
"""

import hashlib
import importlib
import json
import sys
from typing import Any

import numpy as np

from openinfer_nixl.agent import Memory, NixlAgent


def module_of(kind: Memory) -> Any:
    """NumPy, or CuPy for a GPU."""
    if kind == "DRAM":
        return np
    return importlib.import_module("cupy")


def memory_of(kind: Memory, num_bytes: int) -> tuple[Any, int]:
    """Bytes of zeros, and their address."""
    array = module_of(kind).zeros(num_bytes, np.uint8)
    if kind == "DRAM":
        return array, array.ctypes.data
    module_of(kind).cuda.Device().synchronize()
    return array, array.data.ptr


def bytes_of(kind: Memory, array: Any) -> bytes:
    return array.tobytes() if kind == "DRAM" else module_of(kind).asnumpy(array).tobytes()


def main(kind: Memory, num_blocks: int, block_bytes: int) -> None:
    array, address = memory_of(kind, num_blocks * block_bytes)
    content = np.random.default_rng(7).integers(0, 256, num_blocks * block_bytes, np.uint8)
    array[:] = module_of(kind).asarray(content)
    if kind == "VRAM":
        module_of(kind).cuda.Device().synchronize()
    agent = NixlAgent(address, array.nbytes, memory=kind)
    sums = [hashlib.sha256(block.tobytes()).hexdigest() for block in content.reshape(num_blocks, block_bytes)]
    told = {"address": address, "description": agent.describe().hex(), "sums": sums}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    given: Any = sys.argv[1]
    main(given, int(sys.argv[2]), int(sys.argv[3]))
