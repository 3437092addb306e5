"""Checkpoints with a file per rank: `model0-mp8.safetensors` to `model7-mp8.safetensors`.

All files have the same names, but for what one rank has alone. A tensor is either cut along one axis, in the order of
ranks, or repeated in every file; which, no file says: it follows from the shape of the whole tensor. So a model may be
cut into other numbers of ranks than its files.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_engine.weights.safetensors_file import TensorInfo
from openinfer_kernels import HostArray, WeightPart

_NAME = re.compile(r"model(\d+)-mp(\d+)\.safetensors")


def rank_files(model_dir: Path) -> list[Path]:
    """The files of all ranks in their order, or none; `InvalidCheckpoint` if some are missing or of another number."""
    found = [match for path in model_dir.glob("model*-mp*.safetensors") if (match := _NAME.fullmatch(path.name))]
    sizes = {int(match[2]) for match in found}
    if len(sizes) > 1:
        raise InvalidCheckpoint(f"{model_dir} has files for {', '.join(map(str, sorted(sizes)))} ranks; keep one set")
    names = [f"model{rank}-mp{size}.safetensors" for size in sizes for rank in range(size)]
    missing = sorted({*names} - {match[0] for match in found})
    if missing or len(found) != len(names):
        raise InvalidCheckpoint(f"{model_dir} lacks {', '.join(missing[:3])} of its files for {len(names)} ranks")
    return [model_dir / name for name in names]


class TensorFile(Protocol):
    """What a checkpoint needs of a file: safetensors, or GGUF."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> HostArray:
        """A whole tensor, not to be written to."""
        ...


@runtime_checkable
class HasParts(Protocol):
    """A `TensorFile` whose tensors need not come to the host."""

    def part(self, name: str) -> WeightPart:
        """A whole tensor, for `Ops.upload_weight`."""
        ...


class Pieces:
    """One tensor in one or several files."""

    def __init__(self, files: Sequence[TensorFile], name: str) -> None:
        self.files = files
        self._name = name
        self._axis: int | None = None
        self._repeated = len(files) == 1

    @property
    def info(self) -> TensorInfo:
        """The whole tensor's, where that is known; else the first piece's."""
        info = self.files[0].tensors[self._name]
        if self._axis is None:
            return info
        length = sum(file.tensors[self._name].shape[self._axis] for file in self.files)
        return msgspec.structs.replace(info, shape=(*info.shape[: self._axis], length, *info.shape[self._axis + 1 :]))

    @property
    def num_bytes(self) -> int:
        files = self.files[:1] if self._repeated else self.files
        return sum(file.tensors[self._name].num_bytes for file in files)

    def join(self, whole: tuple[int, ...]) -> None:
        """Finds out along which axis the tensor is cut, from the shape of the array that it is read as whole."""
        shapes = {file.tensors[self._name].array_shape for file in self.files}
        if len(self.files) == 1 or len(shapes) > 1:
            return
        (piece,) = shapes
        if piece == whole:
            self._repeated = True
        elif len(piece) == len(whole):
            axes = [axis for axis, (part, full) in enumerate(zip(piece, whole, strict=True)) if part != full]
            if len(axes) == 1 and piece[axes[0]] * len(self.files) == whole[axes[0]]:
                self._axis = axes[0]

    def read(self) -> HostArray:
        """The whole tensor; a copy where it was cut.

        Raises:
            InvalidCheckpoint: it is not known what whole tensors are.
        """
        if self._axis is not None:
            return np.concatenate([file.read(self._name) for file in self.files], axis=self._axis)
        if not self._repeated:
            raise InvalidCheckpoint(f"tensor {self._name!r} is in {len(self.files)} pieces, whose whole is not known")
        return self.files[0].read(self._name)

    def part(self) -> WeightPart:
        """The whole tensor, for `Ops.upload_weight`; raises as `read`."""
        first = self.files[0]
        return first.part(self._name) if isinstance(first, HasParts) else self.read()
