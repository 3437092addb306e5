"""Agents that copy between addresses of this process, and fail as they are told."""

import ctypes
import itertools
from collections.abc import Callable, Sequence

from openinfer_nixl.agent import Memory, Piece, StillMoving


class Wire:
    """What the agents of one test know of each other."""

    def __init__(self) -> None:
        self.memories: dict[str, tuple[int, int]] = {}
        self.names = itertools.count(1)
        self.reads = 0
        self.hangs = False
        self.shift_bytes = 0
        self.before_copy: Callable[[Piece], object] = lambda _: None

    def agent(self, address: int, num_bytes: int, *, memory: Memory = "DRAM", device: int = 0) -> "FakeAgent":
        del memory, device
        return FakeAgent(self, address, num_bytes)

    def copy(self, peer: str, remote: int, local: int, num_bytes: int) -> None:
        address, size = self.memories[peer]
        if not address <= remote <= remote + num_bytes <= address + size:
            raise ConnectionError("the peer has no such memory")
        ctypes.memmove(local, remote + self.shift_bytes, num_bytes - self.shift_bytes)


class FakeAgent:
    def __init__(self, wire: Wire, address: int, num_bytes: int) -> None:
        self._wire = wire
        self._name = f"agent-{next(wire.names)}"
        self._known: set[str] = set()
        wire.memories[self._name] = (address, num_bytes)

    def describe(self) -> bytes:
        return self._name.encode()

    def meet(self, description: bytes) -> str:
        self._known.add(description.decode())
        return description.decode()

    def part(self, peer: str) -> None:
        self._known.discard(peer)

    def read(self, peer: str, pieces: Sequence[Piece], *, timeout_s: float) -> None:
        assert timeout_s > 0
        if peer not in self._known:
            raise ConnectionError(f"{peer} is not known")
        self._wire.reads += 1
        if self._wire.hangs:
            raise StillMoving("it does not end")
        for piece in pieces:
            self._wire.before_copy(piece)
            self._wire.copy(peer, *piece)

    def close(self) -> None:
        self._wire.memories.pop(self._name, None)
