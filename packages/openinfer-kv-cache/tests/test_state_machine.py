"""Random traffic against a model that is too simple to be wrong, and against simulated device memory.

The model keeps whole prefixes instead of digests and plain lists instead of counters. The simulated memory
holds, for every position of every block, the prefix whose KV was last written there; so a block that is
overwritten, shared or found when it must not be shows up as a sequence reading another prefix's KV.
"""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from openinfer_kv_cache import (
    BlockPin,
    BlockSequence,
    BlockState,
    CopyKind,
    Digest,
    EvictionReason,
    KvCache,
    KvCacheOptions,
    SlotCopy,
    SlotPool,
)

BLOCK_TOKENS = 2
TTL_S = 50.0
WORLDS = st.sampled_from([(None, None), (None, None), (None, None), ("salt", None), (None, "lora")])
IDS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=0, max_size=9)


@dataclass(eq=False)
class Cell:
    """What the model knows of one block that is not free."""

    users: int = 1
    prefix: tuple | None = None
    is_void: bool = False
    idle_since_s: float = 0.0


class ModelPool:
    """The rules of a pool over whole prefixes."""

    def __init__(self, num_blocks: int) -> None:
        self.free = num_blocks
        self.registry: dict[tuple, Cell] = {}
        self.idle: list[Cell] = []
        self.evicted = dict.fromkeys(EvictionReason, 0)

    def allocate(self, count: int) -> list[Cell] | None:
        if count > self.free + len(self.idle):
            return None
        while self.free < count:
            self.drop_idle(self.idle[0], EvictionReason.CAPACITY)
        self.free -= count
        return [Cell() for _ in range(count)]

    def drop_idle(self, cell: Cell, reason: EvictionReason) -> None:
        self.idle.remove(cell)
        del self.registry[cell.prefix]
        self.free += 1
        self.evicted[reason] += 1

    def find(self, prefixes: list[tuple]) -> list[Cell]:
        found = []
        for prefix in prefixes:
            if prefix not in self.registry:
                break
            found.append(self.registry[prefix])
        return found

    def acquire(self, cells: list[Cell]) -> None:
        for cell in cells:
            if not cell.users:
                self.idle.remove(cell)
            cell.users += 1

    def seal(self, cell: Cell, prefix: tuple, *, is_void: bool) -> None:
        cell.prefix, cell.is_void = prefix, is_void
        if not is_void:
            self.registry.setdefault(prefix, cell)

    def release(self, cells: list[Cell], now_s: float) -> None:
        for cell in cells:
            cell.users -= 1
            if cell.users:
                continue
            if cell.prefix is not None and not cell.is_void and self.registry.setdefault(cell.prefix, cell) is cell:
                cell.idle_since_s = now_s
                self.idle.append(cell)
                continue
            self.free += 1
            if cell.prefix is not None:
                self.evicted[EvictionReason.CLEARED if cell.is_void else EvictionReason.DUPLICATE] += 1

    def expire(self, now_s: float) -> None:
        for cell in list(self.idle):
            if now_s - cell.idle_since_s >= TTL_S:
                self.drop_idle(cell, EvictionReason.EXPIRED)

    def clear(self, held: list[Cell]) -> None:
        for cell in list(self.idle):
            self.drop_idle(cell, EvictionReason.CLEARED)
        self.registry.clear()
        for cell in held:
            cell.is_void = True


@dataclass(eq=False)
class Request:
    """A sequence, what the model says of it, and what the device knows."""

    sequence: BlockSequence
    world: tuple
    device_ids: list[int]
    """The ids behind the KV; the host learns the last ones later."""
    cells: list[Cell] = field(default_factory=list)
    sealed: int = 0
    computed: int = 0
    epoch: int = 0

    @property
    def known(self) -> int:
        return self.sequence.num_tokens

    def prefix(self, end: int) -> tuple:
        return (self.world, tuple(self.device_ids[:end]))

    def block_prefixes(self, num_tokens: int) -> list[tuple]:
        return [self.prefix(end) for end in range(BLOCK_TOKENS, num_tokens + 1, BLOCK_TOKENS)]


