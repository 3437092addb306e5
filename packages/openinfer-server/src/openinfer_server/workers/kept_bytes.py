"""`KeptBytes`: what a process reads of a connection that was handed to it, in memory that outlives the process.

A process that dies between reading bytes and keeping them loses these. So what is kept counts only if it is as much as
the kernel says was read of the connection since (`tcpi_bytes_received`, RFC 4898's tcpEStatsAppHCThruOctetsReceived,
less what is unread): a request with a hole in it is never repeated.
"""

import array
import contextlib
import fcntl
import os
import socket
import termios
from typing import Protocol, Self

KEPT_BYTES = 8 * 2**20 + 2**17  # a body of the usual bound, its head, and what frames its chunks
_TCP_INFO_BYTES = 136
_STATE, _CLOSE_WAIT = 0, 8  # of the first byte of tcp_info: the client has ended its side, which counts as a byte
_BYTES_RECEIVED = slice(128, 136)
_LOOKS = 1000  # until two in a row see the same: a client sends meanwhile


class Connected(Protocol):
    """A TCP connection, as transports show theirs."""

    def fileno(self) -> int: ...

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


class KeptBytes:
    """A file in memory, to which one process at a time adds; another may be given its descriptor.

    Args:
        descriptor: of it; closed by `close`.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._num_bytes = os.fstat(descriptor).st_size

    @classmethod
    def create(cls) -> Self:
        """Raises `OSError`: there are no descriptors, or no memory."""
        return cls(os.memfd_create("openinfer-request", os.MFD_CLOEXEC))

    def add(self, data: bytes) -> None:
        """Beyond `KEPT_BYTES`, or where there is no memory, nothing is kept any more."""
        self._num_bytes += len(data)
        with contextlib.suppress(OSError):
            if self._num_bytes <= KEPT_BYTES and os.write(self.descriptor, data) == len(data):
                return
        self._num_bytes = KEPT_BYTES + 1
        with contextlib.suppress(OSError):  # then it is too short, which is seen, too
            os.ftruncate(self.descriptor, 0)

    def all(self) -> bytes:
        return os.pread(self.descriptor, KEPT_BYTES + 1, 0)

    def close(self) -> None:
        """Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def num_read(connection: Connected) -> int | None:
    """Bytes that all processes together have read of a connection that none reads now; None if that is not known."""
    descriptor = connection.fileno()
    with contextlib.suppress(OSError):  # it is closed
        unread = _num_unread(descriptor)
        for _ in range(_LOOKS):
            received = _num_received(connection)
            before, unread = unread, _num_unread(descriptor)
            if received is None or before == unread:  # else some came between the two looks
                return None if received is None else received - unread
    return None


def _num_received(connection: Connected) -> int | None:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
        return None
    return int.from_bytes(info[_BYTES_RECEIVED], "little") - (info[_STATE] == _CLOSE_WAIT)


def _num_unread(descriptor: int) -> int:
    unread = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, unread)
    return unread[0]
