"""Random traffic against a model that is too simple to be wrong, and against simulated device memory.

The model keeps whole prefixes instead of digests and plain lists instead of counters. The simulated memory
holds, for every position of every block, the table and prefix whose KV was last written there; so a block that is
overwritten, shared, found or given back when it must not be shows up as a sequence reading another prefix's KV.

`CacheTraffic` and `SlotTraffic` are what can happen. Two drivers choose: hypothesis, which shrinks what it
finds, and long runs from a seed, which get into states that short runs do not reach.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from openinfer_kv_cache import (
    BlockPin,
    BlockSequence,
    BlockState,
    CopyKind,
    Digest,
    EvictionReason,
    KvCache,
    KvCacheOptions,
    StateSlotCopy,
    StateSlotPool,
    table_digest,
)

BLOCK_TOKENS = 2
TTL_S = 50.0
WORLDS = [(None, None), (None, None), (None, None), ("salt", None), (None, "lora")]


@dataclass(eq=False)
class Cell:
    """What the model knows of one block that is not free."""

    users: int = 1
    prefix: tuple | None = None  # with the index of the table before it
    is_void: bool = False
    idle_since_s: float = 0.0


class ModelPool:
    """The rules of a pool over whole prefixes."""

    def __init__(self, num_blocks: int) -> None:
        self.free = num_blocks
        self.registry: dict[tuple, Cell] = {}
        self.duplicates: list[Cell] = []  # in use, in the order in which they were sealed
        self.idle: list[Cell] = []
        self.evicted = dict.fromkeys(EvictionReason, 0)
        self.ever_sealed: set[tuple] = set()

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
        heir = next((each for each in self.duplicates if each.prefix == cell.prefix), None)
        if heir is not None and reason is not EvictionReason.CLEARED:
            self.duplicates.remove(heir)
            self.registry[cell.prefix] = heir
        self.free += 1
        self.evicted[reason] += 1

    def acquire(self, cells: list[Cell]) -> None:
        for cell in cells:
            if not cell.users:
                self.idle.remove(cell)
            cell.users += 1

    def seal(self, cell: Cell, prefix: tuple, *, is_void: bool) -> None:
        cell.prefix, cell.is_void = prefix, is_void
        self.ever_sealed.add(prefix)
        if not is_void and self.registry.setdefault(prefix, cell) is not cell:
            self.duplicates.append(cell)

    def release(self, cells: list[Cell], now_s: float) -> None:
        for cell in cells:
            cell.users -= 1
            if cell.users:
                continue
            is_named = cell.prefix is not None and not cell.is_void
            if is_named and self.registry[cell.prefix] is cell:
                cell.idle_since_s = now_s
                self.idle.append(cell)
                continue
            if is_named:
                self.duplicates.remove(cell)
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
        self.duplicates.clear()
        for cell in held:
            cell.is_void = True


@dataclass(eq=False)
class Request:
    """A sequence, what the model says of it, and what the device knows."""

    sequence: BlockSequence
    world: tuple
    device_ids: list[int]
    """The ids behind the KV; the host learns the last ones later."""
    cells: list[list[Cell | None]] = field(default_factory=list)
    """Of each table; None where it is void."""
    sealed: int = 0
    computed: int = 0
    epoch: int = 0

    @property
    def known(self) -> int:
        return self.sequence.num_tokens

    def prefix(self, end: int) -> tuple:
        return (self.world, tuple(self.device_ids[:end]))

    @property
    def capacity(self) -> int:
        return min(map(len, self.cells)) * BLOCK_TOKENS

    @property
    def holds_blocks(self) -> bool:
        return any(self.cells)


def sees(window: int | None, position: int, seen: int) -> bool:
    """Whether the token at `position` sees the one at `seen`."""
    return seen <= position and (window is None or seen > position - window)


def needs(window: int | None, position: int, block: int) -> bool:
    """Whether it, or a later one, sees a token of a block that is full."""
    return window is None or sees(window, max(position, (block + 1) * BLOCK_TOKENS - 1), (block + 1) * BLOCK_TOKENS - 1)


class CacheTraffic:
    """All verbs of sequences and the pool, in any order that a scheduler may use.

    `at` picks a request among those to which the event can happen; if there is none, nothing happens.
    """

    def __init__(self, num_blocks: int, *, ttl_s: float | None, windows: tuple[int | None, ...] = (None,)) -> None:
        self.now_s = 0.0
        self.with_ttl = ttl_s is not None
        self.windows = windows
        options = KvCacheOptions(
            num_blocks=num_blocks, block_size_tokens=BLOCK_TOKENS, idle_ttl_s=ttl_s, table_windows=windows
        )
        self.cache = KvCache(options, digest_key=bytes(16), clock=lambda: self.now_s)
        self.model = ModelPool(num_blocks)
        self.memory: dict[tuple[int, int], tuple] = {}
        self.requests: list[Request] = []
        self.pins: list[tuple[BlockPin, list[Cell]]] = []
        self.epoch = 0
        self.digests: dict[tuple, Digest] = {}
        self.num_hits = self.num_freed = 0

    # Verbs, each compared with the model.

    def arrive(self, world: tuple, ids: list[int]) -> Request:
        sequence = self.cache.sequence(ids, cache_salt=world[0], lora_name=world[1])
        self.requests.append(Request(sequence, world, list(ids), [[] for _ in self.windows], epoch=self.epoch))
        return self.requests[-1]

    def find(self, request: Request) -> list[list[Cell | None]]:
        """The most blocks after which every table has all that the next token sees; the plainest way."""
        for count in range(max(request.known - 1, 0) // BLOCK_TOKENS, -1, -1):
            tables = [
                [
                    self.model.registry.get((table, request.prefix((block + 1) * BLOCK_TOKENS)), "missing")
                    if needs(window, count * BLOCK_TOKENS, block)
                    else None
                    for block in range(count)
                ]
                for table, window in enumerate(self.windows)
            ]
            if not any("missing" in cells for cells in tables):
                return tables
        raise AssertionError("no blocks at all are always found")

    def match(self, request: Request) -> None:
        if self.with_ttl:
            self.model.expire(self.now_s)
        found = self.find(request)
        count = len(found[0])
        assert request.sequence.match() == count * BLOCK_TOKENS
        self.model.acquire(held(found))
        request.cells, request.sealed = found, count
        request.computed = count * BLOCK_TOKENS
        request.epoch = self.epoch
        self.num_hits += count

    def missing(self, cells: list[list], num_tokens: int, windowed_tokens: int | None) -> list[int]:
        need = [num_tokens if window is None or windowed_tokens is None else windowed_tokens for window in self.windows]
        return [
            max(-(-min(each, num_tokens) // BLOCK_TOKENS) - len(entries), 0)
            for each, entries in zip(need, cells, strict=True)
        ]

    def reserve(self, request: Request, num_tokens: int, windowed_tokens: int | None = None) -> bool:
        before = [list(table.blocks) for table in request.sequence.tables]
        missing = self.missing(request.cells, num_tokens, windowed_tokens)
        added = request.sequence.reserve(num_tokens, windowed_tokens=windowed_tokens)
        cells = self.model.allocate(sum(missing))
        if cells is None:
            assert added is None
            assert [table.blocks for table in request.sequence.tables] == before
            return False
        assert added is not None
        added = list(added)
        if not request.holds_blocks:
            request.epoch = self.epoch
        for table, entries in enumerate(request.cells):
            count = missing[table]
            assert request.sequence.tables[table].blocks == [*before[table], *added[:count]]
            entries.extend(cells[:count])
            del added[:count], cells[:count]
        assert not added
        assert request.sequence.capacity_tokens == request.capacity
        return True

    def compute(self, request: Request, count: int) -> None:
        """A step writes the KV of the next positions, and reads what they see; the device knows all their ids."""
        end = min(request.computed + count, len(request.device_ids), request.capacity)
        for position in range(request.computed, end):
            for table in range(len(self.windows)):
                self.memory[self.address(request, table, position)] = (table, request.prefix(position + 1))
        for position in range(request.computed, end):
            self.read(request, position, end=position + 1)
        request.computed = max(request.computed, end)

    def address(self, request: Request, table: int, position: int) -> tuple[int, int]:
        entries = request.sequence.tables[table]
        assert position // BLOCK_TOKENS >= entries.num_void
        return entries.blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS

    def read(self, request: Request, position: int, *, end: int) -> None:
        """What the token at a position sees before `end` is right in every table."""
        for table, window in enumerate(self.windows):
            for seen in range(end):
                if sees(window, position, seen):
                    assert self.memory[self.address(request, table, seen)] == (table, request.prefix(seen + 1))

    def seal(self, request: Request) -> None:
        tables = [list(table.blocks) for table in request.sequence.tables]
        end = max(min(request.computed, request.known) // BLOCK_TOKENS, request.sealed)
        expected = []
        for table, cells in enumerate(request.cells):
            for block in range(request.sealed, end):
                if cells[block] is not None:
                    prefix = (table, request.prefix((block + 1) * BLOCK_TOKENS))
                    self.model.seal(cells[block], prefix, is_void=request.epoch != self.epoch)
                    expected.append(tables[table][block])
        assert list(request.sequence.seal(request.computed)) == expected
        request.sealed = end

    def free(self, request: Request, num_tokens: int, *, unsealed: bool) -> None:
        """What no token from `num_tokens` on sees goes back."""
        freed = []
        for cells, window in zip(request.cells, self.windows, strict=True):
            for block in range(len(cells) if unsealed else request.sealed):
                if not needs(window, num_tokens, block) and cells[block] is not None:
                    freed.append(cells[block])
                    cells[block] = None
        assert request.sequence.free_behind_windows(num_tokens, unsealed=unsealed) == bool(freed)
        self.model.release(freed[::-1], self.now_s)
        self.num_freed += len(freed)

    def learn(self, request: Request) -> None:
        """Ids come back from the device."""
        request.sequence.extend(request.device_ids[request.known :])

    def cut(self, request: Request, num_tokens: int, kept: int) -> None:
        """What shrink and truncate have in common."""
        is_cut_in_sealed = num_tokens < request.sealed * BLOCK_TOKENS
        blocks = num_tokens // BLOCK_TOKENS if is_cut_in_sealed else -(-num_tokens // BLOCK_TOKENS)
        left = min(num_tokens, blocks * BLOCK_TOKENS, request.capacity)
        for cells, window in zip(request.cells, self.windows, strict=True):
            if any(cell is None and needs(window, left, block) for block, cell in enumerate(cells)):
                left = blocks = 0
        dropped = [
            cells[block]
            for block in range(max(map(len, request.cells)) - 1, blocks - 1, -1)
            for cells in request.cells
            if block < len(cells) and cells[block] is not None
        ]
        for cells in request.cells:
            del cells[blocks:]
        self.model.release(dropped, self.now_s)
        assert kept == left
        request.sealed = min(request.sealed, blocks)
        request.computed = min(request.computed, kept)

    # Events.

    def prefill(self, world: tuple, ids: list[int], count: int) -> None:
        """A request is admitted and its prompt, or a chunk of it, computed; or it has to wait."""
        if len(self.requests) >= 6:
            return
        request = self.arrive(world, ids)
        self.match(request)
        end = min(request.computed + count, len(ids))
        # All of the prompt where everything is kept, and of the other tables what is computed now.
        if self.reserve(request, len(ids), end) or self.reserve(request, end):
            self.compute(request, count)
            self.seal(request)

    def prefill_like_another(self, at: int, kept: int, more: list[int]) -> None:
        """A prompt that begins like one that is there."""
        for other in pick(self.requests, at):
            self.prefill(other.world, other.device_ids[:kept] + more, 9)

    def prefill_on(self, at: int, count: int) -> None:
        """The next chunk of a prompt; what is behind its windows was given back before."""
        for request in pick([request for request in self.requests if request.computed < request.known], at):
            self.free(request, request.computed, unsealed=False)
            if self.reserve(request, request.known, request.computed + count):
                self.compute(request, count)
                self.seal(request)

    def leave_behind(self, at: int, late: int, unsealed: str) -> None:
        for request in pick([request for request in self.requests if request.holds_blocks], at):
            self.free(request, max(request.computed - late, 0), unsealed=unsealed == "all")

    def decode(self, at: int, ids: list[int], learn: str) -> None:
        """The device samples and computes on; the host may learn the ids later only."""
        for request in pick(self.requests, at):
            request.device_ids.extend(ids)
            if self.reserve(request, len(request.device_ids)):
                self.compute(request, len(request.device_ids))
                if learn == "now":
                    self.learn(request)
                self.seal(request)

    def learn_late(self, at: int) -> None:
        for request in pick(self.requests, at):
            self.learn(request)
            self.seal(request)

    def admit(self, at: int, num_tokens: int, windowed_tokens: int | None) -> None:
        """`would_fit` tells exactly whether match and reserve will succeed."""
        for request in pick([request for request in self.requests if not request.holds_blocks], at):
            fits = request.sequence.would_fit(num_tokens, windowed_tokens=windowed_tokens)
            if not self.with_ttl:
                expected = self.find(request)
                assert request.sequence.count_cached_tokens() == len(expected[0]) * BLOCK_TOKENS
            self.match(request)
            assert self.reserve(request, num_tokens, windowed_tokens) == fits
            if not fits:
                self.cut(request, 0, request.sequence.shrink(0))

    def grow(self, at: int, num_tokens: int, spare: int, windowed_tokens: int | None) -> None:
        for request in pick([request for request in self.requests if request.holds_blocks], at):
            missing = sum(self.missing(request.cells, num_tokens, windowed_tokens))
            fits = missing == 0 or missing <= self.cache.pool.available_blocks - spare
            told = request.sequence.would_fit(num_tokens, spare_blocks=spare, windowed_tokens=windowed_tokens)
            assert told == fits
            self.reserve(request, num_tokens, windowed_tokens)

    def cut_back(self, at: int, num_tokens: int, verb: str) -> None:
        for request in pick([request for request in self.requests if request.holds_blocks], at):
            if verb == "truncate":
                kept = request.sequence.truncate(num_tokens)
                del request.device_ids[num_tokens:]
                self.cut(request, num_tokens, kept)
            else:
                left = num_tokens if verb == "shrink" else 0
                self.cut(request, left, request.sequence.shrink(left))

    def release(self, at: int) -> None:
        for request in pick(self.requests, at):
            request.sequence.release()
            self.cut(request, 0, 0)
            self.requests.remove(request)

    def pin(self, at: int, count: int) -> None:
        if len(self.pins) < 3:
            for request in pick([request for request in self.requests if request.sealed], at):
                end = min(count, request.sealed)
                cells = held([cells[:end] for cells in request.cells])
                blocks = [block for table in request.sequence.tables for block in table.blocks[table.num_void : end]]
                self.pins.append((self.cache.pool.pin(blocks), cells))
                self.model.acquire(cells)

    def unpin(self) -> None:
        if self.pins:
            pin, cells = self.pins.pop(0)
            pin.close()
            pin.close()
            self.model.release(cells, self.now_s)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        if self.with_ttl:
            self.model.expire(self.now_s)
        self.cache.pool.expire()

    def change_weights(self) -> None:
        self.cache.clear()
        sealed = [cells[: request.sealed] for request in self.requests for cells in request.cells]
        self.model.clear([*held(sealed), *(cell for _, cells in self.pins for cell in cells)])
        self.epoch += 1

    # Always.

    def check(self) -> None:
        self.cache.check_integrity()
        self.check_pool()
        self.check_what_can_be_found()
        for request in self.requests:
            self.check_request(request)
        self.check_content()

    def check_pool(self) -> None:
        pool = self.cache.pool
        assert (pool.free_blocks, pool.idle_blocks) == (self.model.free, len(self.model.idle))
        assert pool.available_blocks == self.model.free + len(self.model.idle)
        assert dict(pool.counters().evicted_blocks) == self.model.evicted
        assert self.cache.num_live_sequences == len(self.requests)

    def check_what_can_be_found(self) -> None:
        for prefix in self.model.ever_sealed:
            block = self.cache.pool.find(self.digest_of(prefix))
            cell = self.model.registry.get(prefix)
            assert (block is None) == (cell is None)
            if cell is not None:
                assert self.cache.pool.num_users(block) == cell.users

    def check_request(self, request: Request) -> None:
        """No sequence reads another prefix's KV, and each holds what the model says."""
        for table, cells in zip(request.sequence.tables, request.cells, strict=True):
            users = [0 if cell is None else cell.users for cell in cells]
            assert users[: table.num_void] == [0] * table.num_void
            assert list(map(self.cache.pool.num_users, table.held)) == users[table.num_void :]
            assert len(table.blocks) == len(cells)
        assert request.sequence.num_sealed_blocks == request.sealed
        assert request.sequence.blocks is request.sequence.tables[0].blocks
        self.read(request, request.computed, end=request.computed)

    def check_content(self) -> None:
        """Content is what its digest says; pinned and idle content too, which no sequence reads now."""
        pool = self.cache.pool
        for block in range(pool.num_blocks):
            if pool.state(block) in (BlockState.SEALED, BlockState.IDLE) and pool.digest(block) is not None:
                assert self.digest_of(self.memory[block, BLOCK_TOKENS - 1]) == pool.digest(block)

    def digest_of(self, prefix: tuple) -> Digest:
        if prefix not in self.digests:
            table, ((salt, lora), ids) = prefix
            root = self.cache.hasher.root(cache_salt=salt, lora_name=lora)
            self.digests[prefix] = table_digest(self.cache.hasher.chain(root, ids)[-1], table)
        return self.digests[prefix]