class CacheMachine(RuleBasedStateMachine):
    """All verbs of sequences and the pool, in any order that a scheduler may use."""

    @initialize(num_blocks=st.integers(2, 9), with_ttl=st.booleans())
    def make(self, num_blocks: int, with_ttl: bool) -> None:
        self.now_s = 0.0
        self.with_ttl = with_ttl
        options = KvCacheOptions(
            num_blocks=num_blocks, block_size_tokens=BLOCK_TOKENS, idle_ttl_s=TTL_S if with_ttl else None
        )
        self.cache = KvCache(options, digest_key=bytes(16), clock=lambda: self.now_s)
        self.model = ModelPool(num_blocks)
        self.memory: dict[tuple[int, int], tuple] = {}
        self.requests: list[Request] = []
        self.pins: list[tuple[BlockPin, list[Cell]]] = []
        self.epoch = 0

    def pick(self, data, wanted=lambda request: True) -> Request | None:
        candidates = [request for request in self.requests if wanted(request)]
        return data.draw(st.sampled_from(candidates)) if candidates else None

    # Verbs, each compared with the model.

    def arrive(self, world: tuple, ids: list[int]) -> Request:
        sequence = self.cache.sequence(ids, cache_salt=world[0], lora_name=world[1])
        self.requests.append(Request(sequence, world, list(ids), epoch=self.epoch))
        return self.requests[-1]

    def match(self, request: Request) -> None:
        if self.with_ttl:
            self.model.expire(self.now_s)
        expected = self.model.find(request.block_prefixes(max(request.known - 1, 0)))
        assert request.sequence.match() == len(expected) * BLOCK_TOKENS
        self.model.acquire(expected)
        request.cells, request.sealed = expected, len(expected)
        request.computed = len(expected) * BLOCK_TOKENS
        request.epoch = self.epoch

    def reserve(self, request: Request, num_tokens: int) -> bool:
        before = list(request.sequence.blocks)
        added = request.sequence.reserve(num_tokens)
        cells = self.model.allocate(max(-(-num_tokens // BLOCK_TOKENS) - len(before), 0))
        if cells is None:
            assert added is None
            assert request.sequence.blocks == before
            return False
        assert added is not None
        assert request.sequence.blocks == [*before, *added]
        if not before:
            request.epoch = self.epoch
        request.cells.extend(cells)
        return True

    def compute(self, request: Request, count: int) -> None:
        """A step writes the KV of the next positions; the device knows all their ids."""
        end = min(request.computed + count, len(request.device_ids), len(request.cells) * BLOCK_TOKENS)
        for position in range(request.computed, end):
            block = request.sequence.blocks[position // BLOCK_TOKENS]
            self.memory[block, position % BLOCK_TOKENS] = request.prefix(position + 1)
        request.computed = max(request.computed, end)

    def seal(self, request: Request) -> None:
        table = list(request.sequence.blocks)
        end = max(min(request.computed, request.known) // BLOCK_TOKENS, request.sealed)
        assert list(request.sequence.seal(request.computed)) == table[request.sealed : end]
        for position in range(request.sealed, end):
            prefix = request.prefix((position + 1) * BLOCK_TOKENS)
            self.model.seal(request.cells[position], prefix, is_void=request.epoch != self.epoch)
        request.sealed = end

    def cut(self, request: Request, num_tokens: int, kept: int) -> None:
        """What shrink and truncate have in common."""
        is_cut_in_sealed = num_tokens < request.sealed * BLOCK_TOKENS
        blocks = num_tokens // BLOCK_TOKENS if is_cut_in_sealed else -(-num_tokens // BLOCK_TOKENS)
        dropped = request.cells[blocks:]
        del request.cells[blocks:]
        self.model.release(dropped[::-1], self.now_s)
        assert kept == min(num_tokens, len(request.cells) * BLOCK_TOKENS)
        request.sealed = min(request.sealed, blocks)
        request.computed = min(request.computed, kept)

    # Requests.

    @precondition(lambda self: len(self.requests) < 4)
    @rule(world=WORLDS, ids=IDS)
    def wait(self, world: tuple, ids: list[int]) -> None:
        """A request that has to wait: it holds nothing."""
        self.arrive(world, ids)

    @precondition(lambda self: len(self.requests) < 6)
    @rule(world=WORLDS, ids=IDS, count=st.integers(1, 9))
    def prefill(self, world: tuple, ids: list[int], count: int) -> None:
        """A request is admitted and (a part of) its prompt computed: what happens most."""
        request = self.arrive(world, ids)
        self.match(request)
        if self.reserve(request, min(request.computed + count, len(ids))):
            self.compute(request, count)
            self.seal(request)

    @rule(data=st.data(), num_tokens=st.integers(1, 14))
    def admit(self, data, num_tokens: int) -> None:
        """`would_fit` tells exactly whether match and reserve will succeed."""
        request = self.pick(data, lambda request: not request.cells)
        if request is None:
            return
        fits = request.sequence.would_fit(num_tokens)
        cached_tokens = request.sequence.count_cached_tokens()
        evicted = self.cache.pool.counters().evicted_blocks[EvictionReason.EXPIRED]
        self.match(request)
        if evicted == self.cache.pool.counters().evicted_blocks[EvictionReason.EXPIRED]:
            assert request.computed == cached_tokens
        assert self.reserve(request, num_tokens) == fits
        if not fits:
            self.cut(request, 0, request.sequence.shrink(0))

    @rule(data=st.data(), num_tokens=st.integers(0, 14), spare=st.integers(0, 3))
    def grow(self, data, num_tokens: int, spare: int) -> None:
        request = self.pick(data, lambda request: request.cells)
        if request is None:
            return
        missing = max(-(-num_tokens // BLOCK_TOKENS) - len(request.cells), 0)
        room = self.cache.pool.available_blocks - spare
        assert request.sequence.would_fit(num_tokens, spare_blocks=spare) == (missing == 0 or missing <= room)
        self.reserve(request, num_tokens)

    @rule(data=st.data(), count=st.integers(1, 6))
    def step(self, data, count: int) -> None:
        request = self.pick(data, lambda request: request.cells)
        if request is not None:
            self.compute(request, count)

    @rule(data=st.data(), token_id=st.integers(0, 1))
    def sample(self, data, token_id: int) -> None:
        """The device samples; the host does not know the id yet."""
        request = self.pick(data, lambda request: len(request.device_ids) < 14)
        if request is not None:
            request.device_ids.append(token_id)

    @rule(data=st.data())
    def learn(self, data) -> None:
        """Ids come back from the device."""
        request = self.pick(data, lambda request: request.known < len(request.device_ids))
        if request is not None:
            request.sequence.extend(request.device_ids[request.known :])

    @rule(data=st.data())
    def seal_computed(self, data) -> None:
        request = self.pick(data, lambda request: request.cells)
        if request is not None:
            self.seal(request)

    @rule(data=st.data(), num_tokens=st.integers(0, 12))
    def shrink(self, data, num_tokens: int) -> None:
        request = self.pick(data, lambda request: request.cells)
        if request is not None:
            self.cut(request, num_tokens, request.sequence.shrink(num_tokens))

    @rule(data=st.data(), num_tokens=st.integers(0, 12))
    def truncate(self, data, num_tokens: int) -> None:
        request = self.pick(data)
        if request is not None:
            kept = request.sequence.truncate(num_tokens)
            del request.device_ids[num_tokens:]
            self.cut(request, num_tokens, kept)

    @rule(data=st.data())
    def release(self, data) -> None:
        request = self.pick(data)
        if request is not None:
            request.sequence.release()
            self.model.release(request.cells[::-1], self.now_s)
            self.requests.remove(request)

    # The pool.

    @precondition(lambda self: len(self.pins) < 3)
    @rule(data=st.data())
    def pin(self, data) -> None:
        request = self.pick(data, lambda request: request.sealed > 0)
        if request is None:
            return
        end = data.draw(st.integers(1, request.sealed))
        self.pins.append((self.cache.pool.pin(request.sequence.blocks[:end]), request.cells[:end]))
        self.model.acquire(request.cells[:end])

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data) -> None:
        pin, cells = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        pin.close()
        pin.close()
        self.model.release(cells, self.now_s)

    @rule(really=st.integers(0, 3))
    def clear(self, really: int) -> None:
        if really:
            return
        self.cache.clear()
        held = [cell for request in self.requests for cell in request.cells[: request.sealed]]
        self.model.clear([*held, *(cell for _, cells in self.pins for cell in cells)])
        self.epoch += 1

    @rule(seconds=st.sampled_from([1.0, 20.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        if self.with_ttl:
            self.model.expire(self.now_s)
        self.cache.pool.expire()

    # Always.

    @invariant()
    def books_agree(self) -> None:
        self.cache.check_integrity()

    @invariant()
    def pool_is_the_model(self) -> None:
        pool = self.cache.pool
        assert (pool.free_blocks, pool.idle_blocks) == (self.model.free, len(self.model.idle))
        assert pool.available_blocks == self.model.free + len(self.model.idle)
        assert dict(pool.counters().evicted_blocks) == self.model.evicted
        assert self.cache.num_live_sequences == len(self.requests)

    @invariant()
    def sequences_are_the_model(self) -> None:
        for request in self.requests:
            assert len(request.sequence.blocks) == len(request.cells)
            assert request.sequence.num_sealed_blocks == request.sealed
            users = [self.cache.pool.num_users(block) for block in request.sequence.blocks]
            assert users == [cell.users for cell in request.cells]

    @invariant()
    def nobody_reads_wrong_kv(self) -> None:
        for request in self.requests:
            for position in range(request.computed):
                block = request.sequence.blocks[position // BLOCK_TOKENS]
                assert self.memory[block, position % BLOCK_TOKENS] == request.prefix(position + 1)

    @invariant()
    def content_is_what_its_digest_says(self) -> None:
        """Pinned and idle content too, which no sequence reads now."""
        pool, hasher = self.cache.pool, self.cache.hasher
        for block in range(pool.num_blocks):
            if pool.state(block) in (BlockState.SEALED, BlockState.IDLE) and pool.digest(block) is not None:
                (salt, lora), ids = self.memory[block, BLOCK_TOKENS - 1]
                root = hasher.root(cache_salt=salt, lora_name=lora)
                assert hasher.chain(root, ids)[-1] == pool.digest(block)


class SlotMachine(RuleBasedStateMachine):
    """Slots against simulated device memory; copies run some time between their begin and their end."""

    @initialize(num_slots=st.integers(1, 6), data=st.data())
    def make(self, num_slots: int, data) -> None:
        self.pool = SlotPool(num_slots, max_snapshots=data.draw(st.integers(0, num_slots - 1)))
        self.memory: dict[int, object] = {}
        self.live: dict[int, object] = {}
        """Slot of a sequence -> what its state must be; None while undefined."""
        self.copies: dict[SlotCopy, str] = {}
        self.left: set[int] = set()
        self.kept: dict[Digest, object] = {}
        self.steps = 0

    def in_copy(self, slot: int) -> bool:
        return any(slot in (copy.source, copy.target) for copy in self.copies)

    def draw_copy(self, data, stage: str) -> SlotCopy | None:
        candidates = [copy for copy, now in self.copies.items() if now == stage]
        return data.draw(st.sampled_from(candidates)) if candidates else None

    @rule()
    def allocate_and_step(self) -> None:
        self.allocate()
        for slot, state in self.live.items():
            if state is None and not self.in_copy(slot):
                self.steps += 1
                self.memory[slot] = self.live[slot] = ("state", self.steps)

    def allocate(self) -> None:
        busy = len(self.live) + len(self.left) + len({copy.source for copy in self.copies} - {*self.live, *self.left})
        filling = sum(copy.kind is CopyKind.SNAPSHOT for copy in self.copies)
        slot = self.pool.allocate()
        assert (slot is None) == (busy + filling == self.pool.num_slots)
        if slot is not None:
            assert slot not in self.live
            assert not self.in_copy(slot)
            self.live[slot] = None
            self.forget_evicted()

    def forget_evicted(self) -> None:
        self.kept = {digest: state for digest, state in self.kept.items() if self.pool.find(digest) is not None}

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step(self, data) -> None:
        """The device rewrites a state; not while a copy uses it."""
        slot = data.draw(st.sampled_from(sorted(self.live)))
        if not self.in_copy(slot):
            self.steps += 1
            self.memory[slot] = self.live[slot] = ("state", self.steps)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data) -> None:
        slot = data.draw(st.sampled_from(sorted(self.live)))
        self.pool.leave(slot)
        del self.live[slot]
        if self.in_copy(slot):
            self.left.add(slot)

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data(), name=st.integers(0, 4))
    def begin_snapshot(self, data, name: int) -> None:
        """A slot that is being restored has no defined state, so it is not among these."""
        slot = data.draw(st.sampled_from(sorted(slot for slot, state in self.live.items() if state)))
        digest = Digest(bytes([name]) * 16)
        copy = self.pool.begin_snapshot(slot, digest, num_tokens=name)
        self.forget_evicted()
        if copy is not None:
            assert digest not in self.kept
            assert copy.target not in self.live
            self.copies[copy] = "begun"

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def begin_restore(self, data) -> None:
        candidates = sorted(slot for slot in self.live if not self.in_copy(slot))
        if not candidates:
            return
        slot = data.draw(st.sampled_from(candidates))
        digest = data.draw(st.sampled_from(sorted(self.kept)))
        copy = self.pool.begin_restore(digest, slot)
        assert copy is not None
        assert copy.num_tokens == digest[0]
        self.live[slot] = None
        self.copies[copy] = "begun"

    @rule(data=st.data())
    def run_copy(self, data) -> None:
        copy = self.draw_copy(data, "begun")
        if copy is not None:
            self.memory[copy.target] = self.memory[copy.source]
            self.copies[copy] = "run"

    @rule(data=st.data())
    def land(self, data) -> None:
        copy = self.draw_copy(data, "run")
        if copy is None:
            return
        self.pool.land(copy)
        self.end(copy)
        if copy.kind is CopyKind.SNAPSHOT:
            self.kept[copy.digest] = self.memory[copy.target]
        elif copy.target in self.live:
            self.live[copy.target] = self.kept[copy.digest]

    @rule(data=st.data(), stage=st.sampled_from(["begun", "run"]))
    def cancel(self, data, stage: str) -> None:
        copy = self.draw_copy(data, stage)
        if copy is not None:
            self.pool.cancel(copy)
            self.end(copy)

    def end(self, copy: SlotCopy) -> None:
        del self.copies[copy]
        self.left = {slot for slot in self.left if self.in_copy(slot)}

    @precondition(lambda self: not self.copies)
    @rule(really=st.integers(0, 3))
    def clear(self, really: int) -> None:
        if really:
            return
        assert self.pool.clear() == len(self.kept)
        self.kept.clear()
        for slot in self.live:
            self.live[slot] = None

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()

    @invariant()
    def states_are_what_was_written(self) -> None:
        for slot, state in self.live.items():
            assert state is None or self.memory[slot] == state

    @invariant()
    def snapshots_are_what_was_kept(self) -> None:
        assert self.pool.num_snapshots == len(self.kept)
        for digest in self.kept:
            assert self.pool.find(digest) == digest[0]


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
SlotMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestCacheMachine = CacheMachine.TestCase
TestSlotMachine = SlotMachine.TestCase
