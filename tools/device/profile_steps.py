"""Kernels of an engine's steps by the time that they take, of decoding and of prompts: where a step goes.

    python3 tools/device/profile_steps.py MODEL --size 1x1024 8x1024 [--layers N] [--option NAME=VALUE …] [--json FILE]
                                          [--adapters N] [--rank R]

MODEL needs a config.json alone; weights are random. `--layers` takes the first layers of the model, for one that is too
large for a GPU. With `--adapters` requests take turns with so many of all projections. Times are PyTorch's profiler's,
which sees all kernels of the process, those of captured steps as well, and slows them down: compare kernels, not sums.
Of several ranks it is rank 0.
"""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = folders()

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from openinfer_core import (  # noqa: E402
    GenerateRequest,
    RequestId,
    SamplingParams,
    Tokens,
    claim,
    list_plugins,
    read_config,
)
from openinfer_core.plugins import MODELS  # noqa: E402
from openinfer_engine import StepLoop, build_loop, resolve  # noqa: E402
from openinfer_engine.testing.adapters import write_adapter  # noqa: E402

WARM_STEPS, STEPS = 8, 16
PER_LAYER = ("layer_types", "mlp_layer_types", "compress_ratios")
"""Lists in a config with an entry for each layer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--size", nargs="+", default=["1x1024"], metavar="BATCHxPROMPT")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--rank", type=int, default=16, help="of adapters")
    parser.add_argument("--top", type=int, default=30, help="kernels that are printed")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    config = dict(read_config(given.model))
    if given.layers:
        behind = config["num_hidden_layers"]  # blocks that draft tokens stand there
        lists = {name: config[name] for name in PER_LAYER if name in config}
        config |= {name: [*values[: given.layers], *values[behind:]] for name, values in lists.items()}
        config["num_hidden_layers"] = given.layers
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options: dict[str, Any] = dict(each.split("=", 1) for each in given.option)
        adapters = made_adapters(Path(folder), config, given.adapters, given.rank)
        if adapters:
            options |= {"lora": [f"{name}={Path(folder) / name}" for name in adapters], "lora_root": folder}
            options |= {"max_loras": len(adapters), "max_lora_rank": given.rank}
        loop = open_loop(Path(folder), options)
        for size in given.size:
            batch, prompt = map(int, size.split("x"))
            found[size] = profile(Batch(loop, batch, prompt, adapters), given.top)
        loop.close()
    if given.json:
        given.json.write_text(json.dumps({"config": config, "sizes": found}, indent=1) + "\n")


def made_adapters(folder: Path, config: dict[str, Any], count: int, rank: int) -> list[str]:
    family: Any = claim(config, list_plugins(MODELS))[0]
    names = [f"adapter-{seed}" for seed in range(count)]
    for seed, name in enumerate(names):
        write_adapter(folder / name, family.definition, config, rank=rank, seed=seed)
    return names


def open_loop(folder: Path, options: dict[str, Any]) -> StepLoop:
    family: Any = claim(read_config(folder), list_plugins(MODELS))[0]
    fields = {"device": "cuda", "load_format": "dummy", "prefix_cache": False, "grammar_compiler": "none", **options}
    return build_loop(resolve(family.definition, folder, msgspec.convert(fields, family.options_type, strict=False)))


class Batch:
    """Requests of one size, begun together."""

    def __init__(self, loop: StepLoop, batch: int, prompt_tokens: int, adapters: list[str]) -> None:
        self._loop, self._size, self._adapters = loop, (batch, prompt_tokens), adapters
        self._rng = np.random.default_rng(0)
        self._begun: set[int] = set()

    def submit(self) -> None:
        self._begun.clear()
        for index in range(self._size[0]):
            prompt = tuple(self._rng.integers(0, self._loop.info.num_token_ids, self._size[1]).tolist())
            sampling = SamplingParams(max_tokens=WARM_STEPS + 2 * STEPS + 64, temperature=0.0)
            adapter = self._adapters[index % len(self._adapters)] if self._adapters else None
            request = GenerateRequest(
                request_id=RequestId(index), prompt_token_ids=prompt, sampling=sampling, lora=adapter
            )
            assert not self._loop.submit(request)

    def until_all_decode(self) -> None:
        while len(self._begun) < self._size[0]:
            self._begun.update(event.request_id for event in self._loop.step() if isinstance(event, Tokens))

    def decode(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self._loop.step()

    def __str__(self) -> str:
        return f"{self._size[0]} x {self._size[1]}"

    def drop(self) -> None:
        for index in range(self._size[0]):
            self._loop.abort(RequestId(index))
        while self._loop.busy:
            self._loop.step()


def profile(requests: Batch, top: int) -> dict[str, Any]:
    requests.submit()
    requests.until_all_decode()
    requests.drop()
    requests.submit()
    prompts = kernels(requests.until_all_decode)
    requests.decode(WARM_STEPS)
    steps = kernels(requests.decode)
    requests.drop()
    show(f"{requests}: prompts, in all", prompts, 1, top)
    show(f"{requests}: a decode step", steps, STEPS, top)
    return {"prompts": prompts, "decode_steps": STEPS, "decode": steps}


def kernels(run: Callable[[], None]) -> dict[str, tuple[int, float]]:
    """Of what `run` has the GPU do: calls and microseconds by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.profiler.DeviceType.CUDA:
            found[event.name].append(event.device_time)
    rows = {name: (len(times), float(sum(times))) for name, times in found.items()}
    return dict(sorted(rows.items(), key=lambda row: -row[1][1]))


def show(title: str, rows: dict[str, tuple[int, float]], steps: int, top: int) -> None:
    total = sum(time for _, time in rows.values())
    print(f"{title}: {total / steps:.0f} us in {sum(calls for calls, _ in rows.values()) / steps:.0f} kernels")
    for name, (calls, time) in list(rows.items())[:top]:
        print(f"  {time / steps:9.1f} us  {time / total:5.1%}  {calls / steps:7.1f} x {time / calls:8.2f}  {name[:90]}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
