"""What loading a new adapter takes on the host, part by part: by bytes, by the interpreter, and by threads.

    python3 tools/device/lora_load.py MODEL [--rank R] [--threads N ...] [--repeats N] [--pinned] [--commit C]
        [--json FILE]

MODEL is a folder with a config.json. The adapter has all projections, its file is BF16 and in the page cache, its scale
is no power of two. `stages` are one thread's, of all bytes; `interpreter_s` is a load of as many tensors of few bytes
each; then whole loads by threads, with the engine's switch interval: alone (`quiet`), next to a thread that keeps
the interpreter as a step loop does that never waits (`busy`), the worst there is, and as an engine has them (`ahead`):
a quarter of a second after the last one, into memory that was made then and is not in the processor's cache, where that
of the others is used again. `waits` are switches of threads that had to wait, of one load: for the interpreter, mostly.
Each part is printed as it ends. With --pinned the memory is CUDA's; `memory_s` is what it takes to make it.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = folders()

import numpy as np  # noqa: E402
from blake3 import blake3  # noqa: E402
from made_adapters import made_adapters  # noqa: E402

from openinfer_core import read_config  # noqa: E402
from openinfer_engine.child import SWITCH_INTERVAL_S  # noqa: E402
from openinfer_engine.lora import adapter_folder  # noqa: E402
from openinfer_engine.lora.adapter_folder import read_adapter  # noqa: E402
from openinfer_engine.lora.adapter_tensors import ReadingThreads  # noqa: E402
from openinfer_engine.lora.arena import AdapterArena, adapted_modules, piece_of  # noqa: E402
from openinfer_kernels.cpu import CpuOps  # noqa: E402
from openinfer_kernels.weights.bfloat16 import scaled_bits  # noqa: E402

PIECE_BYTES = 1 << 20
KINDS = "quiet", "busy", "ahead"
BETWEEN_LOADS_S = 0.25
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class HalfOps(CpuOps):
    """Numbers of two bytes, as a GPU's slots have them; host memory is the same for every adapter until `renew`."""

    def __init__(self, *, pinned: bool) -> None:
        super().__init__()
        self._pinned = pinned
        self._memory: Any = np.empty(0, np.float16)

    def zeros(self, shape: Any, dtype: Any = np.float16) -> Any:
        return np.zeros(shape, dtype)

    def host_weights(self, num_values: int) -> Any:
        if len(self._memory) < num_values:
            self.renew(num_values)
        return self._memory[:num_values]

    def renew(self, num_values: int) -> None:
        self._memory = self.new_memory(num_values)
        self._memory[:] = 0

    def new_memory(self, num_values: int) -> Any:
        if not self._pinned:
            return np.empty(num_values, np.float16)
        import cupy

        # Not CuPy's pool's, which has what the last adapter let go.
        memory: Any = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(2 * num_values), 0)
        return np.frombuffer(memory, np.float16, num_values)


class Adapter:
    """One that was made, and the slots of one rank."""

    def __init__(self, made: Any, model: Path, *, rank: int, pinned: bool) -> None:
        self.folder = made.folder / made.names[0]
        config = self.folder / "adapter_config.json"
        config.write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 0.7 * rank}))
        self.num_bytes = (self.folder / adapter_folder.WEIGHTS_FILE).stat().st_size
        self._rank = rank
        matrices = made.definition.adapted_matrices(made.definition.parse(read_config(model)))
        self._modules = adapted_modules(matrices)
        self.ops = HalfOps(pinned=pinned)
        self._arena = AdapterArena(ops=self.ops, num_slots=1, max_rank=rank)
        for matrix, shard in matrices:
            self._arena.add(np.zeros(1), [piece_of(matrix, shard, rank=0, size=1)])

    def load(self, threads: ReadingThreads) -> None:
        writer = self._arena.begin_share()
        given = {"modules": self._modules, "max_rank": self._rank, "threads": threads}
        read_adapter(self.folder, target=writer, **given)
        writer.share()


def seconds(run: Callable[[], object], repeats: int, *, clock: Callable[[], float] = time.perf_counter) -> float:
    found: list[float] = []
    for _ in range(repeats):
        begin = clock()
        run()
        found.append(clock() - begin)
    return statistics.median(found)