def held(tables: list[list[Cell | None]]) -> list[Cell]:
    return [cell for cells in tables for cell in cells if cell is not None]


def pick(candidates: Sequence, at: int) -> Sequence:
    """One of the candidates, or none if there are none."""
    return [candidates[at % len(candidates)]] if candidates else []


AT = st.integers(0, 5)
WINDOWS = st.one_of(st.just([None]), st.lists(st.sampled_from([None, 1, 2, 3, 4, 5, 8]), min_size=1, max_size=4))
SOME_TOKENS = st.sampled_from([None, 0, 2, 5])
IDS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=6)


class CacheMachine(RuleBasedStateMachine):
    """Hypothesis chooses."""

    @initialize(num_blocks=st.integers(2, 14), ttl_s=st.sampled_from([None, TTL_S]), windows=WINDOWS)
    def make(self, num_blocks, ttl_s, windows):
        self.traffic = CacheTraffic(num_blocks * len(windows), ttl_s=ttl_s, windows=tuple(windows))

    @rule(world=st.sampled_from(WORLDS), ids=IDS, count=st.integers(1, 9))
    def prefill(self, world, ids, count):
        self.traffic.prefill(world, ids, count)

    @rule(at=AT, kept=st.integers(0, 9), more=IDS)
    def prefill_like_another(self, at, kept, more):
        self.traffic.prefill_like_another(at, kept, more)

    @rule(at=AT, ids=IDS, learn=st.sampled_from(["now", "late"]))
    def decode(self, at, ids, learn):
        self.traffic.decode(at, ids, learn)

    @rule(at=AT)
    def learn_late(self, at):
        self.traffic.learn_late(at)

    @rule(at=AT, count=st.integers(1, 9))
    def prefill_on(self, at, count):
        self.traffic.prefill_on(at, count)

    @rule(at=AT, late=st.integers(0, 3), unsealed=st.sampled_from(["sealed", "sealed", "all"]))
    def leave_behind(self, at, late, unsealed):
        self.traffic.leave_behind(at, late, unsealed)

    @rule(at=AT, num_tokens=st.integers(1, 14), windowed_tokens=SOME_TOKENS)
    def admit(self, at, num_tokens, windowed_tokens):
        self.traffic.admit(at, num_tokens, windowed_tokens)

    @rule(at=AT, num_tokens=st.integers(0, 14), spare=st.integers(0, 3), windowed_tokens=SOME_TOKENS)
    def grow(self, at, num_tokens, spare, windowed_tokens):
        self.traffic.grow(at, num_tokens, spare, windowed_tokens)

    @rule(at=AT, num_tokens=st.integers(0, 12), verb=st.sampled_from(["shrink", "truncate", "preempt"]))
    def cut_back(self, at, num_tokens, verb):
        self.traffic.cut_back(at, num_tokens, verb)

    @rule(at=AT)
    def release(self, at):
        self.traffic.release(at)

    @rule(at=AT, count=st.integers(1, 4))
    def pin(self, at, count):
        self.traffic.pin(at, count)

    @rule()
    def unpin(self):
        self.traffic.unpin()

    @rule(seconds=st.sampled_from([20.0, 60.0]))
    def pass_time(self, seconds):
        self.traffic.pass_time(seconds)

    @rule()
    def change_weights(self):
        self.traffic.change_weights()

    @invariant()
    def check(self):
        self.traffic.check()


