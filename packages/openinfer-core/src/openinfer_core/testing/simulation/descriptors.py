"""`install_sockets`: `socket.socket`, `selectors.DefaultSelector`, `os.read` and their like, of a world."""

import errno
import os
import selectors
import socket
import ssl
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from openinfer_core.testing.simulation.network import Medium
from openinfer_core.testing.simulation.sockets import LINK_BYTES, LINK_DELAY_S, Address, Network, SocketEnd
from openinfer_core.testing.simulation.world import Stuck, World

_MOST_LOOKS = 10_000
"""Of a selector, at one moment: a thread that spins never lets time go on."""


class _Kind(NamedTuple):
    family: int
    type: int
    proto: int


class VirtualSocket:
    """`socket.socket` of a world."""

    network: Network

    def __init__(
        self,
        family: int = socket.AF_INET,
        type: int = socket.SOCK_STREAM,  # noqa: A002 - as `socket` has it
        proto: int = 0,
        fileno: int | None = None,
        *,
        end: SocketEnd | None = None,
    ) -> None:
        self._kind = _Kind(family, type, proto)
        if fileno is not None:
            end = self.network.ends[fileno]
        if end is None:
            is_local = family == getattr(socket, "AF_UNIX", None)
            medium = Medium(LINK_DELAY_S, kernel_bytes=LINK_BYTES) if is_local else Medium(LINK_DELAY_S)
            end = SocketEnd(self.network, medium)
            self.network.open(end, self.network.world.process)
        self._end: SocketEnd | None = end

    @property
    def family(self) -> int:
        return self._kind.family

    @property
    def type(self) -> int:
        return self._kind.type

    @property
    def proto(self) -> int:
        return self._kind.proto

    @property
    def end(self) -> SocketEnd:
        """What it stands for; `OSError` once it is closed."""
        if self._end is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._end

    def fileno(self) -> int:
        return -1 if self._end is None else self._end.descriptor

    def detach(self) -> int:
        descriptor, self._end = self.fileno(), None
        return descriptor

    def close(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            if end.successor is None:
                end.close()
            else:
                end.forget()

    def setblocking(self, flag: bool) -> None:  # noqa: FBT001 - as `socket` has it
        self.end.is_blocking, self.end.timeout_s = flag, None

    def settimeout(self, timeout_s: float | None) -> None:
        self.end.is_blocking, self.end.timeout_s = timeout_s != 0.0, timeout_s

    def gettimeout(self) -> float | None:
        return self.end.timeout_s if self.end.is_blocking else 0.0

    def setsockopt(self, *option: Any) -> None:
        del option

    def getsockopt(self, *option: Any) -> int:
        del option
        return 0

    def getsockname(self) -> Address:
        return self.end.address

    def getpeername(self) -> Address:
        return self.end.peer_address

    def bind(self, address: Address) -> None:
        self.network.bind(self.end, address)

    def listen(self, backlog: int = 128) -> None:
        del backlog
        self.network.listen(self.end)

    def accept(self) -> "tuple[VirtualSocket, Address]":
        end = self.end
        end.wait(lambda: end.is_readable)
        if end.is_over:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self.network.accept_error:
            raise OSError(self.network.accept_error, os.strerror(self.network.accept_error))
        accepted = end.backlog[0]
        self.network.open(accepted, self.network.world.process)  # or it goes on waiting
        end.backlog.popleft()
        return VirtualSocket(*self._kind, end=accepted), accepted.peer_address

    def connect(self, address: Address) -> None:
        end = self.end
        listener = self.network.listener_at(address)
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        theirs = self.network.connect(end, listener, "")
        end.peer_address = address
        if listener.process is not None and end.process is not None:
            self.network.join("socket", (end, theirs), (end.process, listener.process))

    def send(self, data: bytes | bytearray | memoryview) -> int:
        return self.end.write(data)

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[self.end.write(left) :]

    def recv_into(self, buffer: memoryview) -> int:
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def recv(self, size: int) -> bytes:
        return self.end.read(size)

    def shutdown(self, how: int) -> None:
        del how
        self.end.end_output()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class VirtualFile:
    """One end of a pipe, as a binary file."""

    def __init__(self, end: SocketEnd) -> None:
        self.end = end
        self._read_ahead = bytearray()
        self.closed = False

    def fileno(self) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        return self.end.descriptor

    def write(self, data: bytes | bytearray | memoryview) -> int:
        left = memoryview(data)
        while left:
            left = left[self.end.write(left) :]
        return len(data)

    def flush(self) -> None:
        if self.end.has_no_peer:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def readline(self) -> bytes:
        while b"\n" not in self._read_ahead:
            data = self.end.read(1 << 16)
            if not data:
                break
            self._read_ahead += data
        line, newline, rest = self._read_ahead.partition(b"\n")
        self._read_ahead = rest
        return bytes(line + newline)

    def take_read_ahead(self) -> bytes:
        """What was read beyond the last line."""
        data, self._read_ahead = bytes(self._read_ahead), bytearray()
        return data

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.end.close()


class VirtualSelector:
    """`selectors.DefaultSelector` of a world."""

    network: Network

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}
        self._looked_s = -1.0
        self._looks = 0  # since time went on

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj.fileno(), events, data)
        self._keys[fileobj] = key
        return key

    modify = register

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        world = self.network.world
        ready = self._ready()
        due_s = None if timeout is None else world.now_s + timeout
        task = world.current
        ends = [*self._ends()]

        def wake() -> None:
            if task is not None:
                world.wake(task)

        for end in ends:
            end.watchers.append(wake)
        while not ready and (due_s is None or world.now_s < due_s):
            world.park(None if due_s is None else due_s - world.now_s)
            ready = self._ready()
        for end in ends:
            end.watchers.remove(wake)
        self._require_progress()
        return ready

    def _require_progress(self) -> None:
        now_s = self.network.world.now_s
        self._looks = self._looks + 1 if now_s == self._looked_s else 0
        self._looked_s = now_s
        if self._looks > _MOST_LOOKS:
            ready = ", ".join(type(key.fileobj).__name__ for key, _ in self._ready())
            raise Stuck(f"a thread asks again and again what is ready ({ready}), and does nothing about it")

    def _ends(self) -> Iterator[SocketEnd]:
        for registered in self._keys:
            yield registered.end

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        found: list[tuple[selectors.SelectorKey, int]] = []
        for key, end in zip(self._keys.values(), self._ends(), strict=True):
            mask = (selectors.EVENT_READ if end.is_readable else 0) | (selectors.EVENT_WRITE if end.is_writable else 0)
            if mask & key.events:
                found.append((key, mask & key.events))
        return found

    def close(self) -> None:
        self._keys.clear()


