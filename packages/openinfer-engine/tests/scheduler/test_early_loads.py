"""What conversations will need is in the pool before their next turn: in their order, and for it nothing waits."""

# ruff: noqa: SLF001 - guesses show late elsewhere

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hasty_transfer import HastyTransfer

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.errors import Refused
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicy, QueuePolicyConfig, SchedulerConfig
from openinfer_core.testing import ConformanceError
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.scheduler.returning.early_loads import (
    MAX_WINDOWS,
    MOST_WAITED_S,
    PROBES,
    EarlyLoads,
    _Expected,
    _Record,
)
from openinfer_kv_cache import FairLeastRecentlyUsed, KvCache, KvCacheOptions, PrefixHit, TierPort, TierTransfer
from openinfer_kv_cache.testing.fake_tier_port import NEVER, TieredDriver

BLOCK = 4
FIRST, GROWTH, ANSWER = 32, 3, 5
"""Tokens of a conversation's first prompt, of what a turn adds, and of an answer."""

Factory = Callable[[SchedulerConfig, QueuePolicy], TokenBudgetScheduler]


class Conversation:
    """Its next prompt begins with its last one, and the answer to that."""

    def __init__(self, name: int, *, is_rewritten: bool = False) -> None:
        """With `is_rewritten` answers come back otherwise, as they do whose thinking a template leaves out."""
        self.is_rewritten = is_rewritten
        self.ids = [name * 97 % 61 + 1, *(7 * name + i % 50 for i in range(FIRST - 1))]
        self.name = name

    def prompt(self) -> tuple[int, ...]:
        return tuple(self.ids)

    def answered(self, token_ids: Sequence[int]) -> None:
        if self.is_rewritten:
            token_ids = [(each + 1) % 60 for each in token_ids]
        self.ids += [*token_ids, *((self.name + i) % 60 for i in range(GROWTH))]


class World:
    """A scheduler with tiers of a fake device, which finds every row that reads what is not there."""

    def __init__(self, factory: Factory, *, early: bool = True, policy: str = "", **fields: Any) -> None:
        port = {name: fields.pop(name) for name in ("steps", "short_rate", "seed", "max_in_flight") if name in fields}
        config = SchedulerConfig(
            **{
                "num_blocks": 34,
                "block_size_tokens": BLOCK,
                "max_num_seqs": 4,
                "max_step_tokens": 64,
                "max_model_tokens": 120,
                "options": {"early-loads": "true"} if early else {},
                **fields,
            }
        )
        self.driver = TieredDriver(factory, config, **port)
        self._ids = iter(range(10**6))
        self.sent: list[GenerateRequest] = []

    def submit(
        self, prompt: tuple[int, ...], *, max_tokens: int = ANSWER, tenant: str = "", choice: int = 0
    ) -> RequestId:
        request = GenerateRequest(
            request_id=RequestId(next(self._ids)),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            tenant=tenant,
            choice=choice,
        )
        assert self.driver.submit(request) is None
        self.sent.append(request)
        return request.request_id

    def serve(self, request_id: RequestId) -> Sequence[int]:
        """Steps until it has ended."""
        account = self.driver.accounts[request_id]
        for _ in range(400):
            if account.terminal is not None:
                return account.token_ids
            self.driver.step()
        raise AssertionError(f"{account.what} does not end")

    def rest(self, steps: int = 60) -> None:
        """What a tool takes: nothing is asked meanwhile, and an engine sleeps that has neither requests nor copies."""
        is_moving = bool(self.driver.port.pending)
        for _ in range(steps):
            if self.driver.scheduler.unfinished_ids or is_moving:
                is_moving = bool(self.driver.port.pending)  # what is over is seen by one more plan
                self.driver.step()
                is_moving |= bool(self.driver.port.pending)

    def turn(self, conversation: Conversation, *, rests: bool = True) -> int:
        """Blocks that it had to load after it came."""
        loads = len(self.driver.port.loads)
        request_id = self.submit(conversation.prompt())
        token_ids = self.serve(request_id)
        asked, own = self.driver.port.loads[loads:], set(self.digests_of(request_id))
        conversation.answered(token_ids)
        if rests:
            self.rest()
        return sum(each.num_blocks for each in asked if own.issuperset(each.digests))

    def digests_of(self, request_id: RequestId) -> Sequence[Any]:
        return self.digests(self.driver.accounts[request_id].request.prompt_token_ids)

    def digests(self, prompt: Sequence[int]) -> Sequence[Any]:
        cache = KvCache(
            KvCacheOptions(num_blocks=1, block_size_tokens=BLOCK, layout_digest=self.driver.config.layout_digest),
            digest_key=self.driver.config.digest_key,
        )
        return cache.sequence(prompt).prefix_digests()

    def end(self) -> None:
        for transfer in self.driver.port.pending:
            transfer.cancel()  # some hang
        self.driver.port.load_steps = 1
        self.rest()
        self.driver.run()
        for request in self.sent:
            account = self.driver.accounts[request.request_id]
            if not account.is_aborted:
                assert tuple(account.token_ids) == self.driver.outcome(request).token_ids

    @property
    def early_blocks(self) -> int:
        return self.driver.scheduler.stats().early_blocks


