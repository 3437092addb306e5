"""`GgufFile`: a GGUF file's tensors under a Hugging Face checkpoint's names, dequantised when they are read."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_core.errors import brought_by
from openinfer_engine.gguf.config import Architecture, architecture_of
from openinfer_engine.gguf.header import FORMATS, Header, StoredAt, map_file, read_header
from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES, TensorInfo
from openinfer_kernels import HostArray

GGUF_FILE = "model.gguf"

_AS_STORED = frozenset({"F32", "F16", "BF16"})
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufFile:
    """One open file. It must not be changed while it is open.

    Raises:
        InvalidCheckpoint: it cannot be read, or is no valid GGUF file.
        Refused: its architecture is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        self.header: Header = read_header(self._map, path)
        self._architecture = architecture_of(self.header.metadata, path)
        self._ggml_names = {
            published: name
            for name in self.header.tensors
            if (published := _published(name, self._architecture)) is not None
        }
        # name -> dtype and shape of what `read` returns
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: _info(self.header.tensors[ggml]) for name, ggml in self._ggml_names.items()}
        )

    def read(self, name: str) -> HostArray:
        """A whole tensor, not to be written to: float32 where it was quantised, else as it is stored, BF16 as its bits.

        Raises:
            KeyError: the file has no such tensor.
            Refused: the package gguf, which dequantises, is not installed.
        """
        stored = self.header.tensors[self._ggml_names[name]]
        whole = self._values(stored)
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
