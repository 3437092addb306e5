"""Reading an adapter's folder: every name, shape and number is checked, and the content is named by a digest.

    adapter_config.json           `adapter_config.py`
    adapter_model.safetensors     base_model.model.<module>.lora_A.weight [r, in], ….lora_B.weight [out, r]

The file's size is bounded by the model's own modules before anything is read, and all that its header says is checked
before its tensors are (`adapter_tensors.py`).
"""

import re
import stat
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from blake3 import blake3

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_engine.lora.adapter_config import AdapterConfig, read_adapter_config
from openinfer_engine.lora.adapter_tensors import (
    READ_DTYPES,
    NotFiniteError,
    ReadingThreads,
    TakeTensor,
    TensorFile,
    TensorOrder,
    read_exactly,
    read_tensors,
)
from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES, TensorInfo, read_header
from openinfer_kernels import HostArray

WEIGHTS_FILE = "adapter_model.safetensors"
DIGEST_BYTES = 16
_PREFIX = b"openinfer-lora 2\0"
"""Of what a digest is of: a change of that has another number, as KV in tiers is found by it."""
MAX_HEADER_BYTES = 4 << 20
"""Of the file: about 30,000 tensors; an adapter of all projections of the largest published model has 1,300."""
_LENGTH_BYTES = 8
_MOST_LAYOUTS, _KEPT_HEADER_BYTES = 4, 256 << 10
"""Headers that are known, and how long they may be: of 1,300 tensors it is 190 KiB."""
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
_PEFT_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_LAYER = re.compile(r"(?P<wrapper>(?:model\.|language_model\.)*)(?P<module>layers\.[0-9]+\..+)")
_OTHER_MATHEMATICS = {
    "lora_magnitude_vector": "DoRA is not served; merge the adapter into the checkpoint",
    "lora_embedding_": "adapters of embeddings are not served",
    "lora_B.bias": "biases of adapters are not served",
    ".base_layer.": "adapters of expert tensors are not served",
}


Factor: TypeAlias = Literal["A", "B"]
_KEPT_CHARACTERS = 200
"""Of a name whose parts are kept: longer ones would be a client's way to fill memory."""


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A matrix of the model that an adapter may change."""

    rows: int
    columns: int


class LowRank(NamedTuple):
    """What an adapter says of one matrix: it adds `scale * B @ A`."""

    rank: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter that was read, and checked."""

    digest: bytes
    """Of what it computes: modules, ranks, scales and tensors; not of its name or its folder."""
    rank: int
    """The largest of its modules."""


class TakesFactors(Protocol):
    """Where factors go while an adapter is read. What was taken of one that turns out to be refused is of no use."""

    def begin(self, modules: Mapping[str, LowRank], *, is_bfloat16: bool) -> HostArray | None:
        """What comes, by module; shapes and ranks were checked. `is_bfloat16`: every tensor is.

        Returns:
            Bytes for all tensors: A and B of each of these modules, one after the other in this order. They are read
            into them, and nothing is taken. None: each is taken.
        """
        ...

    def lay_out(self) -> None:
        """Once, while other threads read: what `begin` can leave for later."""
        ...

    def take(self, module: str, factor: Factor, values: HostArray) -> None:
        """A `[r, in]` or B `[out, r]`: float32, float16, or BF16 as its bits in uint16; finite, of any alignment.

        In memory that is used again after the call. Called from several threads, once for each factor.
        """
        ...


def module_key(name: str) -> str | None:
    """The name of a module whatever wraps the model: `layers.3.self_attn.q_proj`; None for one outside of its layers.

    Trainers and wrappers of vision models write `model.layers.`, `model.language_model.layers.` and the like.
    """
    found = _LAYER.fullmatch(name)
    return None if found is None else found["module"]


def read_adapter(
    folder: Path,
    *,
    modules: Mapping[str, AdaptedModule],
    max_rank: int,
    target: TakesFactors | None = None,
    threads: ReadingThreads | None = None,
) -> Adapter:
    """An adapter of a folder.

    Args:
        folder: in PEFT's layout.
        modules: what can be adapted, by `module_key`.
        max_rank: that a module of the adapter may have.
        target: gets its factors; without one they are checked alone.
        threads: that read it; by default some that end with the call.

    Raises:
        InvalidCheckpoint: a file is missing or malformed, a tensor has not its module's shape, or is not finite.
        Refused: the adapter changes what is not served, or its rank is beyond `max_rank`.
    """
    config = read_adapter_config(folder)
    path = _weights_path(folder)
    with _opened(path, modules=modules, max_rank=max_rank) as (descriptor, num_bytes):
        layout = LAYOUTS.of_file(descriptor, num_bytes, modules, path)
        says = _says(config, layout, path, max_rank=max_rank)
        into = None if target is None else target.begin(says, is_bfloat16=layout.order.dtype == "BF16")

        def lay_out() -> None:
            _ = layout.digest  # kept
            if target is not None:
                target.lay_out()

        try:
            numbers = read_tensors(
                TensorFile(descriptor, path, layout.data_start),
                layout.order,
                threads=threads or ReadingThreads(),
                into=into,
                take=_taking(layout.factors, target if into is None else None),
                meanwhile=lay_out,
            )
        except NotFiniteError as name:
            raise InvalidCheckpoint(f"{path}: {_shown(str(name))} has values that are not finite") from None
    scales = np.array([each.scale for each in says.values()], "<f8")
    digest = blake3(_PREFIX + layout.digest + scales.tobytes() + numbers).digest(DIGEST_BYTES)
    return Adapter(digest=digest, rank=max(each.rank for each in says.values()))


