"""`BlockPool`: the one owner of every block's state.

            allocate            seal             retire
    free ─────────────► writable ──────► sealed ◄──────► idle
     ▲ ▲     abandon       │                    revive     │
     │ └───────────────────┘                               │
     └─────────────────────────────────────────────────────┘
                              evict

    free      no content, no user
    writable  one user, which may write; never shared
    sealed    content final, one user or more (sequences and pins), read-only
    idle      content final and found by its digest, no user; evicted when blocks are short

`StateTable.move` enforces the diagram: anything else raises `BlockStateError` and changes nothing.

A sealed block is *registered* when its digest leads to it. Sealing content that is registered already keeps
the block as an unregistered duplicate, because its id is in a block table that the runner holds. Where the
first copy is evicted, a duplicate that is still in use takes over the registration at once, so that its content
is found on, and no listener has anything to hear; one that loses its last user before that passes through idle
straight to free.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType, TracebackType
from typing import Self

from openinfer_kv_cache.checks import check_count, require
from openinfer_kv_cache.counters import EvictionReason, PoolCounters
from openinfer_kv_cache.digest import Digest
from openinfer_kv_cache.errors import BlockStateError, EvictionPolicyError, KvConfigError
from openinfer_kv_cache.eviction.fair import FairLeastRecentlyUsed
from openinfer_kv_cache.eviction.policy import EvictionPolicy, EvictsByOwner, Expiry, KeepsConversations, RetainsBlocks
from openinfer_kv_cache.listener import BlockListener
from openinfer_kv_cache.states import StateTable, Transition


class BlockState(IntEnum):
    """See the module's diagram."""

    FREE = 0
    WRITABLE = 1
    SEALED = 2
    IDLE = 3


_ALLOCATE = Transition("allocate", BlockState.FREE, BlockState.WRITABLE)
_ABANDON = Transition("abandon", BlockState.WRITABLE, BlockState.FREE)
_SEAL = Transition("seal", BlockState.WRITABLE, BlockState.SEALED)
_RETIRE = Transition("retire", BlockState.SEALED, BlockState.IDLE)
_REVIVE = Transition("revive", BlockState.IDLE, BlockState.SEALED)
_EVICT = Transition("evict", BlockState.IDLE, BlockState.FREE)


