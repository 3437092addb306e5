"""KV tiers of an engine on a GPU: what a prompt costs where its prefix is, and what copies cost those who decode.

    python3 tools/device/kv_tiers.py MODEL OUT [HOST_GIB] [SCRATCH]

MODEL needs a config.json alone: weights are random. Times to first token are the engine's, without HTTP, by prompt
length: computed, found in the pool, in the host tier, and on disk by another engine (its files in the page cache).
Writes OUT/kv-tiers.json; `benchmarks/plot_kv_tiers.py` draws it.
"""

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from openinfer_core import (
    Failed,
    GenerateRequest,
    RequestId,
    SamplingParams,
    Tokens,
    claim,
    list_plugins,
    read_config,
)
from openinfer_core.plugins import MODELS
from openinfer_core.provenance import provenance
from openinfer_engine import StepLoop, build_loop, resolve
from openinfer_engine.kv_tiers import MemoryPrefault, PoolTierPort
from openinfer_kernels.cuda.common.block_copies import DevicePool
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kv_cache import Digest
from openinfer_kv_offload import open_tiers

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
POOL_BLOCKS = 4096
REPEATS = 3
DECODERS, DECODE_TOKENS, DECODE_STEPS = 32, 1024, 150
COPIED_BLOCKS = 2048
PIECES_IN_FLIGHT = 16


