"""Reading safetensors whose writer is at work elsewhere: by copies, never through a memory map.

A map of a file that another process cuts off ends this one by a signal; a read that comes short is an error like any
other. So weights that are changed at run time are read here, from folders and from shared memory.
"""

import math
import os
import stat
import sys
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_core.family import check_model_file
from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES, TensorInfo, read_header
from openinfer_kernels import HostArray

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux shows POSIX shared memory by name
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CopiedSafetensorsFile:
    """One open file; each tensor is a copy of its own. Closed by `close`.

    Args:
        path: for messages.
        file: is closed with it, and if this raises.

    Raises:
        InvalidCheckpoint: it cannot be read, or is not a valid safetensors file.
    """

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path = path
        self._file = file
        self._written = _written(file)  # before a byte is read
        self.tensors: Mapping[str, TensorInfo] = {}
        try:
            self._data_start, self.tensors = read_header(
                lambda begin, end: self._copy(begin, end - begin).tobytes(),
                num_bytes=os.fstat(file.fileno()).st_size,
                path=path,
            )
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Path) -> "CopiedSafetensorsFile":
        """A regular file."""
        try:
            check_model_file(path)
            return cls(path, FileIO(path))
        except OSError as error:
            raise InvalidCheckpoint(f"{path} cannot be read: {error.strerror}") from error

    @classmethod
    def open_segment(cls, name: str) -> "CopiedSafetensorsFile":
        """Shared memory of that name; only this user may own it, and write to it."""
        path = _SHARED_MEMORY / name
        if sys.platform != "linux":
            raise InvalidCheckpoint("weights are taken from shared memory on Linux only; give a folder")
        try:
            file = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
        except OSError as error:
            raise InvalidCheckpoint(f"shared memory {name!r} cannot be opened: {error.strerror}") from error
        said = os.fstat(file.fileno())
        is_ours = stat.S_ISREG(said.st_mode) and said.st_uid == os.geteuid() and not said.st_mode & _OTHERS_WRITE
        if not is_ours:
            file.close()
            raise InvalidCheckpoint(f"shared memory {name!r} is of another user, or others may write to it")
        return cls(path, file)

    def read(self, name: str) -> HostArray:
        """A whole tensor.

        Raises:
            KeyError: the file has no such tensor.
            InvalidCheckpoint: the file has become shorter since it was opened, or is closed.
        """
        info = self.tensors[name]
        num_bytes = math.prod(info.array_shape) * NUMPY_DTYPES[info.dtype].itemsize
        copied = self._copy(self._data_start + info.data_offsets[0], num_bytes)
        return copied.view(NUMPY_DTYPES[info.dtype]).reshape(info.array_shape)

    def check_unwritten(self) -> None:
        """Raises `InvalidCheckpoint` if it was written to since it was opened; to remove or rename it is no write."""
        if _written(self._file) != self._written:
            raise InvalidCheckpoint(f"{self.path} was written to while it was read")

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    def _copy(self, begin: int, num_bytes: int) -> HostArray:
        copied = np.empty(num_bytes, np.uint8)
        room = copied.data
        try:
            self._file.seek(begin)
            while room:
                count = self._file.readinto(room)
                if not count:
                    raise InvalidCheckpoint(f"{self.path} was cut off while it was read")
                room = room[count:]
        except (OSError, ValueError) as error:  # ValueError: it is closed
            raise InvalidCheckpoint(f"{self.path} cannot be read: {error}") from error
        return copied


def _written(file: FileIO) -> tuple[int, int]:
    """Size, and when the bytes were last written (ns)."""
    said = os.fstat(file.fileno())
    return said.st_size, said.st_mtime_ns
