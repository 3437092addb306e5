"""Reading an adapter's folder: every name, shape and number is checked, and the content is named by a digest.

    adapter_config.json           `adapter_config.py`
    adapter_model.safetensors     base_model.model.<module>.lora_A.weight [r, in], ….lora_B.weight [out, r]

The file is read into memory once, and what was checked and hashed there is what is used: a file that is changed
meanwhile cannot harm. Its size is bounded by the model's own modules before anything is read.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_engine.lora.adapter_config import AdapterConfig, read_adapter_config
from openinfer_engine.weights.safetensors_file import SafetensorsFile, TensorInfo
from openinfer_kernels import HostArray

WEIGHTS_FILE = "adapter_model.safetensors"
MAX_HEADER_BYTES = 4 << 20
"""Of the file: about 30,000 tensors; an adapter of all projections of the largest published model has 1,300."""
DIGEST_BYTES = 16
_PIECE_BYTES = 4 << 20  # that is read or hashed as one
_MOST_THREADS = 16
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
_PEFT_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_LAYER = re.compile(r"(?P<wrapper>(?:model\.|language_model\.)*)(?P<module>layers\.[0-9]+\..+)")
_DTYPES = ("F32", "BF16", "F16")
_INFINITE_BITS: Mapping[str, int] = {"<u2": 0x7F80, "<f2": 0x7C00, "<f4": 0x7F800000}
"""Of positive infinity, which those of NaN follow; BF16 is read as its bits."""
_OTHER_MATHEMATICS = {
    "lora_magnitude_vector": "DoRA is not served; merge the adapter into the checkpoint",
    "lora_embedding_": "adapters of embeddings are not served",
    "lora_B.bias": "biases of adapters are not served",
    ".base_layer.": "adapters of expert tensors are not served",
}


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A matrix of the model that an adapter may change."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankPair:
    """What an adapter adds to one matrix: `scale * b @ a`."""

    a: HostArray
    """`[r, in]` as it is stored: float32, float16, or BF16 as its bits in uint16."""
    b: HostArray
    """`[out, r]`"""
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter in host memory, checked."""

    digest: bytes
    """Of what it computes: modules, ranks, scales and tensors; not of its name or its folder."""
    rank: int
    """The largest of its modules."""
    pairs: Mapping[str, LowRankPair]
    """By module, as `module_key` names it."""

    @property
    def num_bytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())


def module_key(name: str) -> str | None:
    """The name of a module whatever wraps the model: `layers.3.self_attn.q_proj`; None for one outside of its layers.

    Trainers and wrappers of vision models write `model.layers.`, `model.language_model.layers.` and the like.
    """
    found = _LAYER.fullmatch(name)
    return None if found is None else found["module"]


def read_adapter(folder: Path, *, modules: Mapping[str, AdaptedModule], max_rank: int) -> Adapter:
    """An adapter of a folder.

    Args:
        folder: in PEFT's layout.
        modules: what can be adapted, by `module_key`.
        max_rank: that a module of the adapter may have.

    Raises:
        InvalidCheckpoint: a file is missing or malformed, a tensor has not its module's shape, or is not finite.
        Refused: the adapter changes what is not served, or its rank is beyond `max_rank`.
    """
    config = read_adapter_config(folder)
    path = _weights_path(folder)
    with ThreadPoolExecutor(adapter_threads(), thread_name_prefix="openinfer-adapter-read") as pool:
        return _read_checked(path, pool, config=config, modules=modules, max_rank=max_rank)


def _read_checked(
    path: Path,
    pool: ThreadPoolExecutor,
    *,
    config: AdapterConfig,
    modules: Mapping[str, AdaptedModule],
    max_rank: int,
) -> Adapter:
    data = _read_bounded(path, pool, modules=modules, max_rank=max_rank)
    file = SafetensorsFile.of_bytes(data, path, max_header_bytes=MAX_HEADER_BYTES)
    found = _factors(file.tensors, modules, path)
    pairs = {
        key: _pair(file, factors, modules[key], config=config, max_rank=max_rank)
        for key, factors in sorted(found.items())
    }
    _require_finite(pairs, path, pool)
    return Adapter(digest=_digest(pairs, pool), rank=max(pair.a.shape[0] for pair in pairs.values()), pairs=pairs)


