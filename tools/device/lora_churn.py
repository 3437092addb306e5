"""Loads and unloads adapters many times a second while requests run, and notes memory: does it stay flat?

Usage: python tools/device/lora_churn.py MODEL ADAPTERS SECONDS OUTPUT

ADAPTERS is a folder of adapter folders for MODEL. The engine runs in this process, on the CPU; each turn loads one
name, submits requests for adapters that are there or were just unloaded, runs steps, and unloads another.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

from openinfer_core import Failed, FailureKind, Finished, GenerateRequest, RequestId, SamplingParams, TokenEvent
from openinfer_core.control import LoadAdapter, UnloadAdapter
from openinfer_engine.engine_plan import resolve
from openinfer_engine.launch import build_loop
from openinfer_engine.loop import StepLoop
from openinfer_engine.options import EngineOptions
from openinfer_qwen3.family import Qwen3Definition

TURNS_PER_S = 12.0
SLOTS = 2


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


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


def main() -> None:
    model, adapters, seconds, output = sys.argv[1:]
    folders = sorted(path.name for path in Path(adapters).iterdir() if (path / "adapter_config.json").exists())
    options = EngineOptions(
        lora_root=adapters,
        max_loras=SLOTS,
        max_lora_rank=40,
        num_blocks=256,
        max_num_seqs=8,
        max_model_tokens=128,
        lora_cache_bytes=2 << 20,
    )
    loop = build_loop(resolve(Qwen3Definition(), Path(model), options))
    churn = Churn(loop, folders)
    begin_s, samples = time.monotonic(), list[dict[str, float]]()
    due_s = begin_s
    while (now_s := time.monotonic()) < begin_s + float(seconds):
        churn.turn()
        if now_s >= due_s:
            samples.append({"s": round(now_s - begin_s, 1), "resident_mib": round(resident_mib(), 1)})
            due_s += max(5.0, float(seconds) / 40)
        time.sleep(max(0.0, begin_s + churn.loads / TURNS_PER_S - time.monotonic()))
    while loop.busy:
        churn.take(loop.step())
    elapsed_s = time.monotonic() - begin_s
    loop.close()
    refused = [answer for answer in churn.answers if answer is not None]
    result = {
        "seconds": round(elapsed_s, 1),
        "loads": churn.loads,
        "unloads": churn.unloads,
        "loads_per_s": round(churn.loads / elapsed_s, 2),
        "loads_refused": len(refused),
        "requests": churn.number,
        "finished": churn.finished,
        "not_found": churn.not_found,
        "failed_otherwise": churn.others,
        "resident_mib": samples,
    }
    Path(output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "resident_mib"}))


if __name__ == "__main__":
    main()
