"""What a tier may be able to do beyond `KvTier`: move blocks of a device, let others copy, outlive its process."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from openinfer_kv_cache.digest import Digest
from openinfer_kv_cache.tiers.contract import KvTier, TierHit, Transfer


class DeviceBlock(Protocol):
    """One block in memory that only its device addresses."""

    @property
    def nbytes(self) -> int:
        """`KvLayout.block_bytes`."""
        ...

    @property
    def mover(self) -> "BlockMover":
        """What copies it and its neighbours of the same pool."""
        ...


class BlockMover(Protocol):
    """Copies blocks of one pool between its device and this machine's memory; called by any thread.

    Copies wait for their end and leave the interpreter to other threads meanwhile. They are ordered with nothing else:
    the caller that hands blocks out has waited for what wrote them.

    Both return, for each block, the sum of the bytes that the device's block holds at the end, which the device makes:

        word i (8 bytes, little-endian, the last filled with zeros):  x = w[i] + (i + 1) * 0x9E3779B97F4A7C15 mod 2^64
        m = MurmurHash3's 64-bit finaliser of x
        sum = (Σ m mod 2^64 ‖ Σ m * (2 i + 1) mod 2^64), 16 bytes, little-endian
    """

    def copy_out(self, blocks: Sequence[Any], into: Sequence[memoryview]) -> Sequence[bytes]:
        """Fills memory of `nbytes` bytes each from blocks that have this mover."""
        ...

    def copy_in(self, blocks: Sequence[Any], content: Sequence[memoryview]) -> Sequence[bytes]:
        """Fills blocks that have this mover from memory of `nbytes` bytes each."""
        ...


BlockMemory: TypeAlias = memoryview | DeviceBlock
"""One block of a caller's pool, in this machine's memory or in a device's."""


@runtime_checkable
class DeviceTier(KvTier, Protocol):
    """A tier that also takes `DeviceBlock`s, so that bytes go between device and medium without a stop."""

    @property
    def takes_device_blocks(self) -> bool:
        """Whether it does now; a stack does if all its tiers do."""
        ...

    def pinnable_memory(self) -> Sequence[memoryview]:
        """Memory that blocks are copied from and to, which copies faster when it is locked in place for the device.

        It stays where it is until the tier is closed; a caller that has locked it unlocks it before.
        """
        ...

    def load(self, hit: TierHit, blocks: Sequence[BlockMemory], *, timeout_s: float | None = None) -> Transfer: ...

    def save(
        self, digests: Sequence[Digest], blocks: Sequence[BlockMemory], *, timeout_s: float | None = None
    ) -> Transfer: ...


class TierMemory(Protocol):
    """Memory of a tier where a pool's blocks are, and copies between the two; called by any thread.

    Copies wait for their end, as a `BlockMover`'s do. Both return, for each block of the pool, the sum that
    `BlockMover` defines of what the block holds at the end.
    """

    @property
    def address(self) -> int:
        """Of the first byte, as the device counts."""
        ...

    @property
    def device(self) -> int:
        """Number of the device, as this process counts them."""
        ...

    def use(self) -> None:
        """Makes its device the calling thread's, as libraries that are given the address want it."""
        ...

    def copy_out(self, blocks: Sequence[Any], offsets_bytes: Sequence[int]) -> Sequence[bytes]:
        """Copies blocks of the pool to places in this memory."""
        ...

    def copy_in(self, blocks: Sequence[Any], offsets_bytes: Sequence[int]) -> Sequence[bytes]:
        """Copies from places in this memory to blocks of the pool."""
        ...

    def close(self) -> None:
        """Gives the memory back; idempotent."""
        ...


class MemorySource(Protocol):
    """A device on which a tier may have memory of its own."""

    def allocate(self, num_bytes: int) -> TierMemory:
        """Takes so much of its memory, none of which a sleep gives up; any exception says that there is not so much."""
        ...


@runtime_checkable
class ResidentTier(DeviceTier, Protocol):
    """A tier that keeps its blocks where the pool's are: in a GPU's own memory."""

    def use_memory(self, device: MemorySource | None) -> None:
        """Takes its memory; called once, before the first `find`, by the caller that has the pool.

        Args:
            device: of the pool's blocks; None where they are in this machine's memory, as the tier's are then, too.
        """
        ...


