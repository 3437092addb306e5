"""What is no regular file is refused before it is opened, whichever file of a model folder it is."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openinfer_core import InvalidCheckpoint
from openinfer_core.sampling_defaults import read_sampling_defaults
from openinfer_core.tokenizer_files import read_tokenizer
from openinfer_engine.gguf.header import map_file
from openinfer_engine.vocabulary import read_eos_token_ids
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_engine.weights.fingerprint import fingerprint

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "safetensors": ("model.safetensors", Checkpoint.open),
    "index": ("model.safetensors.index.json", Checkpoint.open),
    "GGUF": ("model.gguf", lambda folder: map_file(folder / "model.gguf")),
    "fingerprint": ("model.safetensors", fingerprint),
    "tokenizer": ("tokenizer.json", read_tokenizer),
    "sampling defaults": ("generation_config.json", read_sampling_defaults),
    "stop ids": ("generation_config.json", lambda folder: read_eos_token_ids(folder, {})),
}


@pytest.mark.parametrize("kind", ["device", "pipe"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_is_refused(tmp_path: Path, reader: str, kind: str) -> None:
    name, read = READERS[reader]
    (tmp_path / "config.json").write_text("{}")
    if kind == "pipe":
        if sys.platform == "win32":
            pytest.skip("Windows has no named pipes in folders")
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to(os.devnull)
    with pytest.raises(InvalidCheckpoint, match=f"{name} is no regular file"):
        read(tmp_path)
