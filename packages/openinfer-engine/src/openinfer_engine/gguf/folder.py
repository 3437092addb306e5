"""`model_folder`: a GGUF file as a Hugging Face model folder, in this user's cache; the weights stay where they are.

CACHE/gguf/KEY/config.json, tokenizer.json, tokenizer_config.json, model.gguf ─► the file
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_engine.gguf.config import ROPE_FACTORS, architecture_of, config_of
from openinfer_engine.gguf.file import GGUF_FILE, quantisation_of
from openinfer_engine.gguf.header import FORMATS, Header, map_file, read_header
from openinfer_engine.gguf.tokenizer import tokenizer_config_of, tokenizer_of

OPENINFER_CONTRACT = 1

_VERSION = 2  # of what is written here: a folder of another one is not used


def model_folder(path: Path) -> Path:
    """The folder that stands for a GGUF file; made once, for as long as the file's size and time stay the same.

    Raises:
        InvalidCheckpoint: the file cannot be read, or is no valid GGUF file.
        Refused: its architecture, tokenizer or formats of weights are not read.
    """
    path = path.resolve()
    try:
        found = path.stat()
    except OSError as error:
        raise InvalidCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    key = blake2b(f"{_VERSION}\0{path}\0{found.st_size}\0{found.st_mtime_ns}".encode(), digest_size=12).hexdigest()
    folder = _cache() / f"{path.stem}-{key}"
    if not folder.is_dir():
        _write(folder, path, files_of(path))
    return folder


def files_of(path: Path) -> dict[str, dict[str, Any]]:
    """Names and contents of the JSON files that a folder of this model would have; raises as `model_folder`."""
    data = map_file(path)
    header = read_header(data, path)
    architecture_of(header.metadata, path)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise InvalidCheckpoint(f"{path} has no tensor token_embd.weight; is it one part of several?")
    return {
        "config.json": config_of(
            header.metadata,
            path,
            vocab_size=embedding.shape[0],
            tied="output.weight" not in header.tensors,
            rope_factors=_rope_factors(header, data, path),
            quantisation=quantisation_of(header, path),
        ),
        "tokenizer.json": tokenizer_of(header.metadata, path),
        "tokenizer_config.json": tokenizer_config_of(header.metadata, path),
    }


def _rope_factors(header: Header, data: Any, path: Path) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    stored = header.tensors.get(ROPE_FACTORS)
    if stored is None:
        return None
    if FORMATS[stored.format].name != "F32" or len(stored.shape) != 1:
        raise InvalidCheckpoint(f"{path} has {ROPE_FACTORS} of another kind than a row of F32")
    return np.frombuffer(data, np.float32, stored.shape[0], stored.begin)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openinfer" / "gguf"


def _write(folder: Path, path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Puts the folder into place as the last step, so that none is ever seen half written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            for name, content in files.items():
                (new / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
            (new / GGUF_FILE).symlink_to(path)
            new.chmod(0o755)
            try:
                new.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster, with the same content
                    raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        raise InvalidCheckpoint(f"{folder} cannot be written: {error.strerror}") from error
