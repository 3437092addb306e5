"""How fast the tier `nixl-gpu` brings blocks from one process's GPU to another's, and to and from a pool.

    python3 tools/device/gpu_tier.py OUT.json --gpus 0 1

Two processes with a pool and a tier each, no engine. Blocks are as large as those of Qwen3-8B, and as many as a prompt
of 16,384 tokens has; they are loaded as an engine loads them, so many at a time, several side by side. Beside it what
CUDA copies between the two GPUs through one handle.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from openinfer_core.provenance import provenance
from openinfer_engine.kv_tiers.port import chunk_blocks_for
from openinfer_kernels.cuda import Device
from openinfer_kernels.cuda.common.block_copies import DevicePool
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kv_cache import Digest, TransferState
from openinfer_kv_cache.testing.tier_cases import chain, kit_layout
from openinfer_nixl.agent import NixlAgent
from openinfer_nixl.gpu.settings import open_with, parse
from openinfer_nixl.gpu.tier import GpuTier

BLOCK_BYTES = 16 * 36 * 2 * 8 * 128 * 2  # tokens, layers, keys and values, heads, dimensions, bytes
NUM_BLOCKS = 1024
LAYOUT = kit_layout(head_dim=BLOCK_BYTES)
REPEATS = 7


class Engine:
    """A pool, and a tier beside it that has room for all of its blocks."""

    def __init__(self, folder: Path, *, peers: str, connections: int) -> None:
        token = folder / "token"
        token.write_bytes(b"t" * 32)
        size_mib = -(-NUM_BLOCKS * BLOCK_BYTES >> 20) + 1
        setting = f"127.0.0.1:0,{size_mib}MiB,token_file={token},peers={peers},connections={connections}"
        self.tier: GpuTier = open_with(LAYOUT, parse(setting), NixlAgent)
        self.array: Any = cupy.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.pool = DevicePool(self.array, Device.open())
        cupy.cuda.Device().synchronize()
        self.tier.use_memory(self.pool)

    def chunks(self) -> list[slice]:
        size = chunk_blocks_for(BLOCK_BYTES)
        return [slice(begin, begin + size) for begin in range(0, NUM_BLOCKS, size)]

    def save(self, digests: Sequence[Digest]) -> None:
        transfers = [self.tier.save(digests[each], self.pool.blocks[each]) for each in self.chunks()]
        assert all(each.wait(60) is TransferState.COMPLETED for each in transfers)

    def load(self, digests: Sequence[Digest]) -> None:
        begun = []
        for each in self.chunks():
            hit = self.tier.find(digests[each])
            begun.append(self.tier.load(hit, self.pool.blocks[each][: len(hit.digests)]))
        assert all(each.wait(60) is TransferState.COMPLETED for each in begun)
        assert sum(each.num_blocks for each in begun) == NUM_BLOCKS


def rate(do: Callable[[], None]) -> dict[str, float]:
    times: list[float] = []
    for _ in range(REPEATS):
        begin_s = time.perf_counter()
        do()
        times.append(time.perf_counter() - begin_s)
    median_s = sorted(times)[REPEATS // 2]
    return {
        "first_ms": round(times[0] * 1e3, 2),
        "ms": round(median_s * 1e3, 2),
        "gb_per_s": round(NUM_BLOCKS * BLOCK_BYTES / median_s / 1e9, 1),
    }


def peer(folder: Path, connections: int) -> None:
    """The process that has the blocks."""
    engine = Engine(folder, peers="", connections=connections)
    words = engine.array.view(np.uint64)
    words[:] = cupy.arange(words.size, dtype=np.uint64).reshape(words.shape) * np.uint64(0x9E3779B97F4A7C15)
    cupy.cuda.Device().synchronize()
    engine.save(chain(0, NUM_BLOCKS))
    handle = cupy.cuda.runtime.ipcGetMemHandle(engine.array.data.ptr).hex()
    sys.stdout.write(json.dumps({"port": engine.tier.port, "handle": handle}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


def used_mib(gpu: str) -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", gpu]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def measure(folder: Path, given: argparse.Namespace, connections: int) -> dict[str, Any]:
    command = [sys.executable, __file__, str(folder), "--peer", "--connections", str(connections)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": given.gpus[1]}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        told = json.loads(next(line for line in process.stdout if line.startswith("{")))
        engine = Engine(folder, peers=f"127.0.0.1:{told['port']}", connections=connections)
        digests = chain(0, NUM_BLOCKS)
        begin_s = time.perf_counter()
        engine.tier.look_up(digests)
        look_up_ms = round((time.perf_counter() - begin_s) * 1e3, 2)
        found: dict[str, Any] = {"connections": connections, "look_up_ms": look_up_ms}
        found["from_peer"] = rate(lambda: engine.load(digests))
        # Our own blocks, which are those that came: the same bytes under the same names.
        found["save"] = {**rate(lambda: engine.save(chain(time.perf_counter_ns(), NUM_BLOCKS)))}
        engine.save(digests)
        found["own"] = rate(lambda: engine.load(digests))
        theirs = cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(told["handle"]))
        stream = cupy.cuda.Stream(non_blocking=True)

        def copy() -> None:
            cupy.cuda.runtime.memcpyAsync(engine.array.data.ptr, theirs, engine.array.nbytes, 3, stream.ptr)
            stream.synchronize()

        before = cupy.asnumpy(engine.array[:: NUM_BLOCKS // 8])
        found["one_copy"] = rate(copy)
        found["same_bytes"] = bool((cupy.asnumpy(engine.array[:: NUM_BLOCKS // 8]) == before).all())
        found["corrupt_blocks"] = engine.tier.counters()[0].corrupt_blocks
        # Memory of the peer's GPU: what this process has mapped may outlive the peer.
        used = {"alive": used_mib(given.gpus[1])}
        process.kill()
        process.wait()
        time.sleep(1)
        used["killed"] = used_mib(given.gpus[1])
        engine.tier.look_up(chain(1, 1))
        used["noticed"] = used_mib(given.gpus[1])
        engine.tier.close()
        found["peers_gpu_used_mib"] = {**used, "closed": used_mib(given.gpus[1])}
        return found
    finally:
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", nargs=2, default=["0", "1"], help="of the process that reads, and of its peer")
    parser.add_argument("--connections", type=int, nargs="+", default=[4, 1, 8])
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        peer(given.out, given.connections[0])
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = given.gpus[0]
    report: dict[str, Any] = msgspec.to_builtins(provenance(commit=os.environ.get("COMMIT")))
    report |= {"gpus": given.gpus, "block_bytes": BLOCK_BYTES, "num_blocks": NUM_BLOCKS, "runs": []}
    for connections in given.connections:
        with tempfile.TemporaryDirectory() as folder:
            report["runs"].append(measure(Path(folder), given, connections))
        given.out.write_text(json.dumps(report, indent=2) + "\n")
        print(json.dumps(report["runs"][-1]), flush=True)


if __name__ == "__main__":
    main()
