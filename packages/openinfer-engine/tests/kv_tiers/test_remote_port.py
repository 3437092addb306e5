"""The port of a rank that is a process: what it is known to hold, and what it turns out to have dropped."""

from collections.abc import Sequence

import numpy as np
import pytest

from openinfer_core.engine import KvTierStats
from openinfer_engine.kv_tiers import RemoteTierPort, TierContents
from openinfer_engine.kv_tiers.remote_port import LOOK_S
from openinfer_kv_cache import Digest, TierMedium, TierTransfer


class Moving:
    """A transfer that the test ends."""

    begin_s = 0.0

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.completed_blocks = num_blocks, 0
        self.ended = self.was_cancelled = False

    def is_over(self) -> bool:
        return self.ended

    def cancel(self) -> None:
        self.was_cancelled = True

    def wait(self, timeout_s: float) -> None:
        del timeout_s

    def end(self, completed_blocks: int) -> None:
        self.completed_blocks, self.ended = completed_blocks, True


class Share:
    """Of a rank that notes what it is asked for."""

    faults = 3

    def __init__(self, contents: TierContents | None = None) -> None:
        self.contents = contents
        self.asked: list[tuple[str, Sequence[Digest], Sequence[int]]] = []
        self.moving: list[Moving] = []
        self.looked: list[Digest] = []

    def look(self, digest: Digest) -> None:
        self.looked.append(digest)

    def load(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer:
        return self._begin("load", digests, places)

    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer:
        return self._begin("save", digests, places)

    def _begin(self, name: str, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer:
        self.asked.append((name, list(digests), list(places)))
        self.moving.append(Moving(len(digests)))
        return self.moving[-1]

    def prefetch(self, digests: Sequence[Digest]) -> None:
        raise AssertionError("its scheduler does not prefetch")

    def stats(self) -> tuple[KvTierStats, ...]:
        return ()

    def close(self) -> None:
        raise AssertionError("the rank closes its tiers")


def chain(number: int, count: int) -> list[Digest]:
    return [Digest(np.asarray([number, place], np.uint64).tobytes()) for place in range(count)]


def saved(port: RemoteTierPort, share: Share, digests: Sequence[Digest], *, completed: int | None = None) -> None:
    port.save(digests, range(len(digests)))
    share.moving[-1].end(len(digests) if completed is None else completed)


def test_what_was_saved_is_found_once_it_is_there_and_loaded_into_its_places() -> None:
    share = Share()
    port = RemoteTierPort(share, num_blocks=100)
    digests = chain(0, 40)
    port.save(digests, range(40))
    assert port.is_moving
    assert port.find(digests).num_blocks == 0
    share.moving[-1].end(38)
    found = port.find(digests)
    assert (found.num_blocks, port.is_moving) == (38, False)
    assert port.find(chain(1, 3)).num_blocks == 0
    assert found.take_back(35) == 32  # whole chunks are given back
    transfer = port.load(found, range(100, 140))
    assert share.asked[-1] == ("load", digests[:32], list(range(100, 132)))
    assert (transfer is share.moving[-1], port.is_moving) == (True, True)
    assert port.load(port.find(chain(1, 3)), range(3)) is None
    assert (port.faults, port.stats(), port.state_places(0)) == (3, (), ())


@pytest.mark.parametrize("completed", [0, 7])
def test_what_the_rank_has_dropped_is_forgotten(completed: int) -> None:
    share = Share()
    port = RemoteTierPort(share, num_blocks=100)
    digests = chain(0, 10)
    saved(port, share, digests)
    port.load(port.find(digests), range(10))
    assert port.find(digests).num_blocks == 10  # until it is known
    share.moving[-1].end(completed)
    assert port.find(digests).num_blocks == completed


def test_it_remembers_so_many_blocks_those_that_were_used_last_and_ends_of_chains_go_first() -> None:
    share = Share()
    port = RemoteTierPort(share, num_blocks=10)
    first, second, third = (chain(number, 4) for number in range(3))
    saved(port, share, first)
    saved(port, share, second)
    port.load(port.find(first), range(4))
    share.moving[-1].end(4)
    saved(port, share, third)
    assert [port.find(each).num_blocks for each in (first, second, third)] == [4, 2, 4]


def test_what_tiers_tell_of_is_found_without_having_been_saved_and_no_longer_when_all_have_dropped_it() -> None:
    """Both tiers of a stack have the first blocks; the disk has what an earlier engine left."""
    contents = TierContents()
    digests = chain(0, 6)
    contents.stored(digests[:5], TierMedium.STORAGE)
    contents.stored(digests[:2], TierMedium.CPU)
    share = Share(contents)
    port = RemoteTierPort(share, num_blocks=1)
    assert port.find(digests).num_blocks == 5
    contents.removed(digests[:1], TierMedium.CPU)
    assert port.find(digests).num_blocks == 5
    contents.removed(digests[:1], TierMedium.STORAGE)
    assert port.find(digests).num_blocks == 0
    contents.stored(digests[:1], TierMedium.CPU)
    port.save(digests, range(6))
    share.moving[-1].end(6)
    assert port.find(digests).num_blocks == 5  # what was saved, the tier tells


def test_what_tiers_tell_of_and_cannot_load_is_not_asked_for_again() -> None:
    contents = TierContents()
    digests = chain(0, 4)
    contents.stored(digests)
    share = Share(contents)
    port = RemoteTierPort(share, num_blocks=1)
    port.load(port.find(digests), range(4))
    share.moving[-1].end(3)
    assert port.find(digests).num_blocks == 3
    contents.removed(digests[3:])
    assert port.find(digests).num_blocks == 3
    contents.stored(digests[3:])
    assert (port.find(digests).num_blocks, len(contents)) == (4, 4)


def test_a_miss_lets_the_rank_look_for_news_once_in_a_while() -> None:
    now_s = [100.0]
    contents = TierContents()
    contents.stored(chain(0, 2))
    share = Share(contents)
    port = RemoteTierPort(share, num_blocks=1, clock=lambda: now_s[0])
    assert port.find(chain(0, 2)).num_blocks == 2
    assert share.looked == []
    for _ in range(3):
        port.find(chain(0, 4))
        port.find(chain(1, 4))
    assert share.looked == [chain(0, 4)[2]]
    now_s[0] += LOOK_S
    port.find(chain(1, 4))
    assert share.looked == [chain(0, 4)[2], chain(1, 1)[0]]


def test_after_its_end_nothing_moves_and_the_rank_ends_its_tiers_itself() -> None:
    share = Share()
    port = RemoteTierPort(share, num_blocks=10)
    port.save(chain(0, 2), range(2))
    port.close()
    assert not port.is_moving
    assert not share.moving[-1].was_cancelled