def _weights_path(folder: Path) -> Path:
    path = folder / WEIGHTS_FILE
    if not path.exists():
        for name in _PICKLES:
            if (folder / name).exists():
                raise Refused(f"{folder / name} is a pickle, which is never read; save it as {WEIGHTS_FILE}")
    return path


def _read_bounded(
    path: Path, pool: ThreadPoolExecutor, *, modules: Mapping[str, AdaptedModule], max_rank: int
) -> memoryview:
    most = MAX_HEADER_BYTES + 4 * max_rank * sum(each.rows + each.columns for each in modules.values())
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise InvalidCheckpoint(f"{path} is no regular file")
        if state.st_size > most:
            raise InvalidCheckpoint(
                f"{path} has {state.st_size} bytes; an adapter of this model of rank {max_rank} has at most {most} "
                "(--max-lora-rank)"
            )
        with path.open("rb") as file:
            return _read_pieces(file.fileno(), state.st_size, path, pool)
    except OSError as error:
        raise InvalidCheckpoint(f"{path} cannot be read: {error.strerror}") from error


def _read_pieces(descriptor: int, num_bytes: int, path: Path, pool: ThreadPoolExecutor) -> memoryview:
    """One thread brings about 2 GB/s of a file that lies in memory, most of it page faults of where it goes."""
    memory: Any = np.empty(num_bytes, np.uint8)  # a buffer, which typing knows from 3.12 on

    def read(begin: int) -> None:
        place, end = begin, min(begin + _PIECE_BYTES, num_bytes)
        while place < end:
            count = os.preadv(descriptor, [memory[place:end]], place)
            if count == 0:
                raise InvalidCheckpoint(f"{path} became shorter while it was read")
            place += count

    for _ in pool.map(read, range(0, num_bytes, _PIECE_BYTES)):
        pass  # raises what the thread has raised
    return memoryview(memory).toreadonly()


@dataclass(slots=True)
class _Factors:
    """Names of the two tensors of a module, and the module as the file names it."""

    module: str
    names: dict[Literal["A", "B"], str]


def _factors(
    tensors: Mapping[str, TensorInfo], modules: Mapping[str, AdaptedModule], path: Path
) -> Mapping[str, _Factors]:
    """By module; every tensor of the file is a factor of one that can be adapted."""
    found: dict[str, _Factors] = {}
    for name in tensors:
        for part, why in _OTHER_MATHEMATICS.items():
            if part in name:
                raise Refused(f"{path}: tensor {_shown(name)}: {why}")
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise Refused(f"{path}: tensor {_shown(name)} is no lora_A.weight or lora_B.weight of a module")
        module = match["module"].removeprefix(_PEFT_PREFIX)
        key = module_key(module)
        if key is None or key not in modules:
            kinds = ", ".join(sorted({each.rpartition(".")[2] for each in modules}))
            raise Refused(f"{path}: {_shown(module)} cannot be adapted; modules that can be: {kinds}")
        factors = found.setdefault(key, _Factors(module, {}))
        factor: Literal["A", "B"] = "A" if match["factor"] == "A" else "B"
        if factor in factors.names:
            raise InvalidCheckpoint(f"{path}: {_shown(factors.names[factor])} and {_shown(name)} are the same module's")
        factors.names[factor] = name
    if not found:
        raise InvalidCheckpoint(f"{path} has no tensors")
    for factors in found.values():
        if len(factors.names) < 2:
            raise InvalidCheckpoint(f"{path}: {_shown(factors.module)} has only one of lora_A and lora_B")
    return found


