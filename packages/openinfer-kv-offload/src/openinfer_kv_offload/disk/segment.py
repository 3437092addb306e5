"""`Segment`: one append-only file of records, as `SegmentFile` reads and writes it."""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from openinfer_kv_cache import Digest
from openinfer_kv_cache.tiers.traits import Medium
from openinfer_kv_offload.format.record import HEADER_BYTES, RecordHeader, decode_header
from openinfer_kv_offload.transfer.memory import WrapMedium

_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


def is_same_file(fd: int, path: Path) -> bool:
    """Whether a name still leads to the file or folder that is open."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise


class SegmentFile:
    """The medium of a segment: positioned reads and writes on one file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, offset_bytes: int, parts: Sequence[memoryview]) -> None:
        wanted = sum(map(len, parts))
        written = os.pwritev(self._fd, parts, offset_bytes)
        if written != wanted:
            raise OSError(errno.ENOSPC, f"{written} of {wanted} bytes were written")

    def read(self, offset_bytes: int, into: memoryview) -> None:
        """Fills `into`; what lies after the end of the file reads as zeros, which no checksum fits."""
        done = os.preadv(self._fd, [into], offset_bytes)
        if done < len(into):
            into[done:] = bytes(len(into) - done)


class Segment:
    """One file of a store, created by a writer; its readers keep it open when the store has given it up."""

    def __init__(self, path: Path, *, writable: bool, record_bytes: int, wrap_medium: WrapMedium) -> None:
        self.path = path
        self.record_bytes = record_bytes
        self.fd = os.open(path, (os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY) | os.O_CLOEXEC, 0o600)
        self.medium: Medium = wrap_medium(SegmentFile(self.fd))
        self.num_records = 0  # scanned or appended so far
        self.digests: list[Digest] = []  # digests of its records
        self.last_used = 0  # grows with every use; the store gives up the smallest
        self.users = 0  # hits that may still read it
        self.is_retired = False

    @property
    def size_bytes(self) -> int:
        return self.num_records * self.record_bytes

    def scan(self) -> Iterator[tuple[int, RecordHeader | None]]:
        """Index and header (None: not one) of each whole record not seen before; a torn one at the end waits."""
        whole = os.fstat(self.fd).st_size // self.record_bytes
        while self.num_records < whole:
            encoded = os.pread(self.fd, HEADER_BYTES, self.size_bytes)
            self.num_records += 1
            yield self.num_records - 1, decode_header(encoded)

    def cut_torn_end(self) -> None:
        """Removes what a crash or a failed write has left after the last whole record."""
        with contextlib.suppress(OSError):  # it is overwritten by the next record
            if os.fstat(self.fd).st_size != self.size_bytes:
                os.ftruncate(self.fd, self.size_bytes)

    def is_current(self) -> bool:
        """Whether its file is still there under its name, and has not been replaced by another."""
        return is_same_file(self.fd, self.path)

    def delete(self) -> None:
        # A reader that has it open can still read it. Another file of its name is not ours to delete.
        with contextlib.suppress(FileNotFoundError):
            if self.is_current():
                self.path.unlink()

    def retire(self) -> None:
        self.is_retired = True
        self.close_unused()

    def close_unused(self) -> None:
        if self.is_retired and not self.users:
            self.close()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
