"""Checkpoints: the tensors of a Hugging Face model folder, checked as a whole before any is read.

    Checkpoint.open(folder) ─► validate(names and shapes) ─► RankWeights(checkpoint, rank=…, size=…).read(name, cut)

A folder has one `model.safetensors`, or shards named by `model.safetensors.index.json`, or one `modelR-mpN.safetensors`
for each rank `R` of `N`, which have pieces of tensors under the same names (`rank_files.py`), or one `model.gguf`
(`openinfer_engine.gguf`). No other format is read, and nothing from outside the folder that an index names.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Self

import msgspec
import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_core.family import check_model_file
from openinfer_engine.gguf.file import GGUF_FILE, GgufFile
from openinfer_engine.model import Shard
from openinfer_engine.weights.rank_files import Pieces, TensorFile, rank_files
from openinfer_engine.weights.safetensors_file import SafetensorsFile, TensorInfo
from openinfer_engine.weights.stored_tensor import StoredTensor, TensorSpec
from openinfer_engine.weights.unique_json import decode_unique_json
from openinfer_kernels import HostArray, WeightPart

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

WEIGHT_DTYPES = frozenset({"BF16", "F16", "F32"})  # the dtypes that `Ops.upload_weight` reads

_PROBLEMS_SHOWN = 5


class _Index(msgspec.Struct):
    """`model.safetensors.index.json`; it also has a `metadata`, which says nothing that the files do not."""

    weight_map: dict[str, str]


class Checkpoint:
    """All tensors of a model folder. A context manager; arrays that were read stay valid after it is closed.

    Raises:
        InvalidCheckpoint: two files have a tensor of the same name.
    """

    def __init__(self, files: Collection[TensorFile]) -> None:
        self._pieces_of: dict[str, Pieces] = {}
        for file in files:
            for name in file.tensors:
                first = self._pieces_of.setdefault(name, Pieces([file], name)).files[0]
                if first is not file:
                    raise InvalidCheckpoint(f"tensor {name!r} is in {first.path.name} and in {file.path.name}")

    @classmethod
    def open(
        cls,
        model_dir: Path,
        *,
        keeps_gguf: bool = False,
        open_file: Callable[[Path], TensorFile] = SafetensorsFile,
        advice: str = "",
    ) -> "Checkpoint":
        """Opens a folder's files and checks that they are whole.

        `keeps_gguf`: matrices of a GGUF file stay quantised where they are in formats that products read. `open_file`
        opens each of safetensors. `advice` ends what is said of a folder that has no weights at all.

        Raises:
            InvalidCheckpoint: files are missing or damaged, or the index contradicts them.
        """
        single, index, gguf = (model_dir / name for name in (SINGLE_FILE, INDEX_FILE, GGUF_FILE))
        of_ranks = rank_files(model_dir)
        found = [path.name for path in (single, index, gguf) if path.exists()] + [path.name for path in of_ranks[:1]]
        if len(found) > 1:
            raise InvalidCheckpoint(f"{model_dir} has both {found[0]} and {found[1]}; remove the one that is stale")
        if single.exists():
            return cls([open_file(single)])
        if index.exists():
            return _open_shards(index, open_file)
        if gguf.exists():
            return cls([GgufFile(gguf, keeps_quantised=keeps_gguf)])
        if of_ranks:
            return cls._of_ranks([open_file(path) for path in of_ranks])
        raise InvalidCheckpoint(_no_weights(model_dir, advice))

    @classmethod
    def _of_ranks(cls, files: Sequence[TensorFile]) -> "Checkpoint":
        checkpoint = cls([])
        for name in dict.fromkeys(name for file in files for name in file.tensors):
            checkpoint._pieces_of[name] = Pieces([file for file in files if name in file.tensors], name)
        return checkpoint

    def join_pieces(self, expected: Mapping[str, TensorSpec]) -> None:
        """Tells a checkpoint of one file per rank what whole tensors are; nothing to do for others."""
        for name, spec in expected.items():
            if name in self._pieces_of:
                self._pieces_of[name].join(spec.shape if isinstance(spec, StoredTensor) else spec)

    def close(self) -> None:
        """Lets go of the files: no further tensor can be read. A map goes with the last array over it. Idempotent."""
        self._pieces_of.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return MappingProxyType({name: pieces.info for name, pieces in self._pieces_of.items()})

    @property
    def num_bytes(self) -> int:
        return sum(pieces.num_bytes for pieces in self._pieces_of.values())

    def validate(
        self,
        expected: Mapping[str, TensorSpec],
        *,
        ignorable: Collection[str] = (),
        dtypes: Collection[str] = WEIGHT_DTYPES,
    ) -> None:
        """Checks every tensor against what a model reads, before any is read.

        Args:
            expected: name -> shape of every tensor that the model reads; a `StoredTensor` has its own dtypes.
            ignorable: names that the model does not read and that may be there; one that ends with a dot stands for
                all that begin with it.
            dtypes: those of plain weights that the model reads.

        Raises:
            InvalidCheckpoint: tensors are missing, unknown, or of another shape or dtype; names the first few.
        """
        self.join_pieces(expected)
        problems = list(_problems(self.tensors, expected, ignorable, dtypes))
        if problems:
            shown = "; ".join(problems[:_PROBLEMS_SHOWN])
            more = f"; and {len(problems) - _PROBLEMS_SHOWN} more" if len(problems) > _PROBLEMS_SHOWN else ""
            raise InvalidCheckpoint(f"the checkpoint does not fit its config.json: {shown}{more}")

    def read(self, name: str) -> HostArray:
        """A whole tensor, read-only and not copied unless it is in pieces; BF16 as its bits in uint16.

        Raises:
            InvalidCheckpoint: there is none of that name.
        """
        return self._pieces(name).read()

    def part(self, name: str) -> WeightPart:
        """A whole tensor, for `Ops.upload_weight`; raises as `read`."""
        return self._pieces(name).part()

    def _pieces(self, name: str) -> Pieces:
        pieces = self._pieces_of.get(name)
        if pieces is None:
            raise InvalidCheckpoint(f"the checkpoint has no tensor {name!r}, or is closed")
        return pieces


class RankWeights:
    """A checkpoint as one rank sees it: the `WeightSource` of real weights."""

    def __init__(self, checkpoint: Checkpoint, *, rank: int, size: int) -> None:
        self._checkpoint = checkpoint
        self._rank = rank
        self._size = size

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> WeightPart:
        whole = self._checkpoint.part(name)
        if isinstance(whole, np.ndarray):
            return shard_for_rank(whole, name, shard, rank=self._rank, size=self._size)
        begin, end = share_of_rank(whole.shape, name, shard, rank=self._rank, size=self._size)
        if shard is Shard.WHOLE:
            return whole
        return whole.rows(begin, end) if shard is Shard.COLUMN_PARALLEL else whole.columns(begin, end)

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> HostArray:
        return shard_for_rank(self._checkpoint.read(name), name, shard, rank=self._rank, size=self._size)


def shard_for_rank(whole: HostArray, name: str, shard: Shard, *, rank: int, size: int) -> HostArray:
    """One rank's piece of a whole tensor, a view; `InvalidCheckpoint` if its size does not divide by the ranks."""
    if shard is Shard.WHOLE:
        return whole
    begin, end = share_of_rank(whole.shape, name, shard, rank=rank, size=size)
    return whole[begin:end] if shard is Shard.COLUMN_PARALLEL else whole[:, begin:end]


