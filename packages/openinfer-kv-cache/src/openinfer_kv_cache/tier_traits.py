"""What a tier may be able to do beyond `KvTier`: move blocks of a device, and outlive its process."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from openinfer_kv_cache.digest import Digest
from openinfer_kv_cache.tiers import KvTier, TierHit, Transfer


class DeviceBlock(Protocol):
    """One block in memory that only its device addresses, and how it is copied; called by any thread.

    Both copies wait for their end and leave the interpreter to other threads meanwhile. They are ordered with nothing
    else: whoever hands the block out has waited for what wrote it.
    """

    @property
    def nbytes(self) -> int:
        """`KvLayout.block_bytes`."""
        ...

    def copy_to(self, host: memoryview) -> None:
        """Fills `host`, of `nbytes` bytes, from the block."""
        ...

    def copy_from(self, host: memoryview) -> None:
        """Fills the block from `host`, of `nbytes` bytes."""
        ...


BlockMemory: TypeAlias = memoryview | DeviceBlock
"""One block of a caller's pool, in this machine's memory or in a device's."""


@runtime_checkable
class DeviceTier(KvTier, Protocol):
    """A tier that also takes `DeviceBlock`s, so that bytes go between device and medium without a stop."""

    @property
    def takes_device_blocks(self) -> bool:
        """Of a stack, whether all its tiers do."""
        ...

    def pinnable_memory(self) -> Sequence[memoryview]:
        """Memory that blocks are copied from and to, which copies faster when it is locked in place for the device.

        It stays where it is until the tier is closed; whoever has locked it unlocks it before.
        """
        ...

    def load(self, hit: TierHit, blocks: Sequence[BlockMemory], *, timeout_s: float | None = None) -> Transfer:
        """As `KvTier.load`."""
        ...

    def save(
        self, digests: Sequence[Digest], blocks: Sequence[BlockMemory], *, timeout_s: float | None = None
    ) -> Transfer:
        """As `KvTier.save`."""
        ...


@runtime_checkable
class LastingTier(KvTier, Protocol):
    """A tier that outlives its process. What it holds is found again only with the digest key it was saved under."""

    @property
    def digest_key(self) -> bytes | None:
        """The key that is kept beside the blocks (see `PrefixHasher`); None if the user has to bring one."""
        ...
