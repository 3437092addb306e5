"""Other ranks' shares of loads and saves: a block counts where every rank has it, and what a rank in a process does."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from openinfer_core.engine import KvTierStats
from openinfer_engine.kv_tiers.port import PoolTierPort
from openinfer_engine.kv_tiers.remote_share import RemoteShare
from openinfer_engine.kv_tiers.share_service import ShareService
from openinfer_engine.kv_tiers.stats import total_of_ranks
from openinfer_engine.kv_tiers.transfer import RankedTransfer
from openinfer_engine.worker.messages import (
    CancelTransfer,
    LoadShare,
    LookShare,
    PrefetchShare,
    SaveShare,
    TiersChanged,
    TransferEnded,
)
from openinfer_kv_cache import Digest, PortPrefetch, PrefixHit, TellingTier, TierListener, TierMedium

DIGESTS = [Digest(bytes([number]) * 16) for number in range(3)]
PLACES = [7, 5, 300]
STATS = (KvTierStats(tier="host", finds=3, failures={"busy": 1}),)


class FakeMove:
    """Ends when a test says so."""

    def __init__(self, num_blocks: int = 3) -> None:
        self.num_blocks = num_blocks
        self.begin_s = 0.0
        self.completed_blocks = 0
        self.is_ended = False
        self.is_cancelled = False

    def is_over(self) -> bool:
        return self.is_ended

    def cancel(self) -> None:
        self.is_cancelled = True

    def wait(self, timeout_s: float) -> None:
        assert timeout_s > 0

    def end(self, completed_blocks: int) -> None:
        self.completed_blocks, self.is_ended = completed_blocks, True


def test_blocks_have_landed_as_far_as_they_have_on_every_rank() -> None:
    shares = [FakeMove(), FakeMove(), FakeMove()]
    move = RankedTransfer(shares)
    assert (move.num_blocks, move.is_over()) == (3, False)
    shares[0].end(3)
    assert not move.is_over()
    assert not shares[1].is_cancelled
    shares[1].end(2)
    assert not move.is_over()
    assert shares[2].is_cancelled
    shares[2].end(3)
    assert move.is_over()
    assert move.completed_blocks == 2


def test_cancelling_reaches_the_ranks_where_it_is_pending() -> None:
    shares = [FakeMove(), FakeMove()]
    move = RankedTransfer(shares)
    shares[0].end(3)
    assert not move.is_over()
    move.wait(0.1)
    move.cancel()
    assert [share.is_cancelled for share in shares] == [False, True]


def test_loads_and_saves_are_sent_and_end_when_the_rank_says_so() -> None:
    told: list[Any] = []
    share = RemoteShare(told.append)
    load, save = share.load(DIGESTS, PLACES), share.save(DIGESTS[:1], PLACES[:1])
    assert told == [
        LoadShare(0, b"".join(DIGESTS), bytes([7, 0, 0, 0, 5, 0, 0, 0, 44, 1, 0, 0])),
        SaveShare(1, DIGESTS[0], bytes([7, 0, 0, 0])),
    ]
    assert (share.faults, share.stats()) == (0, ())
    share.hear(TransferEnded(1, 1, 0, STATS))
    assert (load.is_over(), save.is_over(), save.completed_blocks) == (False, True, 1)
    for _ in range(2):
        load.cancel()
    assert told[2:] == [CancelTransfer(0)]
    share.hear(TransferEnded(0, 2, 1, STATS))
    load.wait(1)
    assert (load.is_over(), load.completed_blocks, load.num_blocks) == (True, 2, 3)
    assert (share.faults, share.stats()) == (1, STATS)


def test_nothing_of_a_rank_that_is_gone_is_waited_for() -> None:
    share = RemoteShare(lambda message: None)
    before = share.load(DIGESTS, PLACES)
    share.end_all()
    after = share.save(DIGESTS, PLACES)
    assert [(move.is_over(), move.completed_blocks) for move in (before, after)] == [(True, 0)] * 2
    share.hear(TransferEnded(0, 3, 0, STATS))
    assert before.completed_blocks == 0


class FakePort:
    """Loads what it was told to have."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Sequence[Digest], Sequence[int]]] = []
        self.moves: queue.SimpleQueue[FakeMove] = queue.SimpleQueue()
        self.has_anything = True
        self.is_closed = False
        self.faults = 0

    def find_looking_up(self, digests: Sequence[Digest]) -> Sequence[Digest]:
        return digests

    def find(self, digests: Sequence[Digest]) -> PrefixHit:
        self.asked.append(("find", digests, ()))
        return PrefixHit([])

    def load(self, found: Sequence[Digest], places: Sequence[int]) -> FakeMove | None:
        return self._begin("load", found, places)

    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> FakeMove | None:
        return self._begin("save", digests, places)

    def prefetch(self, digests: Sequence[Digest]) -> PortPrefetch:
        return PortPrefetch(len(digests), self._begin("prefetch", digests, ()))

    def _begin(self, verb: str, digests: Sequence[Digest], places: Sequence[int]) -> FakeMove | None:
        self.asked.append((verb, digests, places))
        if not self.has_anything:
            return None
        move = FakeMove(len(digests))
        self.moves.put(move)
        return move

    def settle(self) -> None: ...

    def stats(self) -> tuple[KvTierStats, ...]:
        return STATS

    def close(self) -> None:
        self.is_closed = True