class BlockPin:
    """A user of sealed blocks that is no sequence: keeps their content while a copy reads it."""

    __slots__ = ("_unpin", "block_ids")

    def __init__(self, block_ids: tuple[int, ...], unpin: Callable[[tuple[int, ...]], None]) -> None:
        self.block_ids = block_ids
        self._unpin: Callable[[tuple[int, ...]], None] | None = unpin

    def close(self) -> None:
        # Once: closing again must not take away another user.
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin(self.block_ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class BlockPool:
    """Blocks `0 .. num_blocks - 1`, their states, users and digests. Used from one thread.

    Args:
        num_blocks: blocks of the pool.
        block_size_tokens: tokens of one block.
        policy: order of eviction; least recently used, fair over owners, if None. The pool owns it from here on.
        idle_ttl_s: seconds after which an idle block is no longer found; None keeps it until space is short.
        clock: monotonic seconds; read only when `idle_ttl_s` is given, or blocks are retained.

    Raises:
        KvConfigError: a number is out of range.
    """

    __slots__ = (
        "_clock",
        "_digests",
        "_duplicate_blocks",
        "_duplicates",
        "_evicted",
        "_expiry",
        "_free",
        "_generation",
        "_hit_blocks",
        "_keeping",
        "_missed_blocks",
        "_num_idle",
        "_num_matches",
        "_owners",
        "_pins",
        "_policy",
        "_registry",
        "_retaining",
        "_sealed_blocks",
        "_states",
        "_users",
        "block_size_tokens",
        "listener",
        "num_blocks",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        *,
        policy: EvictionPolicy | None = None,
        idle_ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_count("num_blocks", num_blocks)
        check_count("block_size_tokens", block_size_tokens)
        if idle_ttl_s is not None and not idle_ttl_s > 0:
            raise KvConfigError(f"idle_ttl_s is {idle_ttl_s}; it must be positive, or None to keep idle blocks")
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        # Told of removals by the pool, and by its sequences of what they have sealed.
        self.listener: BlockListener | None = None
        self._states = StateTable(num_blocks, BlockState, noun="block")
        self._users = [0] * num_blocks
        self._digests: list[Digest | None] = [None] * num_blocks
        self._registry: dict[Digest, int] = {}
        self._duplicates: dict[Digest, list[int]] = {}  # blocks in use whose digest leads to another
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_idle = 0
        self._policy: EvictionPolicy = FairLeastRecentlyUsed(num_blocks, clock=clock) if policy is None else policy
        self._clock = clock
        self._retaining = self._policy if isinstance(self._policy, RetainsBlocks) else None
        self._keeping = self._policy if isinstance(self._policy, KeepsConversations) else None
        self._owners = self._policy if isinstance(self._policy, EvictsByOwner) else None
        self._expiry = None if idle_ttl_s is None else Expiry(idle_ttl_s, clock)
        self._pins: Counter[int] = Counter()
        self._generation = 0
        self._num_matches = self._hit_blocks = self._missed_blocks = 0
        self._sealed_blocks = self._duplicate_blocks = 0
        self._evicted: Counter[EvictionReason] = Counter()

    # Questions.

    @property
    def available_blocks(self) -> int:
        return len(self._free) + self._num_idle

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def idle_blocks(self) -> int:
        return self._num_idle

    @property
    def generation(self) -> int:
        """How often the pool was cleared; content computed in an earlier generation is never registered."""
        return self._generation

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size_tokens)

    def state(self, block_id: int) -> BlockState:
        return self._states[block_id]

    def num_users(self, block_id: int) -> int:
        return self._users[block_id]

    def num_pins(self, block_id: int) -> int:
        return self._pins[block_id]

    def digest(self, block_id: int) -> Digest | None:
        """Identity of a sealed or idle block's content; None if it has none, or `clear` voided it."""
        return self._digests[block_id]

    def find(self, digest: Digest) -> int | None:
        """The block registered under `digest`, sealed or idle; takes no user and counts no hit."""
        return self._registry.get(digest)

    def find_prefix(self, digests: Iterable[Digest]) -> list[int]:
        lookup = self._registry.get
        found: list[int] = []
        for digest in digests:
            block_id = lookup(digest)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def is_idle(self, block_id: int) -> bool:
        return self._states.is_in(block_id, BlockState.IDLE)

    def used_blocks(self, owner: str) -> int:
        """Blocks in use that are an owner's; 0 if the policy is no `EvictsByOwner`."""
        return 0 if self._owners is None else self._owners.used_blocks(owner)

    def share_blocks(self) -> int:
        """What of the pool is each owner's that has used it lately."""
        return self.num_blocks if self._owners is None else self._owners.share_blocks()

    def protected_blocks(self, owner: str | None = None) -> int:
        """Of the available blocks, idle ones that an owner, or anyone, should leave others, within their shares."""
        return sum(self.protected_by_owner(owner).values())

    def protected_by_owner(self, owner: str | None = None) -> Mapping[str, int]:
        """The same, by the owner whose they are; one that is not there has none."""
        return {} if self._owners is None else self._owners.protected_blocks(owner)

    def counters(self) -> PoolCounters:
        return PoolCounters(
            num_matches=self._num_matches,
            hit_blocks=self._hit_blocks,
            missed_blocks=self._missed_blocks,
            sealed_blocks=self._sealed_blocks,
            duplicate_blocks=self._duplicate_blocks,
            evicted_blocks=MappingProxyType({reason: self._evicted[reason] for reason in EvictionReason}),
        )

    # Moves.

    def allocate(self, num_blocks: int, owner: str = "") -> list[int] | None:
        """Hands out writable blocks with one user each, evicting idle ones; None, and nothing has changed, if short."""
        short = num_blocks - len(self._free)
        if short > 0:
            if short > self._num_idle:
                return None
            self._evict(self._select_victims(short, owner, gaining=num_blocks), EvictionReason.CAPACITY)
        if num_blocks < 1:
            return []
        taken = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        taken.reverse()
        self._states.move(taken, _ALLOCATE)
        users = self._users
        for block_id in taken:
            users[block_id] = 1
        if self._owners is not None:
            self._owners.took(taken, owner, new=True)
        return taken

    def acquire(self, block_ids: Sequence[int], owner: str | None = None) -> None:
        """Adds one user to each of some distinct sealed or idle blocks, as `find` returned them.

        They are the owner's from here on; None leaves them with theirs.
        """
        users = self._users
        idle: list[int] = []
        used: list[int] = []
        for block_id in block_ids:
            (used if users[block_id] else idle).append(block_id)
        if used:
            self._states.require(used, BlockState.SEALED, verb="share")
        if idle:
            self._revive(idle)
        for block_id in block_ids:
            users[block_id] += 1
        if owner is not None and self._owners is not None:
            self._owners.took(block_ids, owner, new=False)

    def seal(self, block_ids: Sequence[int], digests: Sequence[Digest] | None) -> None:
        """Declares the content of writable blocks final, and registers it where its digest is new.

        Without digests it stays private to its present user. `BlockStateError`, and nothing has changed, if a block is
        not writable or the lengths differ.
        """
        if digests is not None and len(digests) != len(block_ids):
            raise BlockStateError(f"cannot seal {len(block_ids)} blocks with {len(digests)} digests")
        self._states.move(block_ids, _SEAL)
        self._sealed_blocks += len(block_ids)
        if digests is None:
            return
        registry, known = self._registry, self._digests
        for block_id, digest in zip(block_ids, digests, strict=False):
            known[block_id] = digest
            # The first block of a digest is the one that is found; a duplicate lives as long as its users.
            if registry.setdefault(digest, block_id) != block_id:
                self._duplicate_blocks += 1
                self._duplicates.setdefault(digest, []).append(block_id)

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes one user from each block; list the tail of a sequence before its head.

        Without a user, a writable block becomes free and a sealed one idle. A block that has none raises
        `BlockStateError`, and nothing has changed.
        """
        users = self._users
        unused: list[int] = []
        for position, block_id in enumerate(block_ids):
            left = users[block_id] - 1
            if left < 0:
                for undone in block_ids[:position]:  # all or none, as every move of the pool
                    users[undone] += 1
                state = self.state(block_id).name.lower()
                raise BlockStateError(f"cannot release block {block_id}: it is {state}, without a user")
            users[block_id] = left
            if not left:
                unused.append(block_id)
        if unused:
            self._drop(unused)

    def pin(self, block_ids: Sequence[int]) -> BlockPin:
        """Keeps distinct sealed or idle blocks from eviction until the pin is closed; raises as `acquire` does."""
        self.acquire(block_ids)
        self._pins.update(block_ids)
        return BlockPin(tuple(block_ids), self._unpin)

    def pin_prefix(self, digests: Iterable[Digest]) -> BlockPin:
        """Pins what `find_prefix` finds, which may be nothing."""
        return self.pin(self.find_prefix(digests))

    def retain(self, block_ids: Sequence[int], for_s: float) -> None:
        """Has sealed or idle blocks given up after others for so many seconds from now, 0 for no longer.

        A block that is retained for longer already stays so. An order of eviction, and no pin: it makes nothing wait.
        Does nothing where the policy is no `RetainsBlocks`.
        """
        if self._retaining is not None:
            kept = [block_id for block_id in block_ids if self._digests[block_id] is not None]
            self._retaining.retain(kept, self._clock() + for_s if for_s > 0 else None)

    @property
    def retained_blocks(self) -> int:
        return 0 if self._retaining is None else self._retaining.num_retained

    @property
    def keeps_conversations(self) -> bool:
        """Whether the policy is a `KeepsConversations`; `keep_conversation` and `drop_conversation` do nothing else."""
        return self._keeping is not None

    def keep_conversation(self, block_ids: Sequence[int], conversation: int, *, turn: int, interval: int) -> None:
        """Has a sequence's blocks given up after others, but before what is retained; see `KeepsConversations.keep`."""
        if self._keeping is not None and block_ids and self._digests[block_ids[0]] is not None:  # None: cleared since
            self._keeping.keep(block_ids, conversation, turn=turn, interval=interval)

    def drop_conversation(self, conversation: int) -> None:
        if self._keeping is not None:
            self._keeping.drop(conversation)

    @property
    def kept_idle_blocks(self) -> int:
        """Of the available blocks, those that conversations keep."""
        return 0 if self._keeping is None else self._keeping.num_kept_idle

    def kept_blocks(self, conversation: int) -> int:
        return 0 if self._keeping is None else self._keeping.kept_blocks(conversation)

    def expire(self) -> int:
        if self._expiry is None:
            return 0
        due = self._expiry.due()
        self._policy.forget(due)
        self._evict(due, EvictionReason.EXPIRED)
        return len(due)

    def clear(self) -> int:
        """Voids all content, as after a change of weights: nothing sealed or computed so far is found again.

        Idle blocks become free, and are counted. Blocks in use keep their state and bytes for their users, without a
        digest, and become free when the last user leaves.
        """
        idle = [block_id for block_id in range(self.num_blocks) if self.is_idle(block_id)]
        self._policy.forget(idle)
        self._evict(idle, EvictionReason.CLEARED)
        self._registry.clear()
        self._duplicates.clear()
        self._digests = [None] * self.num_blocks
        # What a sequence that holds blocks now computes later is sealed without a digest: it began on the old content.
        self._generation += 1
        if self.listener is not None:
            self.listener.cleared()
        return len(idle)

    def count_match(self, *, hit_blocks: int, missed_blocks: int) -> None:
        self._num_matches += 1
        self._hit_blocks += hit_blocks
        self._missed_blocks += missed_blocks

    def _unpin(self, block_ids: tuple[int, ...]) -> None:
        for block_id in block_ids:
            if self._pins[block_id] == 1:
                del self._pins[block_id]
            else:
                self._pins[block_id] -= 1
        self.release(block_ids)

    def _revive(self, idle: list[int]) -> None:
        self._states.move(idle, _REVIVE)
        self._policy.reuse(idle)
        self._num_idle -= len(idle)
        if self._expiry is not None:
            self._expiry.remove(idle)

    def _drop(self, unused: list[int]) -> None:
        """Writable → free, sealed → idle, and on to free if no digest finds it."""
        digests, registry = self._digests, self._registry
        findable: list[int] = []
        duplicates: list[int] = []
        unnamed: list[int] = []
        for block_id in unused:
            digest = digests[block_id]
            if digest is None:
                unnamed.append(block_id)
            elif registry[digest] == block_id:
                findable.append(block_id)
            else:
                duplicates.append(block_id)
                self._take_duplicate(digest, block_id)
        if findable:
            self._retire(findable)
        if duplicates:
            self._discard(duplicates, EvictionReason.DUPLICATE)
        if unnamed:
            self._drop_unnamed(unnamed)

    def _retire(self, findable: list[int]) -> None:
        self._states.move(findable, _RETIRE)
        self._policy.admit(findable)
        self._num_idle += len(findable)
        if self._expiry is not None:
            self._expiry.admit(findable)

    def _drop_unnamed(self, unnamed: list[int]) -> None:
        # Never sealed, or sealed and voided by `clear` since.
        writable: list[int] = []
        voided: list[int] = []
        for block_id in unnamed:
            (writable if self._states.is_in(block_id, BlockState.WRITABLE) else voided).append(block_id)
        self._states.move(writable, _ABANDON)
        self._free.extend(writable)
        if self._owners is not None:
            self._owners.freed(writable)
        self._discard(voided, EvictionReason.CLEARED)

    def _discard(self, block_ids: list[int], reason: EvictionReason) -> None:
        # Through idle: the diagram has no other way to free, and to the policy they never were.
        self._states.move(block_ids, _RETIRE)
        self._states.move(block_ids, _EVICT)
        if self._owners is not None:
            self._owners.freed(block_ids)
        self._empty(block_ids, reason)

    def _evict(self, block_ids: list[int], reason: EvictionReason) -> None:
        # The policy holds them no longer.
        self._states.move(block_ids, _EVICT)
        gone = [digest for block_id in block_ids if (digest := self._digests[block_id]) is not None]
        if self._duplicates and reason is not EvictionReason.CLEARED:
            gone = [digest for digest in gone if not self._pass_on(digest)]
        # `clear` tells of all content at once.
        if self.listener is not None and gone and reason is not EvictionReason.CLEARED:
            self.listener.removed(gone)
        for digest in gone:
            del self._registry[digest]
        if self._expiry is not None:
            self._expiry.remove(block_ids)
        self._num_idle -= len(block_ids)
        self._empty(block_ids, reason)

    def _pass_on(self, digest: Digest) -> bool:
        """Whether a duplicate in use has the registration of an evicted block now."""
        if digest not in self._duplicates:
            return False
        block_id = self._registry[digest] = self._duplicates[digest][0]
        self._take_duplicate(digest, block_id)
        return True

    def _take_duplicate(self, digest: Digest, block_id: int) -> None:
        self._duplicates[digest].remove(block_id)
        if not self._duplicates[digest]:
            del self._duplicates[digest]

    def _empty(self, block_ids: list[int], reason: EvictionReason) -> None:
        digests = self._digests
        for block_id in block_ids:
            digests[block_id] = None
        self._free.extend(block_ids)
        self._evicted[reason] += len(block_ids)

    def _select_victims(self, num_blocks: int, owner: str, *, gaining: int) -> list[int]:
        if self._owners is None:
            victims = self._policy.select(num_blocks)
        else:
            victims = self._owners.select_for(num_blocks, owner, gaining=gaining)
        # A policy is a plug-in: evicting a block in use for it would be wrong KV in another request.
        if not (len(set(victims)) == len(victims) == num_blocks and self._states.are_all_in(victims, BlockState.IDLE)):
            raise EvictionPolicyError(
                f"{type(self._policy).__name__}.select({num_blocks}) returned {victims}; "
                f"it must return {num_blocks} different idle blocks"
            )
        return victims

    # Integrity.

    def check_integrity(self) -> None:
        """Compares everything the pool knows with everything else; O(num_blocks). Raises `IntegrityError`."""
        free = set(self._free)
        require(len(free) == len(self._free), "the free list names a block twice")
        for block_id in range(self.num_blocks):
            self._check_block(block_id, is_listed_free=block_id in free)
        num_idle = self._states.count(BlockState.IDLE)
        require(self._num_idle == num_idle, f"{num_idle} blocks are idle and {self._num_idle} are counted")
        require(
            self._expiry is None or len(self._expiry) == num_idle,
            "the expiry does not hold exactly the idle blocks",
        )
        for digest, block_id in self._registry.items():
            require(
                self._digests[block_id] == digest,
                f"block {block_id} is registered under a digest not its own",
            )
        listed = {block_id for block_ids in self._duplicates.values() for block_id in block_ids}
        unregistered = {
            block_id
            for block_id, digest in enumerate(self._digests)
            if digest is not None and self._registry.get(digest) != block_id
        }
        require(listed == unregistered, f"blocks {unregistered} are duplicates and {listed} are listed")

    def _check_block(self, block_id: int, *, is_listed_free: bool) -> None:
        state, users, digest = self.state(block_id), self._users[block_id], self._digests[block_id]
        what = f"block {block_id} ({state.name.lower()}, {users} users)"
        require(is_listed_free == (state is BlockState.FREE), f"{what} and the free list disagree")
        require(users >= self._pins[block_id] >= 0, f"{what} has {self._pins[block_id]} pins")
        match state:
            case BlockState.FREE:
                require(users == 0 and digest is None, f"{what} has content")
            case BlockState.WRITABLE:
                require(users == 1 and digest is None, f"{what} is shared or has a digest")
            case BlockState.SEALED:
                require(users >= 1, f"{what} should be idle")
            case BlockState.IDLE:
                require(users == 0, f"{what} is in use")
                require(digest is not None and self._registry.get(digest) == block_id, f"{what} cannot be found")
                require(self._expiry is None or block_id in self._expiry, f"{what} never expires")