def install_sockets(world: World) -> Network:
    """Replaces sockets, selectors and reading and writing by descriptor; for good."""
    if socket.socket is not ssl.SSLSocket.__base__:  # ssl's own must have been made of the system's
        raise RuntimeError("sockets are a world's already")
    network = Network(world)
    VirtualSocket.network = VirtualSelector.network = network

    def socketpair(*kind: int) -> tuple[VirtualSocket, VirtualSocket]:
        ends = network.pair((world.process, world.process), delay_s=1e-6)
        return VirtualSocket(*kind, end=ends[0]), VirtualSocket(*kind, end=ends[1])

    def create_server(address: tuple[str, int], **options: Any) -> VirtualSocket:
        del options
        listener = VirtualSocket()
        listener.bind(address)
        listener.listen()
        return listener

    def create_connection(address: tuple[str, int], **options: Any) -> VirtualSocket:
        del options
        connection = VirtualSocket()
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            raise
        return connection

    names: dict[str, Any] = {
        "socket": VirtualSocket,
        "socketpair": socketpair,
        "create_server": create_server,
        "create_connection": create_connection,
    }
    for name, stand_in in names.items():
        setattr(socket, name, stand_in)
    selectors.DefaultSelector = VirtualSelector  # type: ignore[misc, assignment]
    real_read, real_write = os.read, os.write
    real_list: Any = os.listdir

    def read(descriptor: int, size: int, /) -> bytes:
        return network.ends[descriptor].read(size) if descriptor in network.ends else real_read(descriptor, size)

    def write(descriptor: int, data: Any, /) -> int:
        return network.ends[descriptor].write(data) if descriptor in network.ends else real_write(descriptor, data)

    def listdir(path: Any = ".") -> list[Any]:
        return [*map(str, world.process.ends)] if path == "/proc/self/fd" else real_list(path)

    os.read, os.write, os.listdir = read, write, listdir
    return network
