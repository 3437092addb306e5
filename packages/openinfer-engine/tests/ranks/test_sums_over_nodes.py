"""Sums over ranks on several nodes: their bits follow from which rank is where."""

from collections.abc import Sequence

import numpy as np
import pytest

from openinfer_engine import Communicator, LocalGroup
from openinfer_engine.distributed.host_collectives import rank_sum
from openinfer_kernels import HostArray


def arrays_of(size: int) -> list[HostArray]:
    """Numbers whose sum depends on the order in which they are added up."""
    generator = np.random.default_rng(size)
    return [
        (generator.normal(size=(7, 6 * size)) * 10.0 ** generator.integers(-4, 5)).astype(np.float32)
        for _ in range(size)
    ]


def by_hand(arrays: Sequence[HostArray], nodes: Sequence[int]) -> HostArray:
    sums: dict[int, HostArray] = {}
    for array, node in zip(arrays, nodes, strict=True):
        sums[node] = sums[node] + array if node in sums else array
    total, *rest = [sums[node] for node in sorted(sums)]
    for each in rest:
        total = total + each
    return total


LAYOUTS = [(0, 0, 0, 0), (0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 1, 1), (0, 0, 0, 1, 1, 2)]


@pytest.mark.parametrize("nodes", LAYOUTS)
def test_all_collectives_that_sum_add_up_nodes_first(nodes: tuple[int, ...]) -> None:
    arrays = arrays_of(len(nodes))
    expected = by_hand(arrays, nodes)

    def work(communicator: Communicator) -> tuple[HostArray, HostArray]:
        mine = arrays[communicator.rank]
        return communicator.all_reduce(mine.copy()), communicator.reduce_scatter(mine.copy(), axis=1)

    results = LocalGroup(len(nodes), nodes=nodes).run(work)
    for total, _ in results:
        np.testing.assert_array_equal(total, expected)
    np.testing.assert_array_equal(np.concatenate([piece for _, piece in results], axis=1), expected)


def test_one_rank_per_node_gives_the_bits_of_one_node() -> None:
    for size in (2, 3, 5):
        arrays = arrays_of(size)
        np.testing.assert_array_equal(rank_sum(arrays, range(size)), rank_sum(arrays, [0] * size))


def test_two_ranks_per_node_are_another_order() -> None:
    """Else the comparison above would say nothing."""
    arrays = arrays_of(4)
    assert (rank_sum(arrays, (0, 0, 1, 1)) != rank_sum(arrays, (0, 0, 0, 0))).any()


def test_float16_is_rounded_once() -> None:
    arrays = [np.array([2048.0], np.float16), np.array([1.0], np.float16), np.array([1.0], np.float16)]
    assert rank_sum(arrays, (0, 1, 1)) == np.float16(2050)
