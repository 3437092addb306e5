"""`FaultInjector`: what can go wrong between a tier and its medium, on purpose and when a test says so."""

import errno
import threading
from collections import deque
from collections.abc import Sequence
from enum import StrEnum

from openinfer_kv_cache.tiers.traits import Medium

GIVE_UP_S = 30.0  # a test that waits longer has found a tier that hangs


class InjectedFault(StrEnum):
    """What happens to one operation."""

    ERROR = "error"
    """It fails with EIO; of a write, half was done."""
    TORN_WRITE = "torn_write"
    """Half of a write was done, and it says that all is well; a read is not affected."""
    BIT_FLIP = "bit_flip"
    """One bit is wrong, and it says that all is well."""
    FULL = "full"
    """A write fails with ENOSPC; a read is not affected."""
    GONE = "gone"
    """It fails as a connection does."""


class Gate:
    """One operation that is held up: the medium hangs until the test lets it go on."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._released = threading.Event()

    def wait_entered(self) -> None:
        assert self._entered.wait(GIVE_UP_S), "the tier did not begin to touch its medium"

    def release(self) -> None:
        self._released.set()

    def pass_through(self) -> None:
        self._entered.set()
        assert self._released.wait(GIVE_UP_S), "the test never released the medium"


class FaultInjector:
    """Faults for the next operations of the media that it wraps; each happens once."""

    def __init__(self) -> None:
        self._writes: deque[InjectedFault | Gate] = deque()
        self._reads: deque[InjectedFault | Gate] = deque()

    def on_next_writes(self, *faults: InjectedFault) -> None:
        self._writes.extend(faults)

    def on_next_reads(self, *faults: InjectedFault) -> None:
        self._reads.extend(faults)

    def hold_next_write(self) -> Gate:
        self._writes.append(gate := Gate())
        return gate

    def hold_next_read(self) -> Gate:
        self._reads.append(gate := Gate())
        return gate

    def clear(self) -> None:
        self._writes.clear()
        self._reads.clear()

    def wrap(self, medium: Medium) -> "FaultyMedium":
        return FaultyMedium(medium, self._writes, self._reads)


class FaultyMedium:
    """A medium with faults between the tier and the real one."""

    def __init__(
        self, medium: Medium, writes: "deque[InjectedFault | Gate]", reads: "deque[InjectedFault | Gate]"
    ) -> None:
        self._medium = medium
        self._writes = writes
        self._reads = reads

    def write(self, offset_bytes: int, parts: Sequence[memoryview]) -> None:
        fault = _next(self._writes)
        whole = memoryview(b"".join(parts))
        half = whole[: len(whole) // 2]
        match fault:
            case InjectedFault.ERROR:
                self._medium.write(offset_bytes, [half])
            case InjectedFault.TORN_WRITE:
                return self._medium.write(offset_bytes, [half])
            case InjectedFault.BIT_FLIP:
                return self._medium.write(offset_bytes, [_flipped(whole)])
            case _:
                pass
        _raise(fault, is_write=True)
        return self._medium.write(offset_bytes, parts)

    def read(self, offset_bytes: int, into: memoryview) -> None:
        fault = _next(self._reads)
        _raise(fault, is_write=False)
        self._medium.read(offset_bytes, into)
        if fault is InjectedFault.BIT_FLIP:
            into[:] = _flipped(into)


def _next(faults: "deque[InjectedFault | Gate]") -> InjectedFault | None:
    try:
        fault = faults.popleft()
    except IndexError:
        return None
    if isinstance(fault, Gate):
        fault.pass_through()
        return None
    return fault


def _raise(fault: InjectedFault | None, *, is_write: bool) -> None:
    if fault is InjectedFault.ERROR:
        raise OSError(errno.EIO, "injected: input/output error")
    if fault is InjectedFault.FULL and is_write:
        raise OSError(errno.ENOSPC, "injected: no space left")
    if fault is InjectedFault.GONE:
        raise ConnectionResetError("injected: the medium is gone")


def _flipped(content: memoryview) -> memoryview:
    # In the last third, where a record has its payload.
    changed = bytearray(content)
    changed[len(changed) * 2 // 3] ^= 0x10
    return memoryview(changed)
