"""Collectives of one, two and four ranks against NumPy, and what happens when a rank fails."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from openinfer_engine.distributed.communicator import Communicator, SoloCommunicator, gather_columns
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.errors import GroupBroken

Work = Callable[[Communicator], NDArray[np.generic]]

each_size = pytest.mark.parametrize("size", [1, 2, 4])


def arrays(size: int, shape: tuple[int, ...] = (4, 8), dtype: str = "f4") -> list[NDArray[np.generic]]:
    rng = np.random.default_rng(size)
    return [(rng.standard_normal(shape) * 10).astype(dtype) for _ in range(size)]


def run(size: int, work: Work) -> list[NDArray[np.generic]]:
    if size == 1:
        assert np.array_equal(work(SoloCommunicator()), LocalGroup(1).run(work)[0])
    return LocalGroup(size).run(work)


@each_size
def test_rank_and_size_are_those_of_the_group(size: int) -> None:
    ranks = LocalGroup(size).run(lambda communicator: (communicator.rank, communicator.size))
    assert ranks == [(rank, size) for rank in range(size)]
    assert (SoloCommunicator().rank, SoloCommunicator().size) == (0, 1)


@each_size
def test_all_reduce_sums_in_order_of_ranks_to_equal_bits(size: int) -> None:
    given = arrays(size)
    expected = given[0].copy()
    for each in given[1:]:
        expected = expected + each
    for result in run(size, lambda communicator: communicator.all_reduce(given[communicator.rank].copy())):
        assert np.array_equal(result, expected)


@each_size
def test_all_reduce_of_float16_accumulates_in_float32_and_rounds_once(size: int) -> None:
    given = arrays(size, (1000,), "f2")
    expected = sum(each.astype(np.float32) for each in given).astype(np.float16)
    for result in run(size, lambda communicator: communicator.all_reduce(given[communicator.rank].copy())):
        assert result.dtype == np.float16
        assert np.array_equal(result, expected)


@each_size
def test_all_reduce_of_integers_is_exact(size: int) -> None:
    results = run(size, lambda communicator: communicator.all_reduce(np.array([2**40 + communicator.rank])))
    assert [int(each[0]) for each in results] == [size * 2**40 + sum(range(size))] * size


@each_size
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_gather_joins_in_order_of_ranks(size: int, axis: int) -> None:
    given = arrays(size)
    for result in run(size, lambda communicator: communicator.all_gather(given[communicator.rank], axis=axis)):
        assert np.array_equal(result, np.concatenate(given, axis))


@each_size
@pytest.mark.parametrize("axis", [0, 1])
def test_reduce_scatter_gives_each_rank_its_piece_of_the_sum(size: int, axis: int) -> None:
    given = arrays(size)
    total = given[0] + 0
    for each in given[1:]:
        total = total + each
    results = run(size, lambda communicator: communicator.reduce_scatter(given[communicator.rank].copy(), axis=axis))
    assert np.array_equal(np.concatenate(results, axis), total)
    assert all(result.shape[axis] == total.shape[axis] // size for result in results)


@each_size
def test_all_to_all_transposes_ranks_and_pieces(size: int) -> None:
    given = arrays(size, (size, 3))
    results = run(size, lambda communicator: communicator.all_to_all(given[communicator.rank].copy()))
    for receiver, result in enumerate(results):
        assert np.array_equal(result, np.stack([given[sender][receiver] for sender in range(size)]))


@each_size
def test_broadcast_gives_every_rank_the_roots_array(size: int) -> None:
    given = arrays(size)
    root = size - 1
    for result in run(size, lambda communicator: communicator.broadcast(given[communicator.rank].copy(), root=root)):
        assert np.array_equal(result, given[root])


@pytest.mark.parametrize("size", [2, 4])
def test_results_share_no_memory_with_other_ranks(size: int) -> None:
    def work(communicator: Communicator) -> list[NDArray[np.generic]]:
        mine = np.full((size, 2), communicator.rank, np.float32)
        return [
            communicator.all_reduce(mine.copy()),
            communicator.all_gather(mine.copy(), axis=0),
            communicator.reduce_scatter(mine.copy(), axis=0),
            communicator.all_to_all(mine.copy()),
            communicator.broadcast(mine, root=0),
        ]

    results = LocalGroup(size).run(work)
    for first in range(size):
        for second in range(first + 1, size):
            for mine, theirs in zip(results[first], results[second], strict=True):
                assert not np.shares_memory(mine, theirs)


@pytest.mark.parametrize("size", [2, 4])
def test_group_is_reusable_over_many_steps_while_ranks_change_their_arrays(size: int) -> None:
    def work(communicator: Communicator) -> list[int]:
        mine = np.zeros(64, np.int64)
        sums = []
        for step in range(200):
            mine[:] = step + communicator.rank
            total = communicator.all_reduce(mine)
            mine[:] = -1
            sums.append(int(total[0]) if (total == total[0]).all() else -1)
        return sums

    expected = [size * step + sum(range(size)) for step in range(200)]
    assert LocalGroup(size).run(work) == [expected] * size


def test_group_runs_again_after_its_ranks_have_returned() -> None:
    group = LocalGroup(2)
    for _ in range(50):
        assert [int(total) for total in group.run(lambda communicator: communicator.all_reduce(np.ones(())))] == [2, 2]


def test_barrier_is_passed_only_when_all_have_come() -> None:
    came: list[int] = []

    def work(communicator: Communicator) -> int:
        came.append(communicator.rank)
        communicator.barrier()
        return len(came)

    assert LocalGroup(4).run(work) == [4] * 4


@pytest.mark.parametrize("size", [2, 4])
def test_a_failing_rank_ends_the_collective_of_all_others(size: int) -> None:
    seen: list[GroupBroken] = []

    def work(communicator: Communicator) -> None:
        communicator.barrier()
        if communicator.rank == 1:
            raise ZeroDivisionError("a fault of rank 1")
        with pytest.raises(GroupBroken) as caught:
            communicator.all_reduce(np.zeros(3))
        seen.append(caught.value)

    with pytest.raises(ZeroDivisionError, match="a fault of rank 1"):
        LocalGroup(size).run(work)
    assert len(seen) == size - 1
    assert all("rank 1 failed: ZeroDivisionError: a fault of rank 1" in str(error) for error in seen)
    assert all(isinstance(error.__cause__, ZeroDivisionError) for error in seen)


def test_abort_wakes_a_rank_that_waits_and_the_group_stays_broken() -> None:
    first, second = LocalGroup(2).communicators
    caught: list[GroupBroken] = []

    def wait() -> None:
        try:
            first.barrier()
        except GroupBroken as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    second.abort(RuntimeError("out of memory"))
    waiting.join()
    assert "rank 1 failed: RuntimeError: out of memory" in str(caught[0])
    for communicator in (first, second):
        with pytest.raises(GroupBroken, match="out of memory"):
            communicator.broadcast(np.zeros(1), root=0)


def test_a_rank_that_leaves_early_ends_the_wait_of_the_others() -> None:
    def work(communicator: Communicator) -> None:
        if communicator.rank != 1:
            communicator.barrier()

    with pytest.raises(GroupBroken, match="rank 1 has left while others wait"):
        LocalGroup(3).run(work)


def test_different_collectives_are_an_error_on_every_rank() -> None:
    group = LocalGroup(2)
    messages: list[str] = []

    def work(communicator: Communicator) -> None:
        try:
            if communicator.rank == 0:
                communicator.all_reduce(np.zeros(3, np.float32))
            else:
                communicator.all_gather(np.zeros(3, np.float32), axis=0)
        except GroupBroken as error:
            messages.append(str(error))

    group.run(work)
    assert len(messages) == 2
    for message in messages:
        assert "rank 0: all_reduce of float32 [3]; rank 1: all_gather(axis=0) of float32 [3]" in message
    with pytest.raises(GroupBroken):
        group.communicators[0].barrier()


def test_different_shapes_are_an_error_that_lists_them() -> None:
    with pytest.raises(GroupBroken, match=r"rank 0: all_reduce of float64 \[3\]; rank 1: all_reduce of float64 \[4\]"):
        LocalGroup(2).run(lambda communicator: communicator.all_reduce(np.zeros(3 + communicator.rank)))


@pytest.mark.parametrize("communicator", [SoloCommunicator(), LocalGroup(1).communicators[0]], ids=["solo", "local"])
def test_arguments_that_cannot_be_are_refused(communicator: Communicator) -> None:
    with pytest.raises(ValueError, match="no axis 2"):
        communicator.all_gather(np.zeros((2, 2)), axis=2)
    with pytest.raises(ValueError, match="no axis -3"):
        communicator.reduce_scatter(np.zeros((2, 2)), axis=-3)
    with pytest.raises(ValueError, match=r"needs an array \[1, ...\]"):
        communicator.all_to_all(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="no rank 1 among 1"):
        communicator.broadcast(np.zeros(2), root=1)


def test_reduce_scatter_of_an_axis_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be cut into 2 equal pieces"):
        LocalGroup(2).run(lambda communicator: communicator.reduce_scatter(np.zeros(3), axis=0))


def test_group_of_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        LocalGroup(0)


@each_size
@pytest.mark.parametrize("padding", [0, 1])
def test_gathered_columns_have_no_padding_and_no_gaps_between_rows(size: int, padding: int) -> None:
    given, num_columns = arrays(size), 8 * size - padding
    whole = np.concatenate(given, axis=1)[:, :num_columns]
    for result in run(size, lambda each: gather_columns(each, given[each.rank], num_columns=num_columns)):
        assert np.array_equal(result, whole)
        assert result.flags.c_contiguous