KEY = b"a key of sixteen bytes, and more"


@pytest.fixture
def make_world(checked_scheduler: type[TokenBudgetScheduler]) -> Callable[..., World]:
    def made(**fields: Any) -> World:
        return World(checked_scheduler, digest_key=KEY, **fields)

    return made


def rounds(world: World, conversations: Sequence[Conversation], count: int) -> list[int]:
    """Blocks that each round had to load on demand."""
    return [sum(world.turn(each) for each in conversations) for _ in range(count)]


def test_conversations_in_turn_find_all_in_the_pool(make_world: Callable[..., World]) -> None:
    worlds = [make_world(early=early) for early in (True, False)]
    found = [rounds(world, [Conversation(name) for name in range(4)], 6) for world in worlds]
    for world in worlds:
        world.end()
    assert found[0][3:] == [0, 0, 0]
    assert all(loaded > 8 for loaded in found[1][2:])
    assert (worlds[0].early_blocks > 100, worlds[1].early_blocks) == (True, 0)
    assert worlds[0].driver.scheduler.stats().early_unused_blocks == 0


def test_conversations_whose_answers_come_back_otherwise_are_found_as_well(make_world: Callable[..., World]) -> None:
    worlds = [make_world(early=early) for early in (True, False)]
    found = [rounds(world, [Conversation(name, is_rewritten=True) for name in range(4)], 6) for world in worlds]
    for world in worlds:
        world.end()
    assert found[0][3:] == [0, 0, 0]
    assert all(loaded > 8 for loaded in found[1][2:])


def test_choices_of_one_request_are_one_turn(make_world: Callable[..., World]) -> None:
    world = make_world()
    for choice in range(3):
        world.serve(world.submit(tuple(range(40)), choice=choice))
    kv = world.driver.scheduler._queue.kv
    assert (len(kv.conversations._ends), kv.pool.kept_idle_blocks) == (1, 0)
    world.end()


def test_states_of_hybrids_are_found_where_their_kv_came_early(make_world: Callable[..., World]) -> None:
    world = make_world(num_snapshots=8)
    found = rounds(world, [Conversation(name) for name in range(4)], 6)
    world.end()
    assert (found[4:], world.early_blocks > 50) == ([0, 0], True)


def test_request_that_needs_the_blocks_does_not_wait_for_a_load_that_hangs(make_world: Callable[..., World]) -> None:
    world = make_world(num_blocks=30)
    conversations = [Conversation(name) for name in range(4)]
    rounds(world, conversations, 3)
    world.driver.port.load_steps = NEVER
    world.turn(conversations[0])
    hanging = [each for each in world.driver.port.loads if not each.is_over()]
    assert len(hanging) == MAX_WINDOWS
    request_id = world.submit(tuple(range(117)), max_tokens=3)  # all blocks
    world.driver.step()
    assert all(each.is_cancelled for each in hanging)
    for _ in range(8):  # the fake's copies go on for up to three after they were cancelled
        world.driver.step()
    assert world.driver.accounts[request_id].scheduled is not None
    world.serve(request_id)
    world.end()