def share_of_rank(shape: tuple[int, ...], name: str, shard: Shard, *, rank: int, size: int) -> tuple[int, int]:
    """Begin and end of one rank's piece along the axis of the cut; `InvalidCheckpoint` if it does not divide."""
    if shard is Shard.WHOLE:
        return 0, shape[0]
    if shard >= len(shape) or shape[shard] % size:
        raise InvalidCheckpoint(
            f"tensor {name!r} of shape {list(shape)} cannot be sharded as {shard.name} for {size} ranks"
        )
    piece = shape[shard] // size
    return rank * piece, (rank + 1) * piece


def _open_shards(index: Path, open_file: Callable[[Path], TensorFile]) -> Checkpoint:
    try:
        check_model_file(index)
        decoded = decode_unique_json(index.read_bytes(), what=str(index))
        weight_map = msgspec.convert(decoded, _Index).weight_map
    except msgspec.ValidationError as error:
        raise InvalidCheckpoint(f"{index} is invalid: {error}") from error
    except OSError as error:
        raise InvalidCheckpoint(f"{index} cannot be read: {error.strerror}") from error
    names = sorted(set(weight_map.values()))
    for name in names:
        _check_shard_name(name, index)
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        listed = ", ".join(missing[:3])
        raise InvalidCheckpoint(f"{index.parent} lacks {len(missing)} of the {len(names)} files of its index: {listed}")
    files = {name: open_file(index.parent / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in files[name].tensors:
            raise InvalidCheckpoint(f"{index.name} places tensor {tensor!r} in {name}, which does not have it")
    return Checkpoint(files.values())


def _check_shard_name(name: str, index: Path) -> None:
    """Raises unless `name` is a plain name of a safetensors file: an index comes from strangers."""
    plain = PurePosixPath(name).name == name == PureWindowsPath(name).name and "\0" not in name
    if not plain or not name.endswith(".safetensors"):
        raise InvalidCheckpoint(f"{index} names the file {name!r}; only .safetensors files of the same folder are read")


def _no_weights(model_dir: Path, advice: str) -> str:
    found = sorted(
        path.name for path in model_dir.glob("*") if path.suffix in {".bin", ".pt", ".pth", ".safetensors", ".gguf"}
    )
    missing = f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if found:
        return (
            f"{missing}; it has {', '.join(found[:3])}; weights are read from safetensors, and from a GGUF file "
            "that is itself given as the model"
        )
    return f"{missing}; {advice}" if advice else missing


def _problems(
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, TensorSpec],
    ignorable: Collection[str],
    dtypes: Collection[str],
) -> Iterator[str]:
    for name, spec in expected.items():
        info = tensors.get(name)
        stored = isinstance(spec, StoredTensor)
        shape, possible = (spec.shape, spec.dtypes) if stored else (spec, sorted(dtypes))
        others = spec.other_shapes if stored else ()
        if info is None:
            yield f"{name} is missing"
        elif info.array_shape not in (shape, *others):
            yield f"{name} has shape {list(info.shape)}, not {list(shape)}"
        elif info.dtype not in possible:
            yield f"{name} has dtype {info.dtype}, not one of {', '.join(possible)}"
    parts = tuple(name for name in ignorable if name.endswith("."))
    for name in tensors:
        if name not in expected and name not in ignorable and not name.startswith(parts):
            yield f"{name} is not a tensor of this model"