class Service:
    """A service, and what it says."""

    def __init__(self, telling: TellingTier | None = None) -> None:
        self.port = FakePort()
        self.said: queue.SimpleQueue[TransferEnded | TiersChanged] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.entered = threading.Event()
        self._sent = RemoteShare(lambda message: self.service.take(cast("Any", message), self.fence))
        self.fence: Callable[[], None] = lambda: None
        self.service = ShareService(
            cast("PoolTierPort", self.port),
            answer=self.said.put,
            fail=self.errors.put,
            enter_thread=self.entered.set,
            telling=telling,
        )

    def next_end(self) -> int:
        said = self.said.get(timeout=10)
        assert isinstance(said, TransferEnded)
        return said.number

    @property
    def sent(self) -> RemoteShare:
        return self._sent


@pytest.fixture
def service() -> Service:
    return Service()


def test_rank_does_as_ordered_behind_its_steps_and_says_what_has_landed(service: Service) -> None:
    may_begin = threading.Event()
    service.fence = lambda: may_begin.wait(10) and None
    service.sent.load(DIGESTS, PLACES)
    service.fence = lambda: None
    service.sent.save(DIGESTS[:1], PLACES[:1])
    assert service.port.asked == []
    may_begin.set()
    load, save = service.port.moves.get(timeout=10), service.port.moves.get(timeout=10)
    assert service.port.asked == [("load", DIGESTS, PLACES), ("save", DIGESTS[:1], PLACES[:1])]
    assert service.entered.is_set()
    save.end(1)
    assert service.said.get(timeout=10) == TransferEnded(1, 1, 0, STATS)
    load.end(2)
    assert service.said.get(timeout=10) == TransferEnded(0, 2, 0, STATS)
    service.service.close()
    assert service.port.is_closed


def test_rank_whose_tiers_have_nothing_says_so(service: Service) -> None:
    service.port.has_anything = False
    service.sent.load(DIGESTS, PLACES)
    assert service.said.get(timeout=10) == TransferEnded(0, 0, 0, STATS)
    service.service.close()


def never() -> None:
    raise AssertionError("a prefetch touches no block of the pool")


def test_rank_brings_up_what_it_is_told_to_without_waiting_for_steps(service: Service) -> None:
    service.fence = never
    service.sent.prefetch(DIGESTS)
    service.port.moves.get(timeout=10).end(3)
    assert service.said.get(timeout=10) == TransferEnded(0, 3, 0, STATS)
    service.port.has_anything = False
    service.sent.prefetch(DIGESTS[:1])
    assert service.said.get(timeout=10) == TransferEnded(1, 0, 0, STATS)
    assert service.port.asked == [("prefetch", DIGESTS, ()), ("prefetch", DIGESTS[:1], ())]
    service.service.close()


def test_what_a_rank_says_of_a_prefetch_is_counted_and_ends_nothing() -> None:
    told: list[Any] = []
    share = RemoteShare(told.append)
    share.prefetch(DIGESTS)
    load = share.load(DIGESTS, PLACES)
    share.hear(TransferEnded(0, 3, 0, STATS))
    assert (told[0], load.is_over(), share.stats()) == (PrefetchShare(0, b"".join(DIGESTS)), False, STATS)


