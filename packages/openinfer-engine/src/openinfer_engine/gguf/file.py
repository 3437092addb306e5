"""`GgufFile`: a GGUF file's tensors under a Hugging Face checkpoint's names.

Matrices in the formats of `GGML_FORMATS` may be kept as they are: matrix X then is no `X.weight` but its parts, such as
`X.q4_1`, `X.scales` and `X.minimums`. All else that is quantised is dequantised when it is read.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_core.errors import brought_by
from openinfer_engine.gguf.blocks import parts_of, read_part
from openinfer_engine.gguf.config import Architecture, architecture_of
from openinfer_engine.gguf.header import FORMATS, Header, StoredAt, map_file, read_header
from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES, TensorInfo
from openinfer_engine.weights.stored_format import GGML_FORMATS
from openinfer_kernels import HostArray

GGUF_FILE = "model.gguf"

_AS_STORED = frozenset({"F32", "F16", "BF16"})
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class _Place(NamedTuple):
    """Where a published tensor comes from."""

    ggml: str
    part: str | None
    """Of the matrix, where it is taken apart."""


class GgufFile:
    """One open file. It must not be changed while it is open.

    Args:
        path: the file.
        keeps_quantised: whether matrices in `GGML_FORMATS` are presented as their parts.

    Raises:
        InvalidCheckpoint: it cannot be read, or is no valid GGUF file.
        Refused: its architecture is not read.
    """

    def __init__(self, path: Path, *, keeps_quantised: bool = False) -> None:
        self.path = path
        self._map = map_file(path)
        self.header: Header = read_header(self._map, path)
        self._architecture = architecture_of(self.header.metadata, path)
        kept = _kept(self.header, self._architecture) if keeps_quantised else {}
        self._places: dict[str, _Place] = {}
        tensors: dict[str, TensorInfo] = {}
        for ggml in self.header.tensors:
            published = _published(ggml, self._architecture)
            if published is None:
                continue
            for name, info, place in _presented(published, ggml, self.header.tensors[ggml], kept.get(ggml)):
                if name in tensors:
                    raise InvalidCheckpoint(f"{path} has two tensors that are {name}")
                tensors[name], self._places[name] = info, place
        # name -> dtype and shape of what `read` returns
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)

    def read(self, name: str) -> HostArray:
        """A whole tensor, not to be written to: float32 where it was quantised, else as it is stored, BF16 as its bits.

        Raises:
            KeyError: the file has no such tensor.
            Refused: the package gguf, which dequantises, is not installed.
        """
        place = self._places[name]
        stored = self.header.tensors[place.ggml]
        if place.part is None:
            whole = self._values(stored)
        else:
            codes = np.frombuffer(self._map, np.uint8, stored.end - stored.begin, stored.begin)
            whole = read_part(codes, FORMATS[stored.format].name, stored.shape, place.part)
        heads = self._architecture.heads_to_unpermute(name, self.header.metadata)
        return whole if heads is None else _unpermuted(whole, heads)

    def _values(self, stored: StoredAt) -> HostArray:
        format_name = FORMATS[stored.format].name
        count = stored.end - stored.begin
        if format_name in _AS_STORED:
            dtype = NUMPY_DTYPES[format_name]
            return np.frombuffer(self._map, dtype, count // dtype.itemsize, stored.begin).reshape(stored.shape)
        rows = math.prod(stored.shape[:-1])
        codes = np.frombuffer(self._map, np.uint8, count, stored.begin).reshape(rows, -1)
        return _dequantised(codes, stored.format, self.path).reshape(stored.shape)


def quantisation_of(header: Header, path: Path) -> dict[str, Any] | None:
    """The `quantization_config` of a file: ggml's type of most matrices that may stay quantised, and what may not.

    None: nothing may.
    """
    kept = _kept(header, architecture_of(header.metadata, path))
    if not kept:
        return None
    others = Counter(FORMATS[stored.format].name for ggml, stored in header.tensors.items() if ggml not in kept)
    dequantised = {name: count for name, count in others.items() if name not in _AS_STORED}
    return {"quant_method": "gguf", "type": Counter(kept.values()).most_common(1)[0][0], "dequantised": dequantised}


def _kept(header: Header, architecture: Architecture) -> dict[str, str]:
    """The matrices that may stay quantised, with their types: where all of one product have the same."""
    found: dict[str, str] = {}
    for ggml, stored in header.tensors.items():
        match, name = _BLOCK.fullmatch(ggml), FORMATS[stored.format].name
        is_matrix = match is not None and match[3] == "weight" and len(stored.shape) == 2
        if match is None or not is_matrix or match[2] not in architecture.layer_names or name not in GGML_FORMATS:
            continue
        product = next((each for each in architecture.products if match[2] in each), ())
        others = (header.tensors.get(f"blk.{match[1]}.{other}.weight") for other in product)
        if all(other is not None and other.format == stored.format for other in others):
            found[ggml] = name
    return found


def _presented(
    published: str, ggml: str, stored: StoredAt, kept: str | None
) -> Iterator[tuple[str, TensorInfo, _Place]]:
    """Name, dtype and shape, and place of what a tensor of the file is published as."""
    if kept is None:
        yield published, _info(stored), _Place(ggml, None)
        return
    for part, info in parts_of(kept, stored.shape).items():
        yield f"{published.removesuffix('.weight')}.{part}", info, _Place(ggml, part)


def _dequantised(codes: HostArray, number: int, path: Path) -> HostArray:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise Refused(
            f"{path} has weights in {FORMATS[number].name}, which the package gguf dequantises, and it is not "
            f"installed: {brought_by()}"
        ) from error
    return dequantize(codes, GGMLQuantizationType(number))


def _published(name: str, architecture: Architecture) -> str | None:
    """The name in a Hugging Face checkpoint; one without stays as it is, and is refused by name."""
    found = _BLOCK.fullmatch(name)
    if found is not None and found[2] in architecture.layer_names:
        return f"model.layers.{int(found[1])}.{architecture.layer_names[found[2]]}.{found[3]}"
    return None if name in architecture.read_elsewhere else _WHOLE.get(name, name)


def _info(stored: StoredAt) -> TensorInfo:
    name = FORMATS[stored.format].name
    dtype = name if name in _AS_STORED else "F32"
    num_bytes = math.prod(stored.shape) * NUMPY_DTYPES[dtype].itemsize  # of the array, which is nowhere in the file
    return TensorInfo(dtype=dtype, shape=stored.shape, data_offsets=(0, num_bytes))


def _unpermuted(rows: HostArray, heads: int) -> HostArray:
    """Rows of each head in halves, as Hugging Face's rotation takes them; ggml's takes pairs: 0, D/2, 1, D/2 + 1, …

    The reverse of `permute` in llama.cpp's `conversion/llama.py`.
    """
    if rows.shape[0] % (2 * heads):
        raise InvalidCheckpoint(f"a matrix of {rows.shape[0]} rows is not {heads} heads of an even size")
    pairs: np.ndarray[Any, np.dtype[Any]] = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