@runtime_checkable
class CopyingTier(KvTier, Protocol):
    """A tier whose blocks may be copied by those who know their digests: the first of a write-behind stack."""

    def copy_block(self, digest: Digest, into: memoryview) -> bool:
        """Fills `into` with an intact block, in this thread; False if it is not there. No counter tells of it."""
        ...


class Prefetch(NamedTuple):
    """What a tier answers to `PrefetchingTier.prefetch`."""

    num_held: int
    """Leading blocks of the chain that it has, in whatever level."""
    transfer: Transfer | None
    """Those of them that are on their way up; None if none are. It is polled until it ends."""


@runtime_checkable
class PrefetchingTier(KvTier, Protocol):
    """A tier of several levels that brings blocks up before they are loaded, into memory of its own."""

    @property
    def prefetch_blocks(self) -> int:
        """As many may be brought up for requests that wait, all together; 0: none."""
        ...

    def prefetch(self, digests: Sequence[Digest], *, timeout_s: float | None = None) -> Prefetch:
        """Begins to bring what lower levels have of a chain's beginning into the first one.

        Args:
            digests: few at a time, since memory for them is taken.
            timeout_s: after which it ends partial.
        """
        ...


@runtime_checkable
class BoundedTier(KvTier, Protocol):
    """A tier with room for so many blocks."""

    @property
    def num_blocks(self) -> int: ...


@runtime_checkable
class LastingTier(KvTier, Protocol):
    """A tier that outlives its process. What it holds is found again only with the digest key it was saved under."""

    @property
    def digest_key(self) -> bytes | None:
        """The key that is kept with the blocks (see `PrefixHasher`); None if the user has to bring one."""
        ...


@runtime_checkable
class SharedTier(KvTier, Protocol):
    """A tier that other processes read, and maybe write: what one engine has saved, another one finds."""

    def look_up(self, digests: Sequence[Digest]) -> None:
        """Asks the medium for what of a chain's beginning other processes have saved; `find` knows it afterwards.

        It waits for the medium, so it is called from a thread of the caller's, while other methods are.

        Raises:
            OSError: the medium cannot be reached, or refuses.
        """
        ...


@runtime_checkable
class TimedTier(KvTier, Protocol):
    """A tier that can be told how long its end may take: the end of an engine has a deadline."""

    def close_within(self, timeout_s: float) -> bool:
        """Does what `close` does, and returns after about so long, whatever its medium does.

        Whatever a save has completed is kept as if it had been closed in time. A thread that hangs in the medium is
        left behind: what it uses is closed after it, and it touches no block of the caller any more.

        Returns:
            Whether all of it has ended.
        """
        ...


class TierMedium(StrEnum):
    """Where a tier keeps its blocks, in the words of KV events."""

    CPU = "CPU"
    """Memory of this machine."""
    STORAGE = "STORAGE"
    """A disk, or a server."""


class TierListener(Protocol):
    """Hears what can be found in a tier, in the order in which it changes, in its threads; it must not block."""

    def stored(self, digests: Sequence[Digest], medium: TierMedium) -> None:
        """These blocks can be found from now on."""
        ...

    def removed(self, digests: Sequence[Digest], medium: TierMedium) -> None:
        """These were found until now."""
        ...


@runtime_checkable
class TellingTier(KvTier, Protocol):
    """A tier that says what it holds: a stack tells of all its tiers that do."""

    def listen(self, listener: TierListener) -> None:
        """Tells of all that can be found now, and from now on of every change; called once, before the first save."""
        ...


class Medium(Protocol):
    """What a tier keeps its bytes in: memory, a file, an object of a server. The kit injects faults around it."""

    def write(self, offset_bytes: int, parts: Sequence[memoryview]) -> None:
        """Writes the parts one after the other; any exception means that nothing there can be relied on."""
        ...

    def read(self, offset_bytes: int, into: memoryview) -> None:
        """Fills `into`."""
        ...
