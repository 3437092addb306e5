"""What an engine has of the tier `nixl-gpu`: a pool on a GPU, and the tier beside it.

`gpu_tier_peer.py NUM_BLOCKS` saves so many blocks, says its port in a line of JSON and ends with its standard input.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from openinfer_kv_cache import TransferState
from openinfer_kv_cache.testing.tier_cases import chain, content, ended, kit_layout
from openinfer_nixl.agent import NixlAgent
from openinfer_nixl.gpu.settings import open_with, parse
from openinfer_nixl.gpu.tier import MakeAgent

BLOCK_BYTES = 2 << 20
LAYOUT = kit_layout(head_dim=BLOCK_BYTES)


class Engine:
    """On the first GPU that this process sees."""

    def __init__(
        self, folder: Path, num_blocks: int, *, peers: str = "", make_agent: MakeAgent = NixlAgent, more: str = ""
    ) -> None:
        import cupy

        from openinfer_kernels.cuda import Device
        from openinfer_kernels.cuda.common.block_copies import DevicePool

        self._cupy: Any = cupy
        token = folder / "token"
        token.write_bytes(b"t" * 32)
        setting = f"127.0.0.1:0,{num_blocks * BLOCK_BYTES >> 20}MiB,token_file={token},peers={peers}{more}"
        self.tier = open_with(LAYOUT, parse(setting), make_agent)
        self._array: Any = cupy.zeros((num_blocks, BLOCK_BYTES), np.uint8)
        self.pool = DevicePool(self._array, Device.open())
        cupy.cuda.Device().synchronize()
        self.tier.use_memory(self.pool)

    def save(self, seed: int, num_blocks: int) -> None:
        digests = chain(seed, num_blocks)
        blocks = [np.frombuffer(content(digest, LAYOUT), np.uint8) for digest in digests]
        self._array[:num_blocks] = self._cupy.asarray(np.stack(blocks))
        self._cupy.cuda.Device().synchronize()
        assert ended(self.tier.save(digests, self.pool.blocks[:num_blocks])) is TransferState.COMPLETED

    def held(self, place: int) -> bytes:
        return self._cupy.asnumpy(self._array[place]).tobytes()

    def overwrite(self, address: int, num_bytes: int) -> None:
        self._cupy.cuda.runtime.memset(address, 7, num_bytes)
        self._cupy.cuda.Device().synchronize()


def main(num_blocks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder), num_blocks)
        engine.save(0, num_blocks)
        sys.stdout.write(json.dumps({"port": engine.tier.port}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]))