FILLING = (CopyKind.SNAPSHOT, CopyKind.LOAD)
READING = (CopyKind.RESTORE, CopyKind.HOLD)


class SlotTraffic:
    """Slots against simulated device memory; copies run some time between their begin and their end."""

    def __init__(self, num_state_slots: int, *, max_snapshots: int) -> None:
        self.pool = StateSlotPool(num_state_slots, max_snapshots=max_snapshots)
        self.memory: dict[int, int] = {}
        self.live: dict[int, int | None] = {}
        """Slot of a sequence -> what its state must be; None while undefined."""
        self.left: set[int] = set()
        self.stale: set[int] = set()
        self.copies: dict[StateSlotCopy, str] = {}
        self.kept: dict[Digest, int] = {}
        self.steps = 0
        self.num_restored = 0

    def in_copy(self, slot: int) -> bool:
        return any(slot in (copy.source, copy.target) for copy in self.copies)

    def forget_evicted(self) -> None:
        """The model takes the pool's word for which snapshot was evicted; never one that a copy reads."""
        read = {copy.digest for copy in self.copies if copy.kind in READING}
        gone = {digest for digest in self.kept if self.pool.find(digest) is None}
        assert not gone & read
        for digest in gone:
            del self.kept[digest]

    # Events.

    def allocate(self) -> None:
        taken = {*self.live, *self.left, *filter(self.in_copy, range(self.pool.num_state_slots))}
        slot = self.pool.allocate()
        assert (slot is None) == (len(taken) == self.pool.num_state_slots)
        if slot is not None:
            assert slot not in taken
            self.forget_evicted()
            self.write(slot)

    def step(self, at: int) -> None:
        """The device rewrites a state; not while a copy uses it."""
        for slot in pick([slot for slot in sorted(self.live) if not self.in_copy(slot)], at):
            self.write(slot)

    def write(self, slot: int) -> None:
        self.steps += 1
        self.memory[slot] = self.live[slot] = self.steps

    def leave(self, at: int) -> None:
        for slot in pick(sorted(self.live), at):
            self.pool.leave(slot)
            del self.live[slot]
            self.left.add(slot)
            self.free_left()

    def begin_snapshot(self, at: int, name: int) -> None:
        digest = Digest(bytes([name]) * 16)
        for slot in pick([slot for slot, state in sorted(self.live.items()) if state is not None], at):
            copy = self.pool.begin_snapshot(slot, digest, num_tokens=name)
            was_kept = digest in self.kept
            self.forget_evicted()
            if copy is not None:
                assert not was_kept
                assert slot not in self.stale
                assert copy.target not in self.live
                self.copies[copy] = "begun"

    def begin_restore(self, at: int, which: int) -> None:
        for slot in pick([slot for slot in sorted(self.live) if not self.in_copy(slot)], at):
            for digest in pick(sorted(self.kept), which):
                copy = self.pool.begin_restore(digest, slot)
                assert copy is not None
                assert copy.num_tokens == digest[0]
                self.live[slot] = None
                self.copies[copy] = "begun"

    def begin_load(self, name: int) -> None:
        digest = Digest(bytes([name]) * 16)
        copy = self.pool.begin_load(digest, num_tokens=name)
        was_kept = digest in self.kept
        self.forget_evicted()
        if copy is not None:
            assert not was_kept
            assert copy.source == copy.target not in self.live
            self.copies[copy] = "begun"

    def begin_hold(self, which: int) -> None:
        for digest in pick(sorted(self.kept), which):
            copy = self.pool.begin_hold(digest)
            assert copy is not None
            assert (copy.num_tokens, self.memory[copy.source]) == (digest[0], self.kept[digest])
            self.copies[copy] = "begun"

    def run_copy(self, at: int) -> None:
        for copy in self.pick_copy("begun", at):
            if copy.kind is CopyKind.LOAD:
                self.steps += 1
                self.memory[copy.target] = self.steps
            self.memory[copy.target] = self.memory[copy.source]
            self.copies[copy] = "run"

    def complete(self, at: int) -> None:
        for copy in self.pick_copy("run", at):
            self.pool.complete(copy)
            del self.copies[copy]
            if copy.kind in FILLING:
                self.kept[copy.digest] = self.memory[copy.target]
            elif copy.kind is CopyKind.HOLD:
                assert self.memory[copy.source] == self.kept[copy.digest]
            elif copy.target in self.live:
                self.live[copy.target] = self.kept[copy.digest]
                self.stale.discard(copy.target)
                self.num_restored += 1
            self.free_left()

    def cancel(self, at: int, stage: str) -> None:
        for copy in self.pick_copy(stage, at):
            self.pool.cancel(copy)
            del self.copies[copy]
            self.free_left()

    def pick_copy(self, stage: str, at: int) -> Sequence[StateSlotCopy]:
        return pick([copy for copy, now in self.copies.items() if now == stage], at)

    def free_left(self) -> None:
        self.left = {slot for slot in self.left if self.in_copy(slot)}
        self.stale &= {*self.live, *self.left}

    def clear(self) -> None:
        if not self.copies:
            assert self.pool.clear() == len(self.kept)
            self.kept.clear()
            self.stale = set(self.live)

    # Always.

    def check(self) -> None:
        self.pool.check_integrity()
        for slot, state in self.live.items():
            assert state is None or self.memory[slot] == state
        assert self.pool.num_snapshots == len(self.kept)
        for digest in self.kept:
            assert self.pool.find(digest) == digest[0]
        filling = sum(copy.kind in FILLING for copy in self.copies)
        busy = len(self.live) + len(self.left) + filling
        read = {copy.source for copy in self.copies if copy.kind in READING}
        assert self.pool.available_slots == self.pool.num_state_slots - busy - len(read)