def test_link_has_a_next_window_before_the_end_of_one_is_seen(make_world: Callable[..., World]) -> None:
    """Of other blocks, that follow: nothing is loaded twice."""
    world = make_world()
    conversations = [Conversation(name) for name in range(4)]
    rounds(world, conversations, 3)
    world.driver.port.load_steps = NEVER
    world.turn(conversations[0])
    first, second = (each for each in world.driver.port.loads if not each.is_over())
    assert not set(first.digests) & set(second.digests)
    expected = next(each for each in conversations if first.digests[0] in world.digests(each.prompt()))
    order = world.digests(expected.prompt())
    assert order.index(second.digests[0]) == order.index(first.digests[-1]) + 1
    world.driver.port.load_steps = 1
    request_id = world.submit(expected.prompt())
    num_steps = 0
    while not first.is_cancelled:
        world.driver.step()
        num_steps += 1
        assert num_steps < 1000 * MOST_WAITED_S + 5  # a step of the driver takes a millisecond
    assert num_steps > 10
    assert second.is_cancelled  # the turn loads for itself
    world.serve(request_id)
    world.end()


def test_turn_whose_blocks_are_on_their_way_does_not_load_them_again(make_world: Callable[..., World]) -> None:
    world = make_world()
    conversations = [Conversation(name) for name in range(4)]
    rounds(world, conversations, 3)
    world.driver.port.load_steps = 20
    begun = len(world.driver.port.loads)
    world.turn(conversations[0], rests=False)
    while len(coming := [each for each in world.driver.port.loads[begun:] if not each.is_over()]) < MAX_WINDOWS:
        world.driver.step()
    expected = next(each for each in conversations if coming[0].digests[0] in world.digests(each.prompt()))
    own = {*world.digests(expected.prompt())}
    world.turn(expected, rests=False)
    came = [digest for each in world.driver.port.loads[begun:] for digest in each.digests if digest in own]
    assert len(came) == len({*came}) > len(coming[0].digests)
    assert not any(each.is_cancelled for each in coming)
    world.end()


def test_row_that_grows_takes_the_blocks_of_a_load_that_hangs_without_a_preemption(
    make_world: Callable[..., World],
) -> None:
    world = make_world(num_blocks=30)
    conversations = [Conversation(name) for name in range(4)]
    rounds(world, conversations, 3)
    world.driver.port.load_steps = NEVER
    request_id = world.submit(tuple(range(40)), max_tokens=80)  # 10 blocks, and all 30 at its end
    world.turn(conversations[0], rests=False)
    world.serve(request_id)
    assert [each for each in world.driver.port.loads if each.is_cancelled]
    assert world.driver.scheduler.stats().preemptions == 0
    world.end()


def end_turn(cache: KvCache, early: EarlyLoads, token_ids: Sequence[int]) -> None:
    """A turn of these tokens, of which all but the last are sealed."""
    sequence = cache.sequence(token_ids)
    sequence.match()
    sequence.reserve(len(token_ids) - 1)
    sequence.seal(len(token_ids) - 1)
    turn = cache.conversations.ended(sequence)
    assert turn is not None
    early.ended(sequence, turn)
    sequence.release()


def test_nothing_begins_while_requests_wait_or_load() -> None:
    class Port:
        def find(self, digests: Sequence[Any]) -> PrefixHit:
            raise AssertionError("tiers are asked")

    cache = KvCache(KvCacheOptions(num_blocks=32, block_size_tokens=BLOCK))
    early: Any = EarlyLoads(cache, Port())  # type: ignore[arg-type]
    for _ in range(2):
        end_turn(cache, early, range(17))
    cache.pool.clear()  # so that something is lacking
    early.advance(is_busy=True)
    with pytest.raises(AssertionError, match="tiers are asked"):
        early.advance(is_busy=False)


def test_nothing_begins_before_the_first_token_of_a_cached_turn(make_world: Callable[..., World]) -> None:
    world = make_world()
    conversations = [Conversation(name) for name in range(4)]
    rounds(world, conversations, 4)
    world.turn(conversations[0], rests=False)  # its end is when the next ones are looked for
    loads = world.driver.port.loads
    request_id = world.submit(conversations[1].prompt(), max_tokens=40)
    account = world.driver.accounts[request_id]
    num_begun = len(loads)
    while not account.token_ids:
        if account.scheduled is None:
            num_begun = len(loads)
        world.driver.step()
    assert len(loads) == num_begun
    world.serve(request_id)
    assert len(loads) > num_begun  # there was something to begin
    world.end()


