"""New weights by CUDA IPC handles of another process, at a model's real size: seconds, and whether tokens repeat.

    python3 tools/device/ipc_update.py MODEL [--times 3] [--commit NAME] [--json FILE]

MODEL is a folder with a `config.json` of Qwen3; its weights are random, in BF16. The trainer is this script in a
process of its own, which knows CuPy and cuda-bindings alone of what is used here.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ALLOCATION_BYTES = 1 << 30
ALIGN_BYTES = 256


def trainer() -> None:
    """Reads shapes, one line of JSON; says handles; makes other numbers at each further line, until there is none."""
    import cupy
    from cuda.bindings import driver

    shapes: list[tuple[str, list[int]]] = json.loads(sys.stdin.readline())
    told: list[Any] = []
    rooms: list[Any] = []
    begin = ALLOCATION_BYTES
    for name, shape in shapes:
        num_values = 1
        for length in shape:
            num_values *= length
        num_bytes = -(-2 * num_values // ALIGN_BYTES) * ALIGN_BYTES
        if begin + num_bytes > ALLOCATION_BYTES or not rooms:
            rooms.append(cupy.empty(max(ALLOCATION_BYTES, num_bytes), cupy.uint8))
            error, handle = driver.cuIpcGetMemHandle(rooms[-1].data.ptr)
            assert error == driver.CUresult.CUDA_SUCCESS, error
            handle_bytes, begin = ctypes.string_at(handle.getPtr(), 64).hex(), 0
        told.append((name, "BF16", shape, handle_bytes, begin))
        begin += num_bytes
    for seed in range(1000):
        for number, room in enumerate(rooms):
            bits = room.view(cupy.uint16)
            # BF16 of a size around 2 ** -7, of either sign: no number is none.
            values = cupy.arange(len(bits), dtype=cupy.uint32) * cupy.uint32(2654435761)
            values ^= cupy.uint32(seed * 7919 + number)
            bits[:] = cupy.uint32(0x3C00) + (values >> cupy.uint32(25)) + ((values & cupy.uint32(1)) << cupy.uint32(15))
        cupy.cuda.Device().synchronize()
        print(json.dumps(told), flush=True)
        if not sys.stdin.readline():
            return


def main() -> int:
    import msgspec

    from openinfer_core import read_config
    from openinfer_core.control import DeviceTensor, UpdateWeights
    from openinfer_core.process.resident import settle_memory
    from openinfer_core.provenance import provenance
    from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
    from openinfer_engine.options import DeviceKind, LoadFormat
    from openinfer_engine.testing import random_requests, run_at_once
    from openinfer_qwen3.family import Qwen3

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    definition: Any = Qwen3().definition
    specs = definition.tensors(definition.parse(read_config(arguments.model)))
    shapes = [(name, list(getattr(spec, "shape", spec))) for name, spec in specs.items()]
    num_bytes = 0
    for _, shape in shapes:
        size = 2
        for length in shape:
            size *= length
        num_bytes += size

    def tokens(loop: StepLoop) -> list[list[int]]:
        asked = random_requests(8, vocab_size=30000, max_prompt_tokens=300, max_tokens=16)
        return [answer.token_ids for _, answer in sorted(run_at_once(loop, asked).items())]

    options = EngineOptions(
        device=DeviceKind.CUDA,
        load_format=LoadFormat.DUMMY,
        enable_sleep=True,
        num_blocks=4096,
        batch_invariant=True,
        max_model_tokens=8192,
    )
    loop = build_loop(resolve(definition, arguments.model, options))
    settle_memory()
    rows: list[dict[str, Any]] = []
    said: list[list[list[int]]] = [tokens(loop)]
    command = [sys.executable, __file__, "--trainer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(shapes) + "\n")
        process.stdin.flush()
        for number in range(arguments.times):
            handles = json.loads(process.stdout.readline())
            tensors = tuple(
                DeviceTensor(name, dtype, tuple(shape), bytes.fromhex(handle), offset)
                for name, dtype, shape, handle, offset in handles
            )
            seconds: list[float] = []
            for _ in range(2):  # the same twice: their tokens must be the same
                begin_s = time.perf_counter()
                loop.control(UpdateWeights(tensors=tensors))
                seconds.append(time.perf_counter() - begin_s)
                said.append(tokens(loop))
            repeats = said[-1] == said[-2]
            differs = said[-1] != said[-3]
            row = {"what": f"update {number}", "seconds": [round(each, 3) for each in seconds]}
            row |= {"gb_per_s": round(num_bytes / min(seconds) / 1e9, 2), "repeats": repeats, "differs": differs}
            rows.append(row)
            print(row, flush=True)
            process.stdin.write("next\n")
            process.stdin.flush()
        process.kill()
    loop.close()
    if arguments.json is not None:
        set_up = {"model": f"{arguments.model.name}, random weights", "bytes": num_bytes, "tensors": len(shapes)}
        report = {**msgspec.to_builtins(provenance(commit=arguments.commit)), "set_up": set_up, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row["repeats"] and row["differs"] for row in rows) else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--trainer"]:
        trainer()
    else:
        sys.exit(main())
