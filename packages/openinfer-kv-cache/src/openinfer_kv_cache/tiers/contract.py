"""`KvTier`: the contract of a place that keeps KV blocks outside the pool: host memory, a disk, another machine.

A tier is asked three things, and none of them waits:

    hit = tier.find(digests)                    the longest beginning of a chain that it holds; held until closed
    transfer = tier.load(hit, blocks)           bytes of the hit into the caller's blocks
    transfer = tier.save(digests, blocks)       bytes of the caller's sealed blocks into the tier

Life of a transfer, which `poll` reports:

    pending ──► completed       every block
        │ └───► partial      fewer: the first `completed_blocks` of a load are right, `failure` says what stopped it
        └─────► cancelled    after `cancel`, once no copy touches the caller's memory any more

While a transfer is pending its blocks are the tier's: the caller may not write them, nor read those of a load. Once
it has ended no thread of the tier touches them again. So a caller holds its blocks (`BlockPool.pin`, or writable ones)
until `poll` says something else than pending, also after `cancel`.

What a tier promises:

- **Never wrong KV.** Bytes are given back under a digest only if a checksum made when they were saved, bound to that
  digest and to the layout, still fits. Anything else is dropped, counted and a miss. A tier that outlives its process
  keeps the layout with the bytes and refuses to open under another.
- **Never fatal.** What goes wrong while bytes move ends one transfer as partial, counted by reason; the caller computes
  the blocks. Only misuse raises (`KvTierError`).
- **Isolation is in the digests.** Tenants' salts and LoRA names are part of every chain's root (`PrefixHasher`); stores
  that several processes or restarts share need one `digest_key` for all of them.

A tier is a plug-in: an entry point of the group `openinfer.kv_tiers` names a `KvTierFactory`.
`openinfer_kv_cache.testing.tier_contract` is its conformance kit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from openinfer_kv_cache.digest import Digest
from openinfer_kv_cache.layout import KvLayout

KV_TIERS = "openinfer.kv_tiers"
"""The entry-point group of `KvTierFactory`s."""


class TransferState(StrEnum):
    """Where a transfer stands; see the diagram above."""

    PENDING = "pending"
    COMPLETED = "completed"
    PARTIAL = "partial"
    CANCELLED = "cancelled"


class TierFailure(StrEnum):
    """Why a transfer ended partial."""

    DEADLINE = "deadline"
    """Its time was over."""
    BUSY = "busy"
    """Too many transfers wait, or every place is held; nothing is wrong with the tier."""
    BREAKER_OPEN = "breaker_open"
    """The tier failed too often and is left alone for a while."""
    CORRUPT = "corrupt"
    """Stored bytes do not fit their checksum; they have been dropped."""
    MISSING = "missing"
    """The medium has a block no longer: its server, or another process that writes to it, gave it up."""
    FULL = "full"
    """The medium has no space."""
    GONE = "gone"
    """The medium cannot be reached."""
    IO_ERROR = "io_error"
    """The medium failed otherwise."""
    ERROR = "error"
    """The tier's own code failed; its log has the traceback."""
    CLOSED = "closed"
    """The tier was closed."""


class TierCondition(StrEnum):
    """How a tier does, as its last transfers say."""

    OK = "ok"
    FULL = "full"
    """Its medium has no space: saves are refused, and one tries again now and then; loads go on."""
    FAILING = "failing"
    """It failed too often in a row: it is left alone, and one transfer tries again now and then."""
    LOST = "lost"
    """What it kept was removed from outside, and it cannot begin anew there: loads miss, saves are refused."""


class TierHit(Protocol):
    """Blocks that a tier has found and holds until the hit is closed or its load has ended."""

    @property
    def digests(self) -> Sequence[Digest]:
        """The digests of the blocks found: a beginning of what was asked for."""
        ...

    def close(self) -> None:
        """Gives the blocks back; a hit that was loaded or closed already stays as it is."""
        ...