class CountsKept(FairLeastRecentlyUsed):
    num_kept = 0

    def keep(self, block_ids: Sequence[int], conversation: int, *, turn: int, interval: int) -> None:
        self.num_kept += len(block_ids)
        super().keep(block_ids, conversation, turn=turn, interval=interval)


def test_conversations_with_a_common_beginning_are_not_kept_again_and_again() -> None:
    """A block is of one conversation at a time, so each of several would take the beginning from the one before it."""

    class Port:
        def find(self, digests: Sequence[Any]) -> PrefixHit:
            return PrefixHit([])

    policy = CountsKept(64)
    cache = KvCache(KvCacheOptions(num_blocks=64, block_size_tokens=BLOCK), policy=policy)
    early = EarlyLoads(cache, Port())  # type: ignore[arg-type]

    def turn(name: int) -> None:
        end_turn(cache, early, (*range(16), *range(100 * name, 100 * name + 17)))

    for name in (1, 2, 3, 4, 1, 2, 3, 4):
        turn(name)
    early.advance(is_busy=False)
    kept = policy.num_kept
    for _ in range(10):
        turn(1)
        before = policy.num_kept
        early.advance(is_busy=False)
        assert policy.num_kept - before <= 8  # of the one whose turn has ended
    assert kept > 0


def test_request_that_is_aborted_before_it_ran_leaves_the_link_no_rest(make_world: Callable[..., World]) -> None:
    world = make_world(max_num_seqs=1)
    conversations = [Conversation(name) for name in range(4)]
    rounds(world, conversations, 3)
    early = world.early_blocks
    turn = world.submit(conversations[0].prompt())
    waits = world.submit((3,) * FIRST)
    while world.driver.accounts[turn].terminal is None:
        assert not world.driver.port.pending or world.early_blocks == early
        world.driver.step()
    world.driver.abort(waits)
    assert not world.driver.scheduler.unfinished_ids
    world.rest()
    assert world.early_blocks > early
    world.end()


def test_part_of_a_conversation_that_came_in_time_was_a_right_guess() -> None:
    """What came is judged and not what did not; one right guess lifts the bar, and wrong ones set it."""
    record = _Record()
    for _ in range(9):
        record.note(was_right=False)
    assert not record.allows or record._turns % PROBES == 0
    record.turn_ended()
    assert not record.allows
    record.note(was_right=True)
    assert record.allows
    record.note(was_right=False)
    assert not record.allows


@pytest.mark.parametrize(("num_found", "is_right"), [(20, True), (13, True), (12, False), (0, False)])
def test_what_came_early_is_judged_by_how_much_of_it_is_found(num_found: int, is_right: bool) -> None:
    digests = [bytes([number]) for number in range(20)]
    cache = KvCache(KvCacheOptions(num_blocks=8, block_size_tokens=BLOCK))
    early: Any = EarlyLoads(cache, SimpleNamespace())  # type: ignore[arg-type]
    expected = _Expected(1, "", digests, digests[-1], 1, 1, num_brought=6, brought_end=16)
    early._expected[1] = early._by_end[digests[-1]] = expected
    judged: list[bool] = []
    early._record = SimpleNamespace(note=lambda *, was_right: judged.append(was_right))
    early.begun(SimpleNamespace(prefix_digests=lambda: digests, num_sealed_blocks=num_found))
    assert judged == [is_right]
    assert early.unused_blocks == (0 if is_right else 6)


def test_conversations_that_do_not_go_on_as_expected_are_loaded_for_less_and_less(
    make_world: Callable[..., World],
) -> None:
    world = make_world()
    by_group: list[int] = []
    for group in range(8):
        before = world.early_blocks
        rounds(world, [Conversation(4 * group + name) for name in range(4)], 2)  # and never again
        by_group.append(world.early_blocks - before)
    world.end()
    assert sum(by_group[1:4]) > 2 * sum(by_group[-3:])
    assert world.driver.scheduler.stats().early_unused_blocks > 0


