"""Writes a checkpoint of random weights in the shapes of a Qwen3 config.json, to see how fast it reaches a GPU.

    python tools/device/checkpoint.py --model DIR --out DIR [--check]

`--check` (needs a GPU) loads some tensors through the engine's way and compares them with the file, bit for bit.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from openinfer_core import read_config
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights
from openinfer_qwen3.family import Qwen3Definition

BLOCK_BYTES = 64 << 20


def write_checkpoint(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Finite BF16 bits in [0, 1); returns the bytes of the tensors."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * ((-len(text) - 8) % 4096)
    block = np.random.default_rng(0).integers(0x3800, 0x3C00, BLOCK_BYTES // 2 + 97, np.uint16).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, len(block)):
            file.write(block[: end - begin])
    return end


def check_arrival(folder: Path) -> None:
    """Compares fused and whole tensors on the GPU with the file."""
    from openinfer_kernels.cuda import CudaOps

    layer, ops = "model.layers.1", CudaOps()
    stacks = [[f"{layer}.self_attn.{each}_proj.weight" for each in "qkv"], ["model.embed_tokens.weight"]]
    stacks.append([f"{layer}.mlp.{each}_proj.weight" for each in ("gate", "up")])
    with Checkpoint.open(folder) as checkpoint:
        source = RankWeights(checkpoint, rank=0, size=1)
        with ops.loading():
            loaded = [ops.upload_weight(*map(source.read, names)) for names in stacks]
        for names, array in zip(stacks, loaded, strict=True):
            expected = np.concatenate([checkpoint.read(name) for name in names])
            assert np.array_equal(ops.download(array).view(np.uint16), expected), f"{names} arrived damaged"
    ops.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    for path in arguments.model.iterdir():
        shutil.copy(path, arguments.out)
    began_s = time.perf_counter()
    definition = Qwen3Definition()
    total = write_checkpoint(arguments.out, definition.tensors(definition.parse(read_config(arguments.out))))
    print(f"wrote {total / 1e9:.2f} GB in {time.perf_counter() - began_s:.1f} s", flush=True)
    if arguments.check:
        check_arrival(arguments.out)
        print("what arrived on the GPU is what the file holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
