"""Copies of KV blocks between a pool and locked memory: GB/s, and what is left of the interpreter meanwhile.

    python3 tools/device/block_copies.py OUT COMMIT

Blocks of Qwen3.5-4B (half a megabyte) and Qwen3-8B (2.25), scattered on both sides as after hours of service, by one to
eight threads of batches of 128. Next to them a thread counts in Python: its rate is told as a share of its rate alone,
since the thread that launches an engine's steps has to share the interpreter in the same way. `one by one` is a call of
the driver for each block, as before, for comparison. Writes OUT/block-copies.json.
"""

import json
import mmap
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from openinfer_core.provenance import provenance
from openinfer_engine.child import SWITCH_INTERVAL_S
from openinfer_kernels.cuda import Device
from openinfer_kernels.cuda.common.block_copies import DevicePool
from openinfer_kernels.cuda.common.libraries import cupy

SIZES = {"qwen3.5-4b": 524_288, "qwen3-8b": 2_359_296}
COPIED_BYTES = 3 << 30
BATCH = 128
THREADS = (1, 2, 4, 8)
ALONE_S = 0.3


class Counting:
    """A thread that counts for as long as the context lasts."""

    def __enter__(self) -> Self:
        self._ends, self.counted, self._begin_s = threading.Event(), 0, time.perf_counter()
        self._thread = threading.Thread(target=self._count)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.rate = self.counted / (time.perf_counter() - self._begin_s)

    def _count(self) -> None:
        while not self._ends.is_set():
            for _ in range(100):
                self.counted += 1


def main() -> None:
    out, commit = sys.argv[1:]
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    device = Device.open()
    with Counting() as alone:
        time.sleep(ALONE_S)
    rows: list[dict[str, Any]] = []
    for name, size in SIZES.items():
        num_blocks = COPIED_BYTES // size
        pool = DevicePool(cupy.zeros((num_blocks, size), np.uint8), device)
        arena = memoryview(mmap.mmap(-1, num_blocks * size))
        pool.lock([arena])
        order = np.random.default_rng(0).permutation(num_blocks).tolist()
        places = [arena[index * size : (index + 1) * size] for index in order]
        mover = pool.blocks[0].mover
        for how in ("together", "one by one"):
            known = list(pool._locked)  # noqa: SLF001 -- without them each block is a call
            if how == "one by one":
                pool._locked.clear()  # noqa: SLF001 -- as above
            for threads in THREADS:
                for verb in (mover.copy_in, mover.copy_out):
                    rows.append({"blocks": name, "how": how, "threads": threads, "verb": verb.__name__})
                    rows[-1] |= measured(verb, pool.blocks, places, threads, alone.rate)
                    print(rows[-1], flush=True)
            pool._locked[:] = known  # noqa: SLF001 -- as above
        pool.unlock()
    report = {**msgspec.to_builtins(provenance(commit=commit)), "rows": rows}
    (Path(out) / "block-copies.json").write_text(json.dumps(report, indent=1) + "\n")


def measured(verb: Any, blocks: Any, places: Any, num_threads: int, alone_rate: float) -> dict[str, float]:
    parts = [slice(begin, begin + BATCH) for begin in range(0, len(places), BATCH)]
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(lambda part: verb(blocks[part], places[part]), parts[:num_threads]))  # streams and events
        with Counting() as counting:
            begin_s = time.perf_counter()
            list(threads.map(lambda part: verb(blocks[part], places[part]), parts))
            took_s = time.perf_counter() - begin_s
    copied = sum(place.nbytes for place in places)
    return {"gb_s": round(copied / took_s / 1e9, 1), "interpreter_left": round(counting.rate / alone_rate, 3)}


if __name__ == "__main__":
    main()