class SlotMachine(RuleBasedStateMachine):
    """Hypothesis chooses."""

    @initialize(num_state_slots=st.integers(1, 6), max_snapshots=st.integers(0, 5))
    def make(self, num_state_slots, max_snapshots):
        self.traffic = SlotTraffic(num_state_slots, max_snapshots=min(max_snapshots, num_state_slots - 1))

    @rule()
    def allocate(self):
        self.traffic.allocate()

    @rule(at=AT)
    def step(self, at):
        self.traffic.step(at)

    @rule(at=AT)
    def leave(self, at):
        self.traffic.leave(at)

    @rule(at=AT, name=st.integers(0, 4))
    def begin_snapshot(self, at, name):
        self.traffic.begin_snapshot(at, name)

    @rule(at=AT, which=AT)
    def begin_restore(self, at, which):
        self.traffic.begin_restore(at, which)

    @rule(name=st.integers(0, 4))
    def begin_load(self, name):
        self.traffic.begin_load(name)

    @rule(which=AT)
    def begin_hold(self, which):
        self.traffic.begin_hold(which)

    @rule(at=AT)
    def run_copy(self, at):
        self.traffic.run_copy(at)

    @rule(at=AT)
    def complete(self, at):
        self.traffic.complete(at)

    @rule(at=AT, stage=st.sampled_from(["begun", "run"]))
    def cancel(self, at, stage):
        self.traffic.cancel(at, stage)

    @rule()
    def clear(self):
        self.traffic.clear()

    @invariant()
    def check(self):
        self.traffic.check()


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
SlotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
TestSlotMachine = SlotMachine.TestCase