def test_rank_cancels_what_is_on_its_way_and_ignores_what_is_over(service: Service) -> None:
    first = service.sent.load(DIGESTS, PLACES)
    move = service.port.moves.get(timeout=10)
    first.cancel()
    service.sent.save(DIGESTS, PLACES)
    second = service.port.moves.get(timeout=10)
    assert move.is_cancelled
    move.end(0)
    assert service.next_end() == 0
    service.service.take(CancelTransfer(0), service.fence)
    second.end(3)
    assert service.next_end() == 1
    service.service.close()


class Telling:
    """Of a tier, what `listen` is."""

    def __init__(self, *known: Digest) -> None:
        self.known = known
        self.listener: TierListener | None = None

    def listen(self, listener: TierListener) -> None:
        listener.stored(self.known, TierMedium.STORAGE)
        self.listener = listener

    def change(self, *, stored: Sequence[Digest] = (), removed: Sequence[Digest] = ()) -> None:
        assert self.listener is not None
        for digest in stored:
            self.listener.stored([digest], TierMedium.STORAGE)
        for digest in removed:
            self.listener.removed([digest], TierMedium.STORAGE)


def test_rank_tells_at_once_what_its_tiers_hold_and_then_what_changes() -> None:
    tier = Telling(*DIGESTS[:2])
    service = Service(cast("TellingTier", tier))
    assert service.said.get(timeout=10) == TiersChanged(b"", is_stored=True)
    assert service.said.get(timeout=10) == TiersChanged(b"".join(DIGESTS[:2]), is_stored=True)
    tier.change(removed=DIGESTS[:1])  # while nothing is asked of it
    assert service.said.get(timeout=10) == TiersChanged(DIGESTS[0], is_stored=False)
    service.service.close()


def test_rank_tells_of_a_whole_save_before_it_ends() -> None:
    tier = Telling()
    service = Service(cast("TellingTier", tier))
    service.sent.save(DIGESTS, PLACES)
    save = service.port.moves.get(timeout=10)
    tier.change(stored=DIGESTS)
    save.end(3)
    said = [service.said.get(timeout=10) for _ in range(3)]
    assert said[1:] == [TiersChanged(b"".join(DIGESTS), is_stored=True), TransferEnded(0, 3, 0, STATS)]
    service.service.close()


def test_what_a_rank_tells_of_its_tiers_is_known() -> None:
    told: list[Any] = []
    share = RemoteShare(told.append)
    assert share.contents is None
    share.hear_of_tiers(TiersChanged(b"", is_stored=True))
    contents = share.contents
    assert contents is not None
    share.hear_of_tiers(TiersChanged(b"".join(DIGESTS), is_stored=True))
    share.hear_of_tiers(TiersChanged(DIGESTS[1], is_stored=False))
    assert [contents.count(DIGESTS[begin:]) for begin in range(3)] == [1, 0, 1]
    assert share.contents is contents
    share.look(DIGESTS[1])
    assert told == [LookShare(DIGESTS[1])]


def test_rank_looks_for_what_it_is_not_known_to_hold_without_an_answer(service: Service) -> None:
    service.fence = never
    service.sent.look(DIGESTS[1])
    service.sent.prefetch(DIGESTS)
    service.port.moves.get(timeout=10).end(3)
    assert service.next_end() == 0
    assert service.port.asked == [("find", [DIGESTS[1]], ()), ("prefetch", DIGESTS, ())]
    service.service.close()


def test_transfer_that_raises_ends_the_rank(service: Service) -> None:
    def raising() -> bool:
        raise RuntimeError("injected")

    service.sent.load(DIGESTS, PLACES)
    move = service.port.moves.get(timeout=10)
    move.is_over = raising
    assert "injected" in str(service.errors.get(timeout=10))
    service.service.close()


def test_counts_of_ranks_are_added_tier_by_tier() -> None:
    other = (KvTierStats(tier="host", finds=2, stored_blocks=4, failures={"busy": 1, "gone": 2}, condition="full"),)
    assert total_of_ranks([STATS, (), other]) == (
        KvTierStats(tier="host", finds=5, stored_blocks=4, failures={"busy": 2, "gone": 2}, condition="full"),
    )
    assert total_of_ranks([(), ()]) == ()
