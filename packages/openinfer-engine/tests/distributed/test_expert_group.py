"""Rows of data-parallel ranks: with the experts that they chose, summed in order of ranks, and back at their rank."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from openinfer_engine.distributed.communicator import Communicator, SoloCommunicator
from openinfer_engine.distributed.dispatch import ChosenRows, DeviceRows, RowExchange
from openinfer_engine.distributed.expert_group import DataParallelCommunicator, ExpertGroup, expert_group, is_first
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_kernels import Array, ExpertChoice, HostArray
from openinfer_kernels.cpu import CpuOps

RANKS, WIDTH, CHOSEN, EXPERTS = 3, 4, 2, 5
COUNTS = ((3, 0, 1), (1, 1, 1), (0, 7, 0), (2, 4, 6))
"""Of steps: uneven ones, and ranks without rows."""
rng = np.random.default_rng(3)
MATRICES = rng.normal(size=(RANKS * EXPERTS, WIDTH, WIDTH)).astype(np.float32)


class Exchange:
    """As `ExpertRows` of GPUs, over the collectives of a host."""

    def __init__(self, others: Communicator) -> None:
        self._others = others
        self.dispatched = 0

    def fits(self, rows: Array, choice: ExpertChoice) -> bool:
        return rows.shape[1] == WIDTH and choice.ids.shape[1] == CHOSEN

    def dispatch(
        self, rows: Array, choice: ExpertChoice, *, shared: Array, places: int, experts: int
    ) -> tuple[Array, Array, Array, Array]:
        def placed(array: HostArray, padding: int = 0) -> HostArray:
            whole = np.full((places, *array.shape[1:]), padding, array.dtype)
            whole[: len(array)] = array
            return self._others.all_gather(whole, axis=0)

        self.dispatched += 1
        rank, size = self._others.rank, self._others.size
        ids, weights, brought = placed(choice.ids, -1), placed(choice.weights), placed(rows)
        is_own = np.repeat(np.arange(size), places) == rank
        brought[~is_own & ~(ids // experts == rank).any(axis=1)] = 0
        added = placed(shared)
        added[~is_own] = 0
        return brought, ids, weights, added

    def combine(self, parts: Array, all_ids: Array, *, tokens: int, experts: int) -> Array:
        del all_ids, experts
        return self._others.reduce_scatter(parts, axis=0)[:tokens]


class Peers:
    """A communicator of a host whose ranks reach each other's memory, as GPUs do; or cannot, without `exchange`."""

    def __init__(self, others: Communicator, exchange: RowExchange | None) -> None:
        self._others, self._exchange = others, exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)

    @contextmanager
    def row_exchange(self) -> Generator[RowExchange | None]:
        yield self._exchange


def begun(communicator: Communicator, counts: Sequence[int]) -> DataParallelCommunicator:
    own = DataParallelCommunicator(communicator)
    own.begin_step(counts)
    return own


def rows_of(counts: Sequence[int], rank: int, *, spread: int) -> tuple[HostArray, ExpertChoice, HostArray]:
    """Rows, choices of the first `spread` experts, some none, and what shared experts made."""
    drawn = np.random.default_rng((rank, spread, *counts))
    count = counts[rank]
    ids = drawn.integers(-1, spread, (count, CHOSEN)).astype(np.int32)
    choice = ExpertChoice(ids=ids, weights=drawn.random((count, CHOSEN)).astype(np.float32))
    return drawn.normal(size=(count, WIDTH)).astype(np.float32), choice, drawn.normal(size=(count, WIDTH)).astype("f4")


def part_of(rank: int, rows: HostArray, choice: ExpertChoice, shared: HostArray) -> HostArray:
    """What a rank's experts make of rows; the same bits whatever other rows there are."""
    total = np.zeros((len(rows), WIDTH), np.float32)
    for at, row in enumerate(rows):
        for expert, weight in zip(choice.ids[at], choice.weights[at], strict=True):
            if expert >= 0 and expert // EXPERTS == rank:
                total[at] += MATRICES[expert] @ row * weight
    return total + shared


def by_hand(way: str, rank: int, rows: HostArray, choice: ExpertChoice, shared: HostArray) -> HostArray:
    """On a host, what the rank's shared experts made comes last; else it is part of its own sum."""
    total, last = np.zeros((len(rows), WIDTH), np.float32), way == "host"
    for each in range(RANKS):
        total += part_of(each, rows, choice, shared if each == rank and not last else np.zeros_like(shared))
    return total + shared if last else total