def _pair(
    file: SafetensorsFile, factors: _Factors, module: AdaptedModule, *, config: AdapterConfig, max_rank: int
) -> LowRankPair:
    rank = config.rank_of(factors.module)
    if rank > max_rank:
        raise Refused(
            f"{file.path}: {_shown(factors.module)} has rank {rank}; this engine was started for at most {max_rank} "
            "(--max-lora-rank)"
        )
    shapes: dict[Literal["A", "B"], tuple[int, int]] = {"A": (rank, module.columns), "B": (module.rows, rank)}
    for factor, shape in shapes.items():
        name = factors.names[factor]
        info = file.tensors[name]
        if info.dtype not in _DTYPES:
            raise Refused(f"{file.path}: {_shown(name)} is of dtype {info.dtype}; read are {', '.join(_DTYPES)}")
        if info.shape != shape:
            raise InvalidCheckpoint(
                f"{file.path}: {_shown(name)} has shape {list(info.shape)}; of this model, and of rank {rank}, it "
                f"must be {list(shape)}"
            )
    a, b = file.read(factors.names["A"]), file.read(factors.names["B"])
    return LowRankPair(a=a, b=b, scale=config.scale_of(factors.module))


def _require_finite(pairs: Mapping[str, LowRankPair], path: Path, pool: ThreadPoolExecutor) -> None:
    keys = sorted(pairs)
    step = -(-len(keys) // (2 * adapter_threads()))
    tasks = [keys[begin : begin + step] for begin in range(0, len(keys), step)]
    for found in pool.map(_not_finite, repeat(pairs), tasks):
        if found is not None:
            raise InvalidCheckpoint(f"{path}: {_shown(found)} has values that are not finite")


def _not_finite(pairs: Mapping[str, LowRankPair], keys: Sequence[str]) -> str | None:
    """The first module with such values."""
    return next((key for key in keys if not (_is_finite(pairs[key].a) and _is_finite(pairs[key].b))), None)


def _is_finite(array: HostArray) -> bool:
    infinite, size = _INFINITE_BITS[array.dtype.str], array.dtype.itemsize
    sign = 1 << 8 * size - 1
    # As integers: the largest with a sign is positive, the largest without is negative. No array is made for this.
    return bool(array.view(f"i{size}").max() < infinite and array.view(f"u{size}").max() < infinite + sign)


def _digest(pairs: Mapping[str, LowRankPair], pool: ThreadPoolExecutor) -> bytes:
    """Of what is computed. Tensors are hashed in pieces, by several threads, which blake2b lets run at a time."""
    pieces: list[bytes | memoryview] = []
    for key, pair in pairs.items():
        shapes = f"{pair.a.dtype.str} {pair.a.shape} {pair.b.dtype.str} {pair.b.shape}"
        pieces.append(f"{key}\0{pair.scale.hex()}\0{shapes}".encode())
        for array in (pair.a, pair.b):
            pieces += _cut(array)
    # Few tasks of many pieces: adapters of small ranks have hundreds of tensors that are hashed in no time.
    step = -(-len(pieces) // (4 * adapter_threads()))
    tasks = [pieces[begin : begin + step] for begin in range(0, len(pieces), step)]
    return _hashed(b"".join(pool.map(_all_hashed, tasks)))


def adapter_threads() -> int:
    """That work on one adapter at a time."""
    return min(_MOST_THREADS, os.cpu_count() or 1)


def _cut(array: HostArray) -> Iterable[memoryview]:
    contiguous: Any = np.ascontiguousarray(array)  # a buffer, which typing knows from 3.12 on
    data = memoryview(contiguous).cast("B")
    return (data[begin : begin + _PIECE_BYTES] for begin in range(0, len(data), _PIECE_BYTES))


def _all_hashed(pieces: Sequence[bytes | memoryview]) -> bytes:
    return b"".join(map(_hashed, pieces))


def _hashed(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"openinfer-lora").digest()


def _shown(name: str) -> str:
    return repr(name if len(name) <= 160 else f"{name[:157]}...")
