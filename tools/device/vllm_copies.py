"""Times the copies of the vLLM connector on a GPU: blocks of Qwen3-4B between a pool of 36 layers and pinned memory.

    python tools/device/vllm_copies.py [BLOCKS]

Needs torch, and a stand-in for vLLM's base class: the copies need nothing of it.
"""

import json
import sys
import time
from types import ModuleType

import torch


def stand_in() -> None:
    names = "vllm vllm.distributed vllm.distributed.kv_transfer vllm.distributed.kv_transfer.kv_connector".split()
    for name in [*names, f"{names[-1]}.v1", f"{names[-1]}.v1.base"]:
        sys.modules[name] = ModuleType(name)
    sys.modules["vllm"].__version__ = "none"
    base = sys.modules[f"{names[-1]}.v1.base"]
    parts = ("KVConnectorBase_V1", "SupportsHMA", "KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorRole")
    for name in parts:
        setattr(base, name, type(name, (), {}))


def main() -> None:
    stand_in()
    from openinfer_kv_offload.vllm.torch_copies import TorchCopies

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    layers = {f"layer{i}": torch.randn(512, 2, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for i in range(36)}
    copies = TorchCopies(layers, num_blocks=512)
    copies.allocate_staging(count)
    block_ids, places = list(range(512 - count, 512)), list(range(count))
    figures = {"blocks": count, "block_bytes": copies.block_bytes}
    for name, begin in {
        "to_staging": lambda: copies.to_staging(block_ids, places),
        "to_pool": lambda: copies.to_pool(places, block_ids),
    }.items():
        best_s = launch_s = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            begin_s = time.perf_counter()
            copy = begin()
            launched_s = time.perf_counter()
            while not copy.is_done():
                pass
            best_s = min(best_s, time.perf_counter() - begin_s)
            launch_s = min(launch_s, launched_s - begin_s)
        figures[name] = {"gb_s": count * copies.block_bytes / best_s / 1e9, "launch_ms": launch_s * 1e3}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
