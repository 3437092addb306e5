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
import stat
from pathlib import Path

from openinfer_kv_cache import KvLayout
from openinfer_kv_offload.disk.segment import is_same_file
from openinfer_kv_offload.errors import StoreError
from openinfer_kv_offload.format.manifest import StoreAccess, check_manifest, encode_manifest

_KEY_BYTES = 32
_LOCK = "writer.lock"
_MANIFEST = "store.json"
_KEY = "digest.key"
_ROOT = 0
_SEGMENT = re.compile(r"segment-(\d{8})\.kv")


class StoreFolder:
    """An opened folder of segments; a writer creates it if absent.

    Args:
        before: of this process, of the same name, which is closed: its key names the blocks, and a writer goes on on
            its file system alone, since an empty mount point is no place for gigabytes.

    Raises:
        LayoutMismatchError: the store holds another layout.
        StoreError: another process writes, the folder is no store, or one of a later release, belongs to another user,
            or others may write to it; or what the store before had is not to be had.
        OSError: it cannot be opened or made.
    """

    def __init__(
        self, folder: Path, layout: KvLayout, access: StoreAccess, *, before: "StoreFolder | None" = None
    ) -> None:
        self.folder = folder
        self._access = access
        self._fd = self._lock_fd = -1
        if access is StoreAccess.WRITE:
            _check_file_system(folder, before)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._fd = _open_folder(folder)
            self._device = os.fstat(self._fd).st_dev
            if access is StoreAccess.WRITE:
                # Before anything is read or made: another writer may be making the manifest.
                self._lock_fd = _lock(folder)
            self._manifest = encode_manifest(layout)
            self._check_manifest(layout)
            self.digest_key = self._read_key(before)
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> int:
        """The number of the file system that it is on."""
        return self._device

    def is_current(self) -> bool:
        """Whether the folder is still there under its name, and a writer's lock in it."""
        return is_same_file(self._fd, self.folder) and (
            self._access is StoreAccess.READ or is_same_file(self._lock_fd, self.folder / _LOCK)
        )

    def restore(self) -> list[str]:
        """Writes again what others removed of a writer's current folder, without which a start finds nothing; names."""
        if self._access is StoreAccess.READ:
            return []
        kept = {_MANIFEST: self._manifest, _KEY: self.digest_key}
        removed = {
            name: content for name, content in kept.items() if content is not None and not (self.folder / name).exists()
        }
        for name, content in removed.items():
            _write_whole(self.folder / name, content)
        return list(removed)

    def segment_paths(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if _SEGMENT.fullmatch(path.name))

    def path_after(self, last: Path | None) -> Path:
        match = _SEGMENT.fullmatch(last.name) if last else None
        return self.folder / f"segment-{int(match.group(1)) + 1 if match else 1:08}.kv"

    def close(self) -> None:
        # The lock goes with its descriptor.
        fds, self._fd, self._lock_fd = (self._fd, self._lock_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _read_key(self, before: "StoreFolder | None") -> bytes | None:
        """The key that the blocks are named with, unless their owner brings one; a writer makes it."""
        path = self.folder / _KEY
        known = before.digest_key if before is not None else None
        if self._access is StoreAccess.WRITE and not path.exists():
            _write_whole(path, known or secrets.token_bytes(_KEY_BYTES))
        found = path.read_bytes() if path.exists() else None
        if before is not None and found != known:
            raise StoreError(f"{path} is another key than that of the store that was there; start again to use it")
        return found

    def _check_manifest(self, layout: KvLayout) -> None:
        path = self.folder / _MANIFEST
        if not path.exists():
            if self._access is StoreAccess.READ:
                raise StoreError(f"{self.folder} holds no KV store; start a process that writes to it first")
            if self.segment_paths():
                raise StoreError(f"{path} is missing next to segments; restore it, or remove the folder")
            _write_whole(path, self._manifest)
            return
        check_manifest(path.read_bytes(), layout, where=str(path))


def _check_file_system(folder: Path, before: StoreFolder | None) -> None:
    if before is None:
        return
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if there.stat().st_dev != before.device:
        raise StoreError(f"{folder} is not on the file system that it was on; mount that one, or start again")


def _open_folder(folder: Path) -> int:
    """Opens a folder that no other user could have filled."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise StoreError(f"{folder} holds no KV store; start a process that writes to it first") from error
    status = os.fstat(fd)
    # A group of a user's own has the user's number; Kubernetes (`fsGroup`) makes a volume's folders its to write.
    others = stat.S_IWOTH | (0 if status.st_gid == status.st_uid else stat.S_IWGRP)
    if status.st_uid not in (os.geteuid(), _ROOT) or status.st_mode & others:
        os.close(fd)
        raise StoreError(
            f"{folder} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, and a user who may "
            f"write to it can make this process answer from other text: it must be user {os.geteuid()}'s, and no "
            f"other's to write (chmod go-w {folder})"
        )
    return fd


def _lock(folder: Path) -> int:
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