def test_blocks_that_came_before_the_cache_was_flushed_are_not_found(make_world: Callable[..., World]) -> None:
    world = make_world()
    conversations = [Conversation(name) for name in range(4)]
    rounds(world, conversations, 3)
    world.driver.port.load_steps = 40
    world.turn(conversations[0], rests=False)
    while not any(not each.is_over() for each in world.driver.port.loads):
        world.driver.step()
    world.driver.scheduler.flush_cache()  # type: ignore[attr-defined]
    world.rest()
    assert world.driver.scheduler.stats().blocks_used == 0
    world.end()


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_turns_aborts_and_faults_gives_the_right_tokens(
    seed: int, make_world: Callable[..., World]
) -> None:
    draw = random.Random(seed)
    world = make_world(
        num_blocks=draw.choice((31, 34, 48)),
        steps=draw.choice((1, 4)),
        short_rate=draw.choice((0.0, 0.3)),
        seed=seed,
        max_in_flight=draw.choice((1, 2)),
        num_snapshots=draw.choice((0, 6)),
    )
    conversations = [Conversation(name) for name in range(5)]
    open_turns: dict[RequestId, Conversation] = {}
    for _ in range(120):
        free = [each for each in conversations if each not in open_turns.values() and len(each.ids) < 90]
        if free and len(open_turns) < 3:
            chosen = draw.choice(free[:2])
            open_turns[world.submit(chosen.prompt(), tenant=draw.choice(("", "", "other")))] = chosen
        for _ in range(draw.randint(0, 12)):
            world.driver.step()
        if open_turns and draw.random() < 0.1:
            world.driver.abort(draw.choice([*open_turns]))
        if draw.random() < 0.03 and not world.driver.num_in_flight:
            with suppress(Refused):  # copies of states are under way
                world.driver.scheduler.flush_cache()  # type: ignore[attr-defined]
        for request_id in [each for each in open_turns if world.driver.accounts[each].terminal is not None]:
            account = world.driver.accounts[request_id]
            conversation = open_turns.pop(request_id)
            if not account.is_aborted:
                conversation.answered(account.token_ids)
    world.end()


class HastyPort:
    """Says of loads for no request that they are over at once."""

    chunks_per_slot = 0

    def __init__(self, port: TierPort, is_for_a_request: Callable[[set[Any]], bool]) -> None:
        self.port, self.is_for_a_request = port, is_for_a_request
        self.find, self.save, self.state_places, self.clock = port.find, port.save, port.state_places, port.clock

    def load(self, found: PrefixHit, places: Sequence[int]) -> TierTransfer | None:
        digests = {digest for hit in found.hits for digest in hit.digests}
        transfer = self.port.load(found, places)
        return transfer if transfer is None or self.is_for_a_request(digests) else HastyTransfer(transfer)


def test_block_that_is_found_before_it_came_is_caught() -> None:
    def is_for_a_request(digests: set[Any]) -> bool:
        asked = worlds[0].driver.scheduler.unfinished_ids
        return any(digests.issubset(worlds[0].digests_of(request_id)) for request_id in asked)

    class Hasty(TokenBudgetScheduler):
        def use_tiers(self, port: TierPort) -> None:
            super().use_tiers(HastyPort(port, is_for_a_request))  # type: ignore[arg-type]

    worlds: list[World] = []
    worlds.append(World(Hasty, digest_key=KEY, steps=40))
    conversations = [Conversation(name) for name in range(4)]

    def play() -> None:
        for each in 6 * conversations:
            worlds[0].turn(each, rests=False)

    with pytest.raises(ConformanceError, match=r"holds the KV of another prefix|while another transfer"):
        play()


def scheduler(**fields: Any) -> TokenBudgetScheduler:
    limits = {"num_blocks": 32, "block_size_tokens": BLOCK, "max_num_seqs": 2, "max_step_tokens": 8}
    config = SchedulerConfig(**{**limits, "max_model_tokens": 32, **fields})
    return TokenBudgetScheduler(config, FirstComeFirstServed(QueuePolicyConfig()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"early-loads": "yes"}}, "early-loads is true or false, not yes"),
        ({"options": {"early-load": "true"}}, "no option early-load; it has early-loads"),
        ({"options": {"early-loads": "true"}, "table_windows": (None, 8)}, "is for models with one block table"),
    ],
)
def test_what_is_not_there_is_refused_by_name(fields: Any, message: str) -> None:
    with pytest.raises(Refused, match=message):
        scheduler(**fields)


def test_kv_events_and_early_loads_are_refused_together() -> None:
    with pytest.raises(Refused, match="early-loads and KV events do not go together"):
        scheduler(options={"early-loads": "true"}).listen(None)  # type: ignore[arg-type]
