"""On the device: how fast a checkpoint of real shapes reaches the GPU from the page cache, and where a start goes.

    python tools/device/weights.py --model DIR --scratch /tmp --json FILE

Writes a checkpoint of random bits in the shapes of DIR's config.json below the scratch folder, starts an engine from it
three times and one with random weights, compares what arrived with the file, and prints each start's phases.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from openinfer_core import read_config
from openinfer_engine.checkpoint import Checkpoint, RankWeights
from openinfer_engine.composition import resolve
from openinfer_engine.launch import build_loop
from openinfer_engine.options import DeviceKind, EngineOptions, LoadFormat
from openinfer_kernels.cuda import CudaOps
from openinfer_qwen3.definition import Qwen3Definition

BLOCK_BYTES = 64 << 20


def write_checkpoint(folder: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Random finite BF16 bits; returns the bytes of the tensors."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * ((-len(text) - 8) % 4096)
    bits = np.random.default_rng(0).integers(0, 0x3F80, BLOCK_BYTES // 2 + 97, np.uint16).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, len(bits)):
            file.write(bits[: end - begin])
    return end


def check_arrival(folder: Path, names: list[str]) -> None:
    """Compares whole tensors, stacked ones among them, with the file."""
    ops = CudaOps()
    with Checkpoint.open(folder) as checkpoint:
        source = RankWeights(checkpoint, rank=0, size=1)
        with ops.loading(lambda num_bytes: None):
            loaded = ops.upload_weight(*(source.read(name) for name in names))
        expected = np.concatenate([checkpoint.read(name) for name in names])
        assert np.array_equal(ops.download(loaded).view(np.uint16), expected), f"{names} arrived damaged"
    ops.close()


def start(model_dir: Path, load_format: LoadFormat) -> dict[str, object]:
    options = EngineOptions(device=DeviceKind.CUDA, load_format=load_format, prefix_cache=False)
    composition = resolve(Qwen3Definition(), model_dir, options)
    loop = build_loop(composition)
    phases = {phase.name: round(phase.seconds, 3) for phase in loop.info.start}
    used = composition.backend.used_bytes()
    ledger = sum(composition.plan().memory_bytes.values())
    loop.close()
    return {
        "load_format": str(load_format),
        "phases": phases,
        "device_bytes": used,
        "ledger_bytes": ledger,
        "device_after": {phase.name: phase.device_bytes for phase in loop.info.start},
        "resident_bytes": loop.info.start[-1].resident_bytes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.scratch))
    try:
        for path in arguments.model.iterdir():
            shutil.copy(path, folder)
        config = Qwen3Definition().parse(read_config(folder))
        began_s = time.perf_counter()
        total = write_checkpoint(folder, dict(Qwen3Definition().tensors(config)))
        print(f"wrote {total / 1e9:.2f} GB in {time.perf_counter() - began_s:.1f} s", flush=True)
        layer = "model.layers.1"
        check_arrival(folder, [f"{layer}.self_attn.{x}_proj.weight" for x in "qkv"])
        check_arrival(folder, ["model.embed_tokens.weight"])
        check_arrival(folder, [f"{layer}.mlp.{x}_proj.weight" for x in ("gate", "up")])
        runs = [start(folder, LoadFormat.SAFETENSORS) for _ in range(3)]
        runs.append(start(folder, LoadFormat.DUMMY))
        for run in runs:
            run["weights_gb_per_s"] = round(total / 1e9 / run["phases"]["weights"], 1)
            print(msgspec.json.encode(run).decode(), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({"bytes": total, "runs": runs}, indent=2) + "\n")
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
