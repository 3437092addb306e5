"""A store's folder: what it holds, and which process may write to it.

store.json            format version and layout; written once, moved into place whole
digest.key            the secret that blocks are named with (see `openinfer_kv_cache.PrefixHasher`), for its owner only
writer.lock           locked by the one process that writes (flock: the kernel frees it with the process)
segment-00000001.kv   records (`format/record.py`), appended; higher numbers are younger
"""

import fcntl
import os
import re
import secrets
from pathlib import Path

from openinfer_kv_cache import KvLayout
from openinfer_kv_offload.errors import StoreError
from openinfer_kv_offload.format.manifest import StoreAccess, check_manifest, encode_manifest

_KEY_BYTES = 32
_SEGMENT = re.compile(r"segment-(\d{8})\.kv")


class StoreFolder:
    """An opened folder of segments; a writer creates it if absent.

    Raises:
        LayoutMismatchError: the store holds another layout.
        StoreError: another process writes, the folder is no store, or one of a later release.
    """

    def __init__(self, folder: Path, layout: KvLayout, access: StoreAccess) -> None:
        self.folder = folder
        self._lock_fd = -1
        if access is StoreAccess.WRITE:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Before anything is read or made: another writer may be making the manifest.
            self._lock_fd = _lock(folder)
        try:
            self._check_manifest(layout, access)
            self.digest_key = self._read_key(access)
        except BaseException:
            self.close()
            raise

    def segment_paths(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if _SEGMENT.fullmatch(path.name))

    def path_after(self, last: Path | None) -> Path:
        match = _SEGMENT.fullmatch(last.name) if last else None
        return self.folder / f"segment-{int(match.group(1)) + 1 if match else 1:08}.kv"

    def close(self) -> None:
        # The lock goes with its descriptor.
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _read_key(self, access: StoreAccess) -> bytes | None:
        """The key that the blocks are named with, unless their owner brings one; a writer makes it."""
        path = self.folder / "digest.key"
        if access is StoreAccess.WRITE and not path.exists():
            _write_whole(path, secrets.token_bytes(_KEY_BYTES))
        return path.read_bytes() if path.exists() else None

    def _check_manifest(self, layout: KvLayout, access: StoreAccess) -> None:
        path = self.folder / "store.json"
        if not path.exists():
            if access is StoreAccess.READ:
                raise StoreError(f"{self.folder} holds no KV store; start a process that writes to it first")
            if self.segment_paths():
                raise StoreError(f"{path} is missing next to segments; restore it, or remove the folder")
            _write_whole(path, encode_manifest(layout))
            return
        check_manifest(path.read_bytes(), layout, where=str(path))


def _lock(folder: Path) -> int:
    fd = os.open(folder / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise StoreError(
            f"another process writes to {folder}; give this one a folder of its own, or open it with access=read"
        ) from error
    return fd


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write_whole(path: Path, content: bytes) -> None:
    """Replaces a file so that a reader sees all of it or nothing, also after a crash."""
    new = path.with_suffix(".new")
    with open(new, "wb", opener=_open_private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    # The bytes are on the disk before the name is, and the name before anything relies on it.
    new.replace(path)
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