def _taking(found: "Mapping[str, _Factors]", target: TakesFactors | None) -> TakeTensor | None:
    if target is None:
        return None
    places: dict[str, tuple[str, Factor]] = {}
    for key, factors in found.items():
        places |= {name: (key, factor) for factor, name in factors.names.items()}
    return lambda name, values: target.take(*places[name], values)


def _weights_path(folder: Path) -> Path:
    path = folder / WEIGHTS_FILE
    if not path.exists():
        for name in _PICKLES:
            if (folder / name).exists():
                raise Refused(f"{folder / name} is a pickle, which is never read; save it as {WEIGHTS_FILE}")
    return path


@contextmanager
def _opened(path: Path, *, modules: Mapping[str, AdaptedModule], max_rank: int) -> Generator[tuple[int, int]]:
    """A descriptor, and how many bytes the file has."""
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
        with path.open("rb", buffering=0) as file:
            yield file.fileno(), state.st_size
    except OSError as error:
        raise InvalidCheckpoint(f"{path} cannot be read: {error.strerror}") from error


@dataclass(slots=True)
class _Factors:
    """Names of the two tensors of a module, and the module as the file names it."""

    module: str
    names: dict[Factor, str]

    @property
    def in_order(self) -> tuple[str, str]:
        return self.names["A"], self.names["B"]


@lru_cache(maxsize=4096)  # adapters of one model have the same names, hundreds of them
def _parsed(name: str) -> tuple[str, str | None, Factor] | str:
    """Of a tensor's name the module, its key and the factor; else what it is instead."""
    for part, why in _OTHER_MATHEMATICS.items():
        if part in name:
            return f": {why}"
    match = _FACTOR.fullmatch(name)
    if match is None:
        return " is no lora_A.weight or lora_B.weight of a module"
    module = match["module"].removeprefix(_PEFT_PREFIX)
    return module, module_key(module), "A" if match["factor"] == "A" else "B"


def _factors(
    tensors: Mapping[str, TensorInfo], modules: Mapping[str, AdaptedModule], path: Path
) -> Mapping[str, _Factors]:
    """By module; every tensor of the file is a factor of one that can be adapted."""
    found: dict[str, _Factors] = {}
    for name in tensors:
        parsed = _parsed(name) if len(name) <= _KEPT_CHARACTERS else _parsed.__wrapped__(name)
        if isinstance(parsed, str):
            raise Refused(f"{path}: tensor {_shown(name)}{parsed}")
        module, key, factor = parsed
        if key is None or key not in modules:
            kinds = ", ".join(sorted({each.rpartition(".")[2] for each in modules}))
            raise Refused(f"{path}: {_shown(module)} cannot be adapted; modules that can be: {kinds}")
        factors = found.get(key)
        if factors is None:
            factors = found[key] = _Factors(module, {})
        if factor in factors.names:
            raise InvalidCheckpoint(f"{path}: {_shown(factors.names[factor])} and {_shown(name)} are the same module's")
        factors.names[factor] = name
    if not found:
        raise InvalidCheckpoint(f"{path} has no tensors")
    for factors in found.values():
        if len(factors.names) < 2:
            raise InvalidCheckpoint(f"{path}: {_shown(factors.module)} has only one of lora_A and lora_B")
    return found


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """What the header of a file says."""

    data_start: int
    tensors: Mapping[str, TensorInfo]
    factors: Mapping[str, _Factors]
    """By module, in their order."""
    order: TensorOrder
    """A and B of each module, whatever the file's order is; PEFT's is this one."""
    rank: int | None
    """Of all modules, whose tensors are of its shapes and of dtypes that are read; None: each is to be checked."""
    modules: Mapping[str, AdaptedModule]
    """That it was checked for."""

    @cached_property
    def digest(self) -> bytes:
        """Of modules, dtypes and shapes, in the order of the numbers."""
        parts: list[str] = []
        for key, each in self.factors.items():
            a, b = (self.tensors[name] for name in each.in_order)
            shapes = f"{NUMPY_DTYPES[a.dtype].str} {a.shape} {NUMPY_DTYPES[b.dtype].str} {b.shape}"
            parts.append(f"{key}\0{shapes}\0")
        return blake3("".join(parts).encode()).digest()


