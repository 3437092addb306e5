"""Folders that weights come from."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from openinfer_core import Refused

Identity: TypeAlias = tuple[tuple[str, int, int, int, int, int], ...]
"""Of every file: its name, device, inode, size, and when its bytes and its inode were last changed (ns)."""


def folder_below(root: str | None, path: str) -> Path:
    """The folder that an operator names, links resolved.

    Args:
        root: below which it must lie; None where no folder is allowed.
        path: absolute, or seen from the root.

    Raises:
        Refused: it is not there, no folder, or outside of the root.
    """
    if root is None:
        raise Refused(
            "weights are read from folders below --weights-root alone, and this engine was started without one"
        )
    top = _resolved(Path(root))
    folder = _resolved(top / path)
    if not folder.is_relative_to(top):
        raise Refused(f"{path} is not below --weights-root")
    if not folder.is_dir():
        raise Refused(f"{path} is no folder")
    return folder


def file_below(root: str | None, path: Path) -> Path:
    """A file of a folder, links resolved; `Refused` if these lead out of the root. Without a root, as it is."""
    if root is None:
        return path
    resolved = _resolved(path)
    if not resolved.is_relative_to(Path(root).resolve()):
        raise Refused(f"{path} is a link that leads out of --weights-root")
    return resolved


def identity_of(folder: Path) -> Identity:
    """What differs once a byte of the folder's weights or of its config was written, or a file replaced."""
    return tuple(sorted(_identities(folder)))


def _identities(folder: Path) -> Iterator[tuple[str, int, int, int, int, int]]:
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.gguf"), *folder.glob("*.json")):
        try:
            said = path.stat()
        except OSError:  # gone since it was listed: another folder than before, too
            continue
        yield path.name, said.st_dev, said.st_ino, said.st_size, said.st_mtime_ns, said.st_ctime_ns


def _resolved(path: Path) -> Path:
    try:
        return path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise Refused(f"{path} cannot be found") from error
