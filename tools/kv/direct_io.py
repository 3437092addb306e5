"""What O_DIRECT would give the disk tier: records of Qwen3-4B blocks, written and read cold, with and without it.

    python tools/kv/direct_io.py FOLDER [--records 256] [--json FILE]

A read is cold: the file's pages are dropped first. Each way runs with one thread and with four, best of three.
"""

import argparse
import json
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from openinfer_core.provenance import provenance
from openinfer_kv_offload.format.record import record_bytes

RECORD_BYTES = record_bytes(36 * 2 * 8 * 16 * 128 * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--records", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    path = arguments.folder / "direct-io-probe.bin"
    figures = {}
    try:
        for is_direct in (False, True):
            for threads in (1, 4):
                rates = [measure(path, arguments.records, is_direct=is_direct, threads=threads) for _ in range(3)]
                name = f"{'O_DIRECT' if is_direct else 'page cache'}, {threads} thread{'s' if threads > 1 else ''}"
                figures[name] = {
                    "write_gb_s": max(rate[0] for rate in rates),
                    "cold_read_gb_s": max(rate[1] for rate in rates),
                }
                print(
                    f"{name:>22}: write {figures[name]['write_gb_s']:.2f}, read {figures[name]['cold_read_gb_s']:.2f}"
                )
    finally:
        path.unlink(missing_ok=True)
    if arguments.json is not None:
        content = {**msgspec.to_builtins(provenance()), "record_bytes": RECORD_BYTES, "ways": figures}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def measure(path: Path, records: int, *, is_direct: bool, threads: int) -> tuple[float, float]:
    """GB/s of writing new records, without waiting for the disk, and of reading them cold."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if is_direct else 0), 0o600)
    try:
        write_gb_s = rate(os.pwritev, fd, records, threads)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return write_gb_s, rate(os.preadv, fd, records, threads)
    finally:
        os.close(fd)


def rate(move, fd: int, records: int, threads: int) -> float:
    buffers = [mmap.mmap(-1, RECORD_BYTES) for _ in range(threads)]  # O_DIRECT wants whole pages
    for buffer in buffers:
        buffer[:] = os.urandom(RECORD_BYTES)

    def move_some(thread: int) -> None:
        for index in range(thread, records, threads):
            assert move(fd, [buffers[thread]], index * RECORD_BYTES) == RECORD_BYTES

    with ThreadPoolExecutor(threads) as pool:
        begin_s = time.perf_counter()
        list(pool.map(move_some, range(threads)))
        return records * RECORD_BYTES / (time.perf_counter() - begin_s) / 1e9


if __name__ == "__main__":
    main()
