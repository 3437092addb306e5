"""A trainer's process with weights on a GPU, for `test_ipc_update_gpu.py`: CuPy and cuda-bindings, nothing of ours.

    python gpu_trainer.py FILE

It says one line of JSON: name, dtype, shape, handle in hexadecimal and offset of each tensor. It goes on until its
standard input ends, and then frees what it had.
"""

import ctypes
import json
import sys

import cupy
from cuda.bindings import driver
from safetensors.numpy import load_file

ALIGN_BYTES = 256


def shared(address: int) -> tuple[str, int]:
    """The handle of the allocation that an address lies in, and the address's offset in it."""
    error, base, _ = driver.cuMemGetAddressRange(address)
    assert error == driver.CUresult.CUDA_SUCCESS, error
    error, handle = driver.cuIpcGetMemHandle(base)
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return ctypes.string_at(handle.getPtr(), 64).hex(), address - int(base)


def main() -> None:
    weights = load_file(sys.argv[1])
    room = cupy.empty(sum(-(-each.nbytes // ALIGN_BYTES) * ALIGN_BYTES for each in weights.values()), cupy.uint8)
    tensors, begin = [], 0
    for name, each in weights.items():
        # Every other one lies with others in one allocation.
        if len(tensors) % 2:
            array = cupy.asarray(each)
        else:
            array = room[begin : begin + each.nbytes].view(each.dtype).reshape(each.shape)
            array.set(each)
            begin += -(-each.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        tensors.append((array, name, {"float32": "F32", "float16": "F16", "uint16": "BF16"}[each.dtype.name]))
    cupy.cuda.Device().synchronize()  # what wrote them has ended
    told = [(name, dtype, array.shape, *shared(array.data.ptr)) for array, name, dtype in tensors]
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
