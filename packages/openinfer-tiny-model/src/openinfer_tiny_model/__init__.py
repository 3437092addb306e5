"""A toy Qwen3 checkpoint of a few megabytes, trained on text of its own: data, and one function that finds it."""

from importlib.resources import files
from pathlib import Path

OPENINFER_CONTRACT = 1

__all__ = ["model_dir"]


def model_dir() -> Path:
    """Return the checkpoint's folder in the Hugging Face layout.

    Raises:
        FileNotFoundError: the package was not unpacked into a folder (it runs from a zip archive, for example), or the
            checkpoint is missing from it.
    """
    folder = files(__name__).joinpath("checkpoint")
    if not isinstance(folder, Path) or not folder.joinpath("config.json").is_file():
        raise FileNotFoundError(
            f"the tiny checkpoint must be a folder on disk, but {folder} is none; install openinfer-tiny-model unpacked"
        )
    return folder
