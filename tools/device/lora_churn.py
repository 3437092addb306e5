"""Loads and unloads adapters many times a second while requests run, and notes memory: does it stay flat?

    python3 tools/device/lora_churn.py MODEL [--seconds S] [--rank R] [--device cpu|cuda] [--commit C] [--json FILE]

MODEL is a folder with a config.json; weights and adapters are random. The engine runs in this process; each turn loads
one name, submits requests for adapters that are there or were just unloaded, runs steps, and unloads another. Memory is
what this process has resident, and on a GPU what all processes have there.
"""

import argparse
import json
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = folders()

import numpy as np  # noqa: E402
from made_adapters import made_adapters  # noqa: E402

from openinfer_core import (  # noqa: E402
    Failed,
    FailureKind,
    Finished,
    GenerateRequest,
    RequestId,
    SamplingParams,
    TokenEvent,
)
from openinfer_core.control import LoadAdapter, UnloadAdapter  # noqa: E402
from openinfer_core.process.resident import settle_memory  # noqa: E402
from openinfer_engine.engine_plan import resolve  # noqa: E402
from openinfer_engine.launch import build_loop  # noqa: E402
from openinfer_engine.loop import StepLoop  # noqa: E402
from openinfer_engine.options import DeviceKind, EngineOptions, LoadFormat  # noqa: E402

TURNS_PER_S = 12.0
SLOTS = 2
CONTENTS = 9


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def device_mib() -> float:
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return (total - free) / 2**20


class Churn:
    def __init__(self, loop: StepLoop, folders: list[str]) -> None:
        self.loop, self.folders = loop, folders
        self.rng = np.random.default_rng(1)
        self.number = self.loads = self.unloads = self.finished = self.not_found = self.others = 0
        self.names: list[str] = []
        self.answers: list[str | None] = []

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.finished += 1
            elif isinstance(event, Failed) and event.kind is FailureKind.NOT_FOUND:
                self.not_found += 1
            elif isinstance(event, Failed):
                self.others += 1

    def turn(self) -> None:
        name = f"adapter-{self.loads}"
        folder = self.folders[self.loads % len(self.folders)]
        self.loop.begin_control(LoadAdapter(name, folder), partial(self.loaded, name))
        self.loads += 1
        for _ in range(3):
            newest = f"adapter-{self.loads - 1 - int(self.rng.integers(0, 9))}"  # there, on its way, or gone
            asked = newest if self.rng.random() < 0.8 else None
            self.take(self.loop.submit(self.request(asked)))
        for _ in range(6):
            self.take(self.loop.step())
        if len(self.names) > 6:
            gone = self.names.pop(0)
            self.take(self.loop.control(UnloadAdapter(gone)))
            self.unloads += 1

    def loaded(self, name: str, refusal: str | None) -> None:
        self.answers.append(refusal)
        if refusal is None:
            self.names.append(name)

    def request(self, lora: str | None) -> GenerateRequest:
        self.number += 1
        prompt = tuple(self.rng.integers(0, 250, 20).tolist())
        sampling = SamplingParams(max_tokens=6, seed=self.number)
        return GenerateRequest(request_id=RequestId(self.number), prompt_token_ids=prompt, sampling=sampling, lora=lora)


def churn(loop: StepLoop, names: list[str], seconds: float, *, is_on_device: bool) -> dict[str, Any]:
    turns = Churn(loop, names)
    begin_s, samples = time.monotonic(), list[dict[str, float]]()
    due_s = begin_s
    while (now_s := time.monotonic()) < begin_s + seconds:
        turns.turn()
        if now_s >= due_s:
            sample = {"s": round(now_s - begin_s, 1), "resident_mib": round(resident_mib(), 1)}
            samples.append(sample | ({"device_mib": round(device_mib(), 1)} if is_on_device else {}))
            due_s += max(1.0, seconds / 40)
        time.sleep(max(0.0, begin_s + turns.loads / TURNS_PER_S - time.monotonic()))
    while loop.busy:
        turns.take(loop.step())
    elapsed_s = time.monotonic() - begin_s
    return {
        "seconds": round(elapsed_s, 1),
        "loads": turns.loads,
        "unloads": turns.unloads,
        "loads_per_s": round(turns.loads / elapsed_s, 2),
        "loads_refused": sum(answer is not None for answer in turns.answers),
        "requests": turns.number,
        "finished": turns.finished,
        "not_found": turns.not_found,
        "failed_otherwise": turns.others,
        "memory": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with made_adapters(given.model, count=CONTENTS, rank=given.rank) as made:
        size = (made.folder / made.names[0] / "adapter_model.safetensors").stat().st_size
        options = EngineOptions(
            device=DeviceKind(given.device),
            load_format=LoadFormat.DUMMY,
            lora_root=str(made.folder),
            max_loras=SLOTS,
            max_lora_rank=given.rank,
            num_blocks=256,
            max_num_seqs=8,
            max_model_tokens=128,
            lora_cache_bytes=8 * size,  # less than are loaded, so that some are read again
        )
        with closing(build_loop(resolve(made.definition, given.model, options))) as loop:
            settle_memory()
            found = churn(loop, made.names, given.seconds, is_on_device=given.device == "cuda")
    record = {"model": given.model.name, "commit": given.commit, "device": given.device, "adapter_bytes": size, **found}
    print(json.dumps({key: value for key, value in record.items() if key != "memory"}))
    for key in found["memory"][-1]:
        print(key, [each[key] for each in found["memory"]])
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
