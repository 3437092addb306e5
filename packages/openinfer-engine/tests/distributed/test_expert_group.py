"""Rows of data-parallel ranks: gathered with padding, computed by all, summed, and back at the rank they came from."""

import numpy as np
import pytest

from openinfer_engine.distributed.communicator import Communicator, SoloCommunicator
from openinfer_engine.distributed.expert_group import DataParallelCommunicator, expert_group, is_first
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_kernels import HostArray
from openinfer_kernels.cpu import CpuOps

COUNTS = (3, 0, 1)
WIDTH = 4


def rows_of(rank: int) -> HostArray:
    return np.arange(COUNTS[rank] * WIDTH, dtype=np.float32).reshape(-1, WIDTH) + 100 * rank


def begun(communicator: Communicator) -> DataParallelCommunicator:
    own = DataParallelCommunicator(communicator)
    own.begin_step(COUNTS)
    return own


def test_all_ranks_get_all_rows_at_the_same_places() -> None:
    def work(communicator: Communicator) -> HostArray:
        return expert_group(begun(communicator), CpuOps()).gather(rows_of(communicator.rank), padding=-1)

    first, *others = LocalGroup(3).run(work)
    expected = np.full((9, WIDTH), -1, np.float32)
    expected[0:3], expected[6:7] = rows_of(0), rows_of(2)
    np.testing.assert_array_equal(first, expected)
    for other in others:
        np.testing.assert_array_equal(other, expected)


def test_a_sum_over_ranks_comes_back_to_the_rows_it_is_of() -> None:
    """Each rank adds its number + 1 times all rows, and once what it placed; that is its own share alone."""

    def work(communicator: Communicator) -> HostArray:
        group, rows = expert_group(begun(communicator), CpuOps()), rows_of(communicator.rank)
        return group.combine(group.gather(rows) * (group.rank + 1) + group.place(rows))

    for rank, found in enumerate(LocalGroup(3).run(work)):
        np.testing.assert_array_equal(found, rows_of(rank) * (1 + 2 + 3 + 1))


def test_sums_are_those_of_ranks_that_have_all_rows_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(3, 9, WIDTH)).astype(np.float32)

    def shared(communicator: Communicator) -> HostArray:
        return expert_group(communicator, CpuOps()).combine(parts[communicator.rank].copy())

    def scattered(communicator: Communicator) -> HostArray:
        return expert_group(begun(communicator), CpuOps()).combine(parts[communicator.rank].copy())

    whole = LocalGroup(3).run(shared)[0]
    for rank, found in enumerate(LocalGroup(3).run(scattered)):
        np.testing.assert_array_equal(found, whole[3 * rank : 3 * rank + COUNTS[rank]])


def test_ranks_that_have_all_rows_move_none() -> None:
    group, rows = expert_group(SoloCommunicator(), CpuOps()), rows_of(0)
    assert group.gather(rows) is rows
    assert group.place(rows) is rows


def test_a_step_has_a_count_for_each_rank() -> None:
    own = DataParallelCommunicator(LocalGroup(3).communicators[0])
    with pytest.raises(ValueError, match="2 counts are not those of 3 ranks"):
        own.begin_step((1, 2))


def test_the_first_rank_is_the_one_of_all() -> None:
    ranks = LocalGroup(2).communicators
    assert [is_first(each) for each in ranks] == [True, False]
    assert [is_first(DataParallelCommunicator(each)) for each in ranks] == [True, False]
