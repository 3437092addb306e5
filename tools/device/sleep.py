"""Sleep, wake and weight updates of one engine on a GPU: memory asleep, times, and whether its tokens stay the same.

    python3 tools/device/sleep.py MODEL [--off] [--load-format FORMAT] [--speculative SPEC] [--ranks N] [--times 3]
        [--asleep S ...] [--size 1x1024 ...] [--repeats 2] [--commit NAME] [--json FILE]

MODEL is a folder with a `config.json`, and, with the format safetensors, weights (`checkpoint.py` writes random ones).
`--off` starts the engine without --enable-sleep and times its steps alone, to see what the option costs. Memory is that
of the whole GPU, of the fullest of several, less what was in use before the engine's processes made their contexts.
`--asleep` are seconds between a sleep and its wake, of each in turn: the driver clears memory that was given back, in
the background, and who takes it before that has ended waits for it.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from openinfer_bench.offline import measure_offline
from openinfer_core.control import ControlCommand, Sleep, UpdateWeights, Wake
from openinfer_core.process.resident import settle_memory
from openinfer_core.provenance import provenance
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.options import DeviceKind, LoadFormat
from openinfer_engine.testing import random_requests, run_at_once
from openinfer_qwen3.family import Qwen3

GIB = 1 << 30
MAX_STEP_TOKENS = 4096


def used_bytes() -> int:
    """Of the fullest GPU, by all processes; asks another process, so that this one makes no context for it."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
    return max(map(int, said.split())) << 20


def tokens(loop: StepLoop) -> list[list[int]]:
    asked = random_requests(8, vocab_size=30000, max_prompt_tokens=700, max_tokens=32)
    return [answer.token_ids for _, answer in sorted(run_at_once(loop, asked).items())]


class Measured:
    """One engine, and what it was seen to do."""

    def __init__(self, loop: StepLoop, *, idle_bytes: int) -> None:
        self.loop = loop
        self.idle_bytes = idle_bytes
        self.rows: list[dict[str, object]] = []
        self.expected = tokens(loop)

    def obey(self, command: ControlCommand) -> tuple[float, float]:
        """Seconds, and GiB of the GPU afterwards."""
        begin_s = time.perf_counter()
        self.loop.control(command)
        seconds = time.perf_counter() - begin_s
        return seconds, (used_bytes() - self.idle_bytes) / GIB

    def sleep(self, *, level: int, for_s: float) -> None:
        asleep_s, asleep_gib = self.obey(Sleep(keeps_weights=level == 1))
        time.sleep(for_s)
        awake_s, awake_gib = self.obey(Wake())
        equal = tokens(self.loop) == self.expected
        self.add(
            f"sleep {level}",
            sleep_s=asleep_s,
            asleep_gib=asleep_gib,
            for_s=for_s,
            wake_s=awake_s,
            awake_gib=awake_gib,
            equal=equal,
        )

    def update(self, path: str) -> None:
        seconds, gib = self.obey(UpdateWeights(path=path))
        self.add("update", update_s=seconds, awake_gib=gib, equal=tokens(self.loop) == self.expected)

    def add(self, name: str, **found: float | bool) -> None:
        row = {key: value if isinstance(value, bool) else round(value, 4) for key, value in found.items()}
        self.rows.append({"what": name, **row})
        print(name, row, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--off", action="store_true")
    parser.add_argument("--load-format", type=LoadFormat, default=LoadFormat.SAFETENSORS)
    parser.add_argument("--speculative", default="off")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--asleep", type=float, nargs="+", default=[0.0])
    parser.add_argument("--size", nargs="*", default=["1x1024"], help="BATCHxPROMPT of the steps that are timed")
    parser.add_argument("--repeats", type=int, default=2, help="of each size")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    idle_bytes = used_bytes()
    options = EngineOptions(
        device=DeviceKind.CUDA,
        load_format=arguments.load_format,
        tensor_parallel_size=arguments.ranks,
        speculative=arguments.speculative,
        enable_sleep=not arguments.off,
        weights_root=str(arguments.model.resolve().parent),
        prefix_cache=False,
        max_model_tokens=16384,
        max_step_tokens=MAX_STEP_TOKENS,
    )
    begin_s = time.perf_counter()
    plan = resolve(Qwen3().definition, arguments.model, options)
    loop = build_loop(plan)
    settle_memory()
    start_s = time.perf_counter() - begin_s
    measured = Measured(loop, idle_bytes=idle_bytes)
    measured.add("start", start_s=start_s, awake_gib=(used_bytes() - idle_bytes) / GIB)
    times(measured, "steps before", arguments.size, repeats=arguments.repeats)
    if not arguments.off:
        for level in (1, 2):
            for for_s in arguments.asleep * arguments.times:
                measured.sleep(level=level, for_s=for_s)
        if arguments.load_format is LoadFormat.SAFETENSORS:
            for _ in range(arguments.times):
                measured.update(arguments.model.resolve().name)
        times(measured, "steps after", arguments.size, repeats=arguments.repeats)
    loop.close()
    if arguments.json is not None:
        set_up = {
            "model": str(arguments.model.name),
            "enable_sleep": options.enable_sleep,
            "speculative": options.speculative,
            "ranks": arguments.ranks,
            "ledger": plan.memory_bytes,
        }
        report = {**msgspec.to_builtins(provenance(commit=arguments.commit)), "set_up": set_up, "rows": measured.rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row.get("equal", True) for row in measured.rows) else 1


def times(measured: Measured, name: str, sizes: list[str], *, repeats: int) -> None:
    for batch, prompt_tokens in (map(int, size.split("x")) for size in sizes):
        found = measure_offline(
            measured.loop,
            max_step_tokens=MAX_STEP_TOKENS,
            batch=batch,
            prompt_tokens=prompt_tokens,
            output_tokens=64,
            repeats=repeats,
        )
        measured.add(f"{name}, {batch} x {prompt_tokens}", tpot_ms=found.tpot_ms, prefill_s=found.prefill_s)


if __name__ == "__main__":
    sys.exit(main())