class Layouts:
    """The last headers that were read, each with what was found in it.

    Adapters of one model that were trained alike have one header, byte for byte, and to parse it takes the interpreter
    a third as long as several threads need for the numbers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[bytes, int], _Layout] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def of_file(self, descriptor: int, num_bytes: int, modules: Mapping[str, AdaptedModule], path: Path) -> _Layout:
        """Raises as `read_header`, or because tensors are no factors of these modules."""
        header = _short_header(descriptor, num_bytes, path)
        key = header, num_bytes
        with self._lock:
            known = self._kept.get(key)
        if known is not None and known.modules is modules:
            return known
        found = _layout(
            lambda begin, end: header[begin:end] if header else read_exactly(descriptor, begin, end, path),
            num_bytes,
            modules,
            path,
        )
        if header:
            with self._lock:
                self._kept.pop(key, None)
                self._kept[key] = found
                if len(self._kept) > _MOST_LAYOUTS:
                    del self._kept[next(iter(self._kept))]
        return found


LAYOUTS = Layouts()


def _short_header(descriptor: int, num_bytes: int, path: Path) -> bytes:
    """With the length before it; nothing, if it is too long to be kept, or no header."""
    if num_bytes < _LENGTH_BYTES:
        return b""
    size = _LENGTH_BYTES + int.from_bytes(read_exactly(descriptor, 0, _LENGTH_BYTES, path), "little")
    return read_exactly(descriptor, 0, size, path) if size <= min(num_bytes, _KEPT_HEADER_BYTES) else b""


def _layout(
    read: Callable[[int, int], bytes], num_bytes: int, modules: Mapping[str, AdaptedModule], path: Path
) -> _Layout:
    data_start, tensors = read_header(read, num_bytes=num_bytes, path=path, max_header_bytes=MAX_HEADER_BYTES)
    factors = dict(sorted(_factors(tensors, modules, path).items()))
    order = TensorOrder.of([(name, tensors[name]) for each in factors.values() for name in each.in_order])
    rank = _common_rank(tensors, factors, modules)
    return _Layout(data_start=data_start, tensors=tensors, factors=factors, order=order, rank=rank, modules=modules)


def _says(config: AdapterConfig, layout: _Layout, path: Path, *, max_rank: int) -> Mapping[str, LowRank]:
    """Of each module; raises unless its tensors are of its shapes and of a dtype that is read."""
    if layout.rank == config.rank and config.rank <= max_rank and not (config.rank_pattern or config.alpha_pattern):
        return dict.fromkeys(layout.factors, LowRank(config.rank, config.scale_of("")))
    says: dict[str, LowRank] = {}
    for key, factors in layout.factors.items():
        says[key] = LowRank(config.rank_of(factors.module), config.scale_of(factors.module))
        _check(layout.tensors, factors, layout.modules[key], path, rank=says[key].rank, max_rank=max_rank)
    return says


def _check(
    tensors: Mapping[str, TensorInfo], factors: _Factors, module: AdaptedModule, path: Path, *, rank: int, max_rank: int
) -> None:
    if rank > max_rank:
        raise Refused(
            f"{path}: {_shown(factors.module)} has rank {rank}; this engine was started for at most {max_rank} "
            "(--max-lora-rank)"
        )
    for name, shape in zip(factors.in_order, _shapes(module, rank), strict=True):
        info = tensors[name]
        if info.dtype not in READ_DTYPES:
            raise Refused(f"{path}: {_shown(name)} is of dtype {info.dtype}; read are {', '.join(READ_DTYPES)}")
        if info.shape != shape:
            raise InvalidCheckpoint(
                f"{path}: {_shown(name)} has shape {list(info.shape)}; of this model, and of rank {rank}, it "
                f"must be {list(shape)}"
            )


def _shapes(module: AdaptedModule, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of A and B."""
    return (rank, module.columns), (module.rows, rank)


def _common_rank(
    tensors: Mapping[str, TensorInfo], factors: Mapping[str, _Factors], modules: Mapping[str, AdaptedModule]
) -> int | None:
    ranks: set[int] = set()
    for key, each in factors.items():
        a, b = (tensors[name] for name in each.in_order)
        ranks.add(b.shape[-1] if b.shape else 0)
        is_read = a.dtype in READ_DTYPES and b.dtype in READ_DTYPES
        if len(ranks) > 1 or not is_read or (a.shape, b.shape) != _shapes(modules[key], *ranks):
            return None
    return ranks.pop()


def _shown(name: str) -> str:
    return repr(name if len(name) <= 160 else f"{name[:157]}...")