def some_ids(rng: random.Random) -> list[int]:
    return [int(rng.random() < 0.2) for _ in range(rng.randint(1, 6))]


CACHE_EVENTS = {
    lambda traffic, at, rng: traffic.prefill(rng.choice(WORLDS), some_ids(rng), rng.randint(1, 9)): 20,
    lambda traffic, at, rng: traffic.prefill_like_another(at, rng.randint(0, 12), some_ids(rng)): 20,
    lambda traffic, at, rng: traffic.decode(at, some_ids(rng)[:3], rng.choice(["now", "now", "late"])): 30,
    lambda traffic, at, rng: traffic.learn_late(at): 8,
    lambda traffic, at, rng: traffic.prefill_on(at, rng.randint(1, 9)): 12,
    lambda traffic, at, rng: traffic.leave_behind(at, rng.randint(0, 3), rng.choice(["sealed"] * 5 + ["all"])): 12,
    lambda traffic, at, rng: traffic.admit(at, rng.randint(1, 14), rng.choice([None, 2, 5])): 10,
    lambda traffic, at, rng: traffic.grow(at, rng.randint(0, 20), rng.randint(0, 3), rng.choice([None, 2, 5])): 6,
    lambda traffic, at, rng: traffic.cut_back(
        at, rng.randint(0, 16), rng.choice(["shrink", "truncate", "preempt"])
    ): 10,
    lambda traffic, at, rng: traffic.release(at): 16,
    lambda traffic, at, rng: traffic.pin(at, rng.randint(1, 4)): 5,
    lambda traffic, at, rng: traffic.unpin(): 5,
    lambda traffic, at, rng: traffic.pass_time(rng.choice([20.0, 20.0, 60.0])): 3,
    lambda traffic, at, rng: traffic.change_weights(): 1,
}
SLOT_EVENTS = {
    lambda traffic, at, rng: traffic.allocate(): 10,
    lambda traffic, at, rng: traffic.step(at): 10,
    lambda traffic, at, rng: traffic.leave(at): 7,
    lambda traffic, at, rng: traffic.begin_snapshot(at, rng.randrange(5)): 14,
    lambda traffic, at, rng: traffic.begin_restore(at, rng.randrange(6)): 10,
    lambda traffic, at, rng: traffic.begin_load(rng.randrange(5)): 4,
    lambda traffic, at, rng: traffic.begin_hold(rng.randrange(6)): 4,
    lambda traffic, at, rng: traffic.run_copy(at): 18,
    lambda traffic, at, rng: traffic.complete(at): 16,
    lambda traffic, at, rng: traffic.cancel(at, rng.choice(["begun", "run"])): 3,
    lambda traffic, at, rng: traffic.clear(): 1,
}