class Transfer(Protocol):
    """Bytes on their way between a tier and the caller's blocks."""

    @property
    def num_blocks(self) -> int:
        """How many were asked for."""
        ...

    @property
    def completed_blocks(self) -> int:
        """How many leading blocks of a load hold their right bytes, or how many blocks of a save the tier has."""
        ...

    @property
    def failure(self) -> TierFailure | None:
        """Set exactly when the state is partial."""
        ...

    def poll(self) -> TransferState:
        """The state, without waiting; also what notices that the deadline has passed."""
        ...

    def cancel(self) -> None:
        """Asks for an early end; the transfer stays pending until no copy touches the caller's memory."""
        ...

    def wait(self, timeout_s: float | None = None) -> TransferState:
        """Waits for the end, at most `timeout_s` seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounters:
    """Totals of one tier since it was opened."""

    tier: str
    """Its name."""
    num_finds: int
    hit_blocks: int
    missed_blocks: int
    """Asked for and not in the beginning that was found."""
    loaded_blocks: int
    saved_blocks: int
    evicted_blocks: int
    """Given up for space or age."""
    corrupt_blocks: int
    """Dropped, because their bytes or their header did not fit the checksum."""
    stored_blocks: int
    """Held at this moment."""
    failures: Mapping[TierFailure, int]
    """Transfers that ended partial; every reason is present; read-only."""
    condition: TierCondition = TierCondition.OK


class KvTier(Protocol):
    """A place for blocks of one layout; one thread calls it, others move the bytes.

    `blocks` are C-contiguous memory of `layout.block_bytes` bytes each (`memoryview`s of format "B").
    """

    @property
    def name(self) -> str:
        """Short, for counters and logs."""
        ...

    @property
    def layout(self) -> KvLayout:
        """The layout of every block it holds."""
        ...

    @property
    def accepts_saves(self) -> bool:
        """False where another process fills the store that this one reads."""
        ...

    def find(self, digests: Sequence[Digest]) -> TierHit:
        """The longest beginning of `digests` that it holds, maybe empty; in memory, no input or output."""
        ...

    def load(self, hit: TierHit, blocks: Sequence[memoryview], *, timeout_s: float | None = None) -> Transfer:
        """Begins to copy a hit's blocks into writable memory, in order; takes the hit over.

        Args:
            hit: of this tier's `find`, neither closed nor loaded.
            blocks: as many as the hit has.
            timeout_s: after which it ends partial; a copy that touches `blocks` at that moment is waited for.

        Raises:
            KvTierError: the hit is spent or another tier's, or the memory is not blocks of the layout.
        """
        ...

    def save(
        self, digests: Sequence[Digest], blocks: Sequence[memoryview], *, timeout_s: float | None = None
    ) -> Transfer:
        """Begins to copy sealed blocks into the tier, in order; one that it has already counts as completed.

        Raises:
            KvTierError: the memory is not blocks of the layout, the lengths differ, or it accepts no saves.
        """
        ...

    def counters(self) -> tuple[TierCounters, ...]:
        """One for each tier: a stack has several."""
        ...

    def close(self) -> None:
        """Ends what is pending as partial (`CLOSED`), and gives everything back; closing again does nothing.

        It may come from another thread than the calls before it. An engine that ends waits a few seconds for it, and
        ends then without it: a tier that may take longer is a `TimedTier`, which is told the time, and no tier keeps
        what a save has completed only until here.
        """
        ...


@runtime_checkable
class EvictingTier(KvTier, Protocol):
    """A tier that can hand blocks on when it gives them up: one above another in a write-back stack."""

    def demote_to(self, sink: Callable[[Digest, memoryview], None]) -> None:
        """From now on gives each intact block that is evicted to `sink`, in a thread of the tier; it may block."""
        ...

    def demote_all(self) -> None:
        """Gives every intact block that it holds to the sink and keeps it: before a shutdown."""
        ...


class KvTierFactory(Protocol):
    """What an entry point of `openinfer.kv_tiers` names: makes a tier from what a user writes on a command line."""

    def __call__(self, layout: KvLayout, setting: str) -> KvTier:
        """Opens a tier.

        Args:
            layout: of the blocks it will hold.
            setting: what follows `NAME=`, as in `disk=/path,500GiB`.

        Raises:
            LayoutMismatchError: what is stored there has another layout.
            ValueError: the setting means nothing; the message says what is possible.
        """
        ...


@runtime_checkable
class TierSettingCheck(Protocol):
    """A `KvTierFactory` that says what is wrong with a setting without opening what it names.

    `openinfer plan` asks it. A factory without it is asked for a tier instead, which is closed again.
    """

    def check_setting(self, layout: KvLayout, setting: str) -> None:
        """Raises what the factory raises for a setting that means nothing; opens, makes and connects nothing."""
        ...
