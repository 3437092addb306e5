"""Collectives over sockets against those of threads, and what happens when a rank goes."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.distributed.socket_communicator import SocketCommunicator
from openinfer_engine.errors import GroupBroken

each_size = pytest.mark.parametrize("size", [2, 3, 4])


def run(size: int, work: Callable[[Communicator], Any]) -> list[Any]:
    """Each rank in a thread; the links are the same as between processes."""
    ticket, first = SocketCommunicator.open(size)
    others = [SocketCommunicator.join(ticket, rank=rank, size=size) for rank in range(1, size)]

    def take_part(communicator: SocketCommunicator) -> Any:
        try:
            return work(communicator)
        except BaseException as error:
            communicator.abort(error)
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(take_part, each) for each in (first, *others)]
    for each in (*others, first):
        each.close()
    return [future.exception() or future.result() for future in futures]


@each_size
def test_collectives_are_those_of_threads(size: int) -> None:
    rng = np.random.default_rng(size)
    arrays = (rng.standard_normal((size, size, 2 * size, 5)) * 10).astype(np.float32)
    halves = arrays.astype(np.float16)

    def work(communicator: Communicator) -> list[Any]:
        mine, half = arrays[communicator.rank], halves[communicator.rank]
        communicator.barrier()
        return [
            communicator.all_reduce(mine.copy()),
            communicator.all_reduce(half.copy()),
            communicator.all_gather(mine.copy(), axis=1),
            communicator.all_gather(mine.copy(), axis=-1),
            communicator.reduce_scatter(mine.copy(), axis=1),
            communicator.all_to_all(mine.copy()),
            communicator.broadcast(mine.copy(), root=size - 1),
            communicator.all_reduce(np.array(2**40 + communicator.rank)),
        ]

    for found, expected in zip(run(size, work), LocalGroup(size).run(work), strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)


@each_size
def test_a_failing_rank_ends_the_collective_of_all_others(size: int) -> None:
    def work(communicator: Communicator) -> None:
        communicator.barrier()
        if communicator.rank == size - 1:
            raise ZeroDivisionError("a fault")
        communicator.all_reduce(np.zeros(3))

    *others, failed = run(size, work)
    assert isinstance(failed, ZeroDivisionError)
    assert all(isinstance(error, GroupBroken) for error in others)


def test_rank_0_that_waits_for_a_rank_that_never_joins_can_be_woken() -> None:
    _, first = SocketCommunicator.open(2)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            first.barrier()
        except GroupBroken as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    first.abort(RuntimeError("rank 1 has died"))
    waiting.join()
    assert "rank 1 has died" in str(caught[0])
    first.close()


def test_who_does_not_know_the_token_is_sent_away() -> None:
    ticket, first = SocketCommunicator.open(2)
    stranger = SocketCommunicator.join(ticket.replace(b'"token":"', b'"token":"x'), rank=1, size=2)
    member = SocketCommunicator.join(ticket, rank=1, size=2)
    with ThreadPoolExecutor(3) as threads:
        sums = [threads.submit(each.all_reduce, np.ones(1)) for each in (first, member)]
        assert [float(each.result()[0]) for each in sums] == [2, 2]
        with pytest.raises(GroupBroken):
            stranger.barrier()
    for each in (stranger, member, first):
        each.close()


def test_who_shows_a_token_beyond_ascii_is_sent_away() -> None:
    ticket, first = SocketCommunicator.open(2)
    socket_file = Path(json.loads(ticket)["address"]["unix_path"])
    stranger = SocketCommunicator.join(ticket.replace(b'"token":"', '"token":"é'.encode()), rank=1, size=2)
    member = SocketCommunicator.join(ticket, rank=1, size=2)
    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(each.barrier) for each in (first, member)]:
            each.result()
    for each in (stranger, member, first):
        each.close()
    assert not socket_file.parent.exists()


def test_a_group_that_nobody_joins_leaves_no_socket() -> None:
    ticket, first = SocketCommunicator.open(2)
    socket_file = Path(json.loads(ticket)["address"]["unix_path"])
    assert socket_file.exists()
    first.abort(RuntimeError("rank 1 has died"))
    first.close()
    assert not socket_file.parent.exists()


def test_different_collectives_are_an_error_that_lists_them() -> None:
    def work(communicator: Communicator) -> None:
        if communicator.rank == 0:
            communicator.all_reduce(np.zeros(3, np.float32))
        else:
            communicator.all_gather(np.zeros(3, np.float32), axis=0)

    first, second = run(2, work)
    assert "rank 0: all_reduce of float32 [3]; rank 1: all_gather(axis=0) of float32 [3]" in str(first)
    assert isinstance(second, GroupBroken)