def stages(path: Path, repeats: int) -> dict[str, float]:
    """Processor seconds of one thread, of all bytes of a file, in pieces that stay in the processor's cache."""
    size, descriptor = path.stat().st_size, os.open(path, os.O_RDONLY)
    memory: Any = np.empty(PIECE_BYTES, np.uint8)
    os.preadv(descriptor, [memory], 1 << 20)
    bits, out, table = memory.view(np.uint16), np.empty(PIECE_BYTES // 2, np.uint16), scaled_bits(0.7)

    def each(run: Callable[[int], object]) -> float:
        return seconds(lambda: [run(at) for at in range(0, size, PIECE_BYTES)], repeats, clock=time.thread_time)

    def largest(at: int) -> None:
        del at
        memory.view(np.int16).max()
        bits.max()

    found = {
        "hash_s": each(lambda at: blake3(memory).digest()),
        "finite_s": each(largest),
        "scale_s": each(lambda at: np.take(table, bits, out=out, mode="clip")) / 2,  # of the B's, half of all
        "copy_s": each(lambda at: np.copyto(out, bits)) / 2,
        "read_s": each(lambda at: os.preadv(descriptor, [memory], at)),
    }
    os.close(descriptor)
    return found


@contextmanager
def busy_interpreter(*, is_busy: bool) -> Iterator[None]:
    end = threading.Event()

    def run() -> None:
        while not end.is_set():
            sum(range(100))

    thread = threading.Thread(target=run)
    if is_busy:
        thread.start()
    yield
    end.set()
    if is_busy:
        thread.join()


def loads(adapter: Adapter, num_threads: int, repeats: int, kind: str) -> dict[str, Any]:
    found: list[float] = []
    cpu_s, waits, faults = 0.0, 0, 0
    threads = ReadingThreads(num_threads)
    with busy_interpreter(is_busy=kind == "busy"):
        for _ in range(repeats):
            if kind == "ahead":
                adapter.ops.renew(adapter.num_bytes // 2)
                time.sleep(BETWEEN_LOADS_S)
            before, cpu_before = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
            begin = time.perf_counter()
            adapter.load(threads)
            found.append(time.perf_counter() - begin)
            after = resource.getrusage(resource.RUSAGE_SELF)
            cpu_s += time.process_time() - cpu_before
            waits += after.ru_nvcsw - before.ru_nvcsw
            faults += after.ru_minflt - before.ru_minflt
    row: dict[str, Any] = {"threads": num_threads, "kind": kind}
    row |= {"load_s": statistics.median(found), "least_s": min(found), "cpu_s": cpu_s / repeats}
    row |= {"waits": waits // repeats, "faults": faults // repeats}
    return {**row, "gb_per_s": adapter.num_bytes / row["load_s"] / 1e9}


def narrow_model(model: Path, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({**json.loads((model / "config.json").read_text()), **NARROW}))
    return folder


def shown(found: dict[str, Any]) -> None:
    print("  ".join(f"{key} {each:.4f}" if isinstance(each, float) else f"{key} {each}" for key, each in found.items()))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    record: dict[str, Any] = {"model": given.model.name, "commit": given.commit, "rank": given.rank}
    record |= {"cpus": os.cpu_count(), "pinned": given.pinned}
    with (
        tempfile.TemporaryDirectory() as folder,
        made_adapters(narrow_model(given.model, Path(folder)), count=1, rank=given.rank) as made,
    ):
        one = ReadingThreads(1)
        narrow = Adapter(made, Path(folder), rank=given.rank, pinned=False)
        record["interpreter_s"] = seconds(lambda: narrow.load(one), given.repeats, clock=time.process_time)
    with made_adapters(given.model, count=1, rank=given.rank) as made:
        adapter = Adapter(made, given.model, rank=given.rank, pinned=given.pinned)
        record["adapter_bytes"] = adapter.num_bytes
        record["memory_s"] = seconds(lambda: adapter.ops.new_memory(adapter.num_bytes // 2), given.repeats)
        shown(record)
        record["stages"] = stages(adapter.folder / adapter_folder.WEIGHTS_FILE, given.repeats)
        shown(record["stages"])
        record["loads"] = []
        for num_threads in given.threads:
            for kind in KINDS:
                record["loads"].append(loads(adapter, num_threads, given.repeats, kind))
                shown(record["loads"][-1])
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    record = measure(given)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