class Engine:
    """An engine with tiers that only this program drives."""

    def __init__(self, model_dir: Path, tiers: list[str], *, seed: int = 1) -> None:
        family: Any = claim(read_config(model_dir), list_plugins(MODELS))[0]
        given = {
            "device": "cuda",
            "load_format": "dummy",
            "grammar_compiler": "none",
            "num_blocks": POOL_BLOCKS,
            "max_num_seqs": 64,
            "max_model_tokens": 20480,
            "kv_tier": tiers,
            "kv_load_timeout_ms": 5000,
        }
        begin_s = time.perf_counter()
        self.composition = resolve(family.definition, model_dir, msgspec.convert(given, family.options_type))
        self.loop: StepLoop = build_loop(self.composition)
        self.start_s = time.perf_counter() - begin_s
        self.rng = np.random.default_rng(seed)
        self._next_id = 0

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(0, self.loop.info.num_token_ids, num_tokens).tolist())

    def submit(self, prompt: tuple[int, ...], *, max_tokens: int) -> int:
        self._next_id += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = GenerateRequest(request_id=RequestId(self._next_id), prompt_token_ids=prompt, sampling=sampling)
        assert self.loop.submit(request) == []
        return self._next_id

    def first_token_ms(self, prompt: tuple[int, ...]) -> tuple[float, int]:
        """Time to the first token of a request alone, and the prompt tokens that came from tiers."""
        self.rest()
        before = self.loop.stats().tier_tokens
        begin_s = time.perf_counter()
        wanted, took_ms = self.submit(prompt, max_tokens=1), None
        while took_ms is None:
            for event in self.loop.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Tokens) and event.request_id == wanted:
                    took_ms = (time.perf_counter() - begin_s) * 1e3
        return took_ms, self.loop.stats().tier_tokens - before

    def rest(self) -> None:
        """Until nothing runs and nothing moves."""
        while self.loop.busy:
            self.loop.step()

    def evict(self) -> None:
        """Fills the whole pool with something else."""
        for _ in range(POOL_BLOCKS // 1024):
            self.submit(self.prompt(16384 - 16), max_tokens=1)
            self.rest()

    def step_ms(self, between: Callable[[], None]) -> list[float]:
        """Times of decode steps, with something to do between them."""
        took: list[float] = []
        for _ in range(DECODE_STEPS):
            begin_s = time.perf_counter()
            self.loop.step()
            between()
            took.append((time.perf_counter() - begin_s) * 1e3)
        return took


def measure_first_tokens(engine: Engine) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    prompts = {length: engine.prompt(length) for length in LENGTHS}
    engine.first_token_ms(engine.prompt(16384))
    for length, prompt in prompts.items():
        computed = [engine.first_token_ms(engine.prompt(length))[0] for _ in range(REPEATS)]
        engine.first_token_ms(prompt)
        pool = [engine.first_token_ms(prompt)[0] for _ in range(REPEATS)]
        rows.append({"prompt_tokens": length, "computed_ms": computed, "pool_ms": pool, "host_ms": []})
    for _ in range(REPEATS):
        engine.evict()
        for row in rows:
            took_ms, from_tier = engine.first_token_ms(prompts[row["prompt_tokens"]])
            row["host_ms"].append(took_ms)
            row["host_tokens"] = from_tier
    for row in rows:
        row["prompt"] = prompts[row["prompt_tokens"]]
    return rows


def measure_disk(model_dir: Path, setting: str, rows: list[dict[str, Any]]) -> None:
    """One engine saves, the next finds."""
    writer = Engine(model_dir, [setting])
    for row in rows:
        writer.first_token_ms(row["prompt"])
    writer.rest()
    writer.loop.close()
    reader = Engine(model_dir, [setting], seed=2)
    reader.first_token_ms(reader.prompt(4096))
    for row in rows:
        took_ms, from_tier = reader.first_token_ms(row.pop("prompt"))
        row["disk_ms"], row["disk_tokens"] = [took_ms], from_tier
    reader.loop.close()


def measure_decode(engine: Engine) -> dict[str, Any]:
    """Steps of sequences that decode, alone and beside copies as fast as they go, each way."""
    engine.rest()
    layout = engine.composition.layouts[0]
    tier: Any = open_tiers(["host=8GiB"], layout)
    MemoryPrefault(tier.pinnable_memory()).finish()
    pool = cupy.zeros((COPIED_BLOCKS, layout.block_bytes), np.uint8)
    memory = DevicePool(pool, Device.open())
    memory.lock(tier.pinnable_memory())
    port = PoolTierPort(tier, memory.blocks, load_timeout_s=30, before_close=memory.unlock)
    for _ in range(DECODERS):
        engine.submit(engine.prompt(DECODE_TOKENS), max_tokens=12 * DECODE_STEPS)
    for _ in range(60):
        engine.loop.step()
    found: dict[str, Any] = {"decoders": DECODERS, "block_bytes": layout.block_bytes}
    copier = _Copier(port)
    for way in ("save", "load"):
        copier.turn(way)
        found[f"alone_before_{way}_ms"] = engine.step_ms(lambda: None)
        begin_s = time.perf_counter()
        found[f"beside_{way}_ms"] = engine.step_ms(copier.keep_going)
        found[f"{way}_gb_per_s"] = copier.completed_blocks * layout.block_bytes / (time.perf_counter() - begin_s) / 1e9
    copier.turn("save")
    found["alone_again_ms"] = engine.step_ms(lambda: None)
    port.close()
    return found


class _Copier:
    """Keeps some moves under way, one way after the other."""

    def __init__(self, port: PoolTierPort) -> None:
        self._port, self._way = port, "save"
        names = np.arange(2 * 32 * 1000, dtype=np.uint64).tobytes()
        digests = [Digest(names[begin : begin + 16]) for begin in range(0, len(names), 16)]
        self._new_digests = [digests[begin : begin + 32] for begin in range(0, len(digests), 32)]
        self._saved: dict[int, list[Digest]] = {}
        self._moves: list[Any] = []
        self._number = 0
        self.completed_blocks = 0

    def keep_going(self) -> None:
        self._port.settle()
        over = [move for move in self._moves if move.is_over()]
        self.completed_blocks += sum(move.completed_blocks for move in over)
        self._moves = [move for move in self._moves if move not in over]
        while len(self._moves) < PIECES_IN_FLIGHT:
            self._moves.append(self._begin())

    def turn(self, way: str) -> None:
        """From now on the other way; waits for what is under way."""
        self._way, self._moves, self.completed_blocks = way, [], 0
        while self._port.is_moving:
            self._port.wait(0.1)
            self._port.settle()

    def _begin(self) -> Any:
        place = self._number % (COPIED_BLOCKS // 32)
        self._number += 1
        blocks = range(place * 32, place * 32 + 32)
        if self._way == "save":
            self._saved[place] = self._new_digests.pop()
            return self._port.save(self._saved[place], blocks)
        return self._port.load(self._port.find(self._saved[place]), blocks)


def main() -> None:
    model_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    host_gib = int(sys.argv[3]) if len(sys.argv) > 3 else 24
    folder = Path(sys.argv[4] if len(sys.argv) > 4 else "/tmp") / "kv-tiers"
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    host, disk = f"host={host_gib}GiB", f"disk={folder},40GiB"
    engine = Engine(model_dir, [host])
    pinning_s = next(phase.seconds for phase in engine.loop.info.start if phase.name == "kv_tiers")
    print(f"started in {engine.start_s:.1f} s, of it {pinning_s:.2f} s for tiers", flush=True)
    rows = measure_first_tokens(engine)
    print_rows(rows)
    decode = measure_decode(engine)
    print_decode(decode)
    stats = msgspec.to_builtins(engine.loop.stats().kv_tiers)
    engine.loop.close()
    measure_disk(model_dir, disk, rows)
    shutil.rmtree(folder, ignore_errors=True)
    print_rows(rows)
    report = {
        "set_up": {"host_gib": host_gib, "plan": msgspec.to_builtins(engine.composition.plan())},
        "start_s": engine.start_s,
        "pinning_s": pinning_s,
        "rows": rows,
        "decode": decode,
        "tiers": stats,
    }
    text = json.dumps({**msgspec.to_builtins(provenance(commit=os.environ.get("COMMIT"))), **report}, indent=2)
    (out / "kv-tiers.json").write_text(text + "\n")


def print_rows(rows: list[dict[str, Any]]) -> None:
    print("tokens  computed      pool      host      disk   ms to the first token, medians; tokens from a tier")
    for row in rows:
        columns = (row.get(f"{way}_ms") for way in ("computed", "pool", "host", "disk"))
        shown = "".join(f"{statistics.median(each):10.1f}" if each else "         -" for each in columns)
        print(f"{row['prompt_tokens']:6}{shown}   {row.get('host_tokens')} {row.get('disk_tokens')}", flush=True)


def print_decode(decode: dict[str, Any]) -> None:
    for way, after in (("save", "alone_before_load_ms"), ("load", "alone_again_ms")):
        alone = statistics.mean(decode[f"alone_before_{way}_ms"] + decode[after])
        beside = statistics.mean(decode[f"beside_{way}_ms"])
        print(
            f"{way}: {decode[f'{way}_gb_per_s']:.1f} GB/s beside {decode['decoders']} that decode: "
            f"{alone:.3f} ms a step alone, {beside:.3f} beside ({(beside / alone - 1) * 100:+.1f} %)",
            flush=True,
        )


if __name__ == "__main__":
    main()