def run(way: str, counts: Sequence[int], *, spread: int) -> list[tuple[HostArray, int]]:
    """Of each rank its sums, and how many rows its experts were given."""

    def work(communicator: Communicator) -> tuple[HostArray, int]:
        exchange = Exchange(communicator) if way == "kernels" else None
        others: Any = communicator if way == "host" else Peers(communicator, exchange)
        group: ExpertGroup = expert_group(begun(others, counts), CpuOps())
        assert isinstance(group, ChosenRows if way == "host" else DeviceRows)
        given: list[int] = []

        def compute(rows: HostArray, choice: ExpertChoice, shared: HostArray) -> HostArray:
            given.append(int((choice.ids // EXPERTS == group.rank).any(axis=1).sum()))
            return part_of(group.rank, rows, choice, shared)

        rows, choice, shared = rows_of(counts, communicator.rank, spread=spread)
        total = group.apply(compute, rows, choice, shared=shared, num_experts=EXPERTS)
        assert len(given) == 1
        assert exchange is None or exchange.dispatched == 1
        return total, given[0]

    return LocalGroup(RANKS).run(work)


@pytest.mark.parametrize("way", ["host", "kernels", "gathered"])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("spread", [RANKS * EXPERTS, EXPERTS, 0], ids=["all", "one rank's", "none"])
def test_rows_get_the_sum_over_ranks_bit_for_bit(way: str, counts: Sequence[int], spread: int) -> None:
    for rank, (found, _) in enumerate(run(way, counts, spread=spread)):
        np.testing.assert_array_equal(found, by_hand(way, rank, *rows_of(counts, rank, spread=spread)))


@pytest.mark.parametrize("way", ["host", "kernels", "gathered"])
def test_each_rank_computes_all_rows_that_chose_its_experts_and_each_once(way: str) -> None:
    counts = (2, 4, 6)
    choices = [rows_of(counts, rank, spread=RANKS * EXPERTS)[1].ids // EXPERTS for rank in range(RANKS)]
    expected = [sum(int((ids == rank).any(axis=1).sum()) for ids in choices) for rank in range(RANKS)]
    assert [given for _, given in run(way, counts, spread=RANKS * EXPERTS)] == expected


def test_on_a_host_only_chosen_rows_travel() -> None:
    """All rows choose experts of rank 0: nothing is sent to the others, and the pieces are as long as the longest."""
    counts, brought = (2, 4, 6), list[tuple[int, ...]]()

    def work(communicator: Communicator) -> None:
        rows, choice, shared = rows_of(counts, communicator.rank, spread=EXPERTS)
        choice.ids[1:] = -1  # of each rank's rows the first has chosen at most
        choice.ids[0] = 0

        def compute(given: HostArray, chosen: ExpertChoice, added: HostArray) -> HostArray:
            brought.append((communicator.rank, len(given), int((chosen.ids[len(rows) :] >= 0).any(axis=1).sum())))
            return part_of(communicator.rank, given, chosen, added)

        group = expert_group(begun(communicator, counts), CpuOps())
        group.apply(compute, rows, choice, shared=shared, num_experts=EXPERTS)

    LocalGroup(RANKS).run(work)
    assert sorted(brought) == [(0, 2 + 3, 2), (1, 4 + 3, 0), (2, 6 + 3, 0)]


@pytest.mark.parametrize("way", ["host", "kernels", "gathered"])
def test_in_a_rehearsal_nothing_is_exchanged(way: str) -> None:
    counts = (2, 2, 2)
    alone: Any = LocalGroup(RANKS).communicators[1]  # whose collectives would wait for ever
    others = alone if way == "host" else Peers(alone, Exchange(alone) if way == "kernels" else None)
    own = begun(others, counts)
    rows, choice, shared = rows_of(counts, 1, spread=RANKS * EXPERTS)
    with own.rehearsal():
        found = expert_group(own, CpuOps()).apply(
            lambda *given: part_of(1, *given), rows, choice, shared=shared, num_experts=EXPERTS
        )
    np.testing.assert_array_equal(found, part_of(1, rows, choice, shared))


def test_ranks_that_have_all_rows_move_none() -> None:
    rows, choice, shared = rows_of((3, 0, 0), 0, spread=EXPERTS)
    seen: list[Any] = []

    def compute(*given: Any) -> HostArray:
        seen.extend(given)
        return rows

    group = expert_group(SoloCommunicator(), CpuOps())
    assert group.apply(compute, rows, choice, shared=shared, num_experts=EXPERTS) is rows
    assert all(a is b for a, b in zip(seen, (rows, choice, shared), strict=True))


def test_a_step_has_a_count_for_each_rank() -> None:
    own = DataParallelCommunicator(LocalGroup(3).communicators[0])
    with pytest.raises(ValueError, match="2 counts are not those of 3 ranks"):
        own.begin_step((1, 2))


def test_the_first_rank_is_the_one_of_all() -> None:
    ranks = LocalGroup(2).communicators
    assert [is_first(each) for each in ranks] == [True, False]
    assert [is_first(DataParallelCommunicator(each)) for each in ranks] == [True, False]