def run_from_seed(traffic, events: dict, seed: int, *, num_events: int) -> None:
    rng = random.Random(seed)
    for event in rng.choices(list(events), weights=list(events.values()), k=num_events):
        event(traffic, rng.randrange(6), rng)
        traffic.check()


LONG = {
    "small": (6, None, (None,)),
    "expiring": (10, TTL_S, (None,)),
    "middling": (16, None, (None,)),
    "large, expiring": (24, TTL_S, (None,)),
    "one window": (12, None, (5,)),
    "two tables": (30, None, (None, 4)),
    "four tables, expiring": (40, TTL_S, (6, None, 3, None)),
}


@pytest.mark.parametrize("name", LONG)
def test_cache_long_traffic_agrees_with_the_model(name):
    num_blocks, ttl_s, windows = LONG[name]
    traffic = CacheTraffic(num_blocks, ttl_s=ttl_s, windows=windows)
    run_from_seed(traffic, CACHE_EVENTS, num_blocks, num_events=4000 if windows == (None,) else 2000)
    counters = traffic.cache.pool.counters()
    assert traffic.num_hits == counters.hit_blocks > 50
    assert (traffic.num_freed > 30) == (windows != (None,))
    expected = set(EvictionReason) if ttl_s else set(EvictionReason) - {EvictionReason.EXPIRED}
    assert {reason for reason, count in counters.evicted_blocks.items() if count} == expected


@pytest.mark.parametrize(("num_state_slots", "max_snapshots"), [(3, 1), (5, 4), (8, 3)])
def test_slots_long_traffic_agrees_with_the_device(num_state_slots, max_snapshots):
    traffic = SlotTraffic(num_state_slots, max_snapshots=max_snapshots)
    run_from_seed(traffic, SLOT_EVENTS, num_state_slots, num_events=6000)
    assert traffic.num_restored > 20
    assert traffic.pool.evicted_snapshots > 20
