"""`LocalGroup`: ranks as threads of one process, over NumPy arrays; the CPU's way to run and test several ranks.

A collective is two meetings of all ranks:

    offer my array ─► meet ─► read all ranks' arrays, compute my result ─► meet ─► return

After the first, all arrays can be read; until the second, none may be changed. A rank that waits sleeps on a
condition; it is woken when the last rank arrives or when the group breaks.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.host_collectives import HostCollective, Offer, check_alike
from openinfer_engine.distributed.host_communicator import HostCommunicator
from openinfer_engine.errors import GroupBroken
from openinfer_kernels import HostArray

Result = TypeVar("Result")


class LocalGroup:
    """Ranks that share this process, each called from a thread of its own."""

    def __init__(self, size: int, *, nodes: Sequence[int] | None = None) -> None:
        """With `nodes`, sums are those of ranks on these nodes."""
        if size < 1:
            raise ValueError(f"a group needs at least one rank, not {size}")
        self._meeting = _Meeting(size)
        self._members = tuple(LocalCommunicator(rank, self._meeting, nodes=nodes) for rank in range(size))

    @property
    def communicators(self) -> "Sequence[LocalCommunicator]":
        return self._members

    def run(self, work: Callable[[Communicator], Result]) -> list[Result]:
        """Calls `work` once per rank, each in a thread, and returns what they returned in order of ranks.

        May be called again, unless the group is broken.

        Raises:
            Exception: what the first rank that failed raised; the group is broken then.
        """
        self._meeting.reopen()
        with ThreadPoolExecutor(len(self._members), thread_name_prefix="openinfer-rank") as threads:
            futures = [threads.submit(_take_part, member, work) for member in self._members]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        # The error of the rank that failed, rather than the `GroupBroken` that it caused in others.
        for error in errors:
            if not isinstance(error, GroupBroken):
                raise error
        return [future.result() for future in futures]


class LocalCommunicator(HostCommunicator):
    """One rank of a `LocalGroup`."""

    def __init__(self, rank: int, meeting: "_Meeting", *, nodes: Sequence[int] | None = None) -> None:
        super().__init__(rank, meeting.size, nodes=nodes)
        self._meeting = meeting

    def abort(self, error: BaseException) -> None:
        self._meeting.break_up(f"rank {self._rank} failed: {type(error).__name__}: {error}", error)

    def leave(self) -> None:
        """This rank takes part in no further collective; a rank that waits for it, now or later, gets `GroupBroken`."""
        self._meeting.leave(self._rank)

    def close(self) -> None:
        pass

    def _exchange(self, collective: HostCollective, array: HostArray) -> HostArray:
        offers = self._meeting.offer(self._rank, Offer(collective.name, array))
        try:
            check_alike(offers)
            result = collective.combine([offer.array for offer in offers], self._rank)
        except BaseException as error:
            self.abort(error)
            raise
        # Until all have read: the caller may change its array after this.
        self._meeting.wait()
        return result


class _Meeting:
    """Where the ranks of a group wait for each other. All state is guarded by one condition."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._offers: list[Offer | None] = [None] * size
        self._arrived = 0
        self._round = 0
        self._left: set[int] = set()
        self._broken: tuple[str, BaseException | None] | None = None

    def offer(self, rank: int, offer: Offer) -> list[Offer]:
        """Waits for all ranks' offers and returns them in order; they stay as they are until all have called `wait`."""
        with self._changed:
            self._check()
            self._offers[rank] = offer
        self.wait()
        return [each for each in self._offers if each is not None]

    def wait(self) -> None:
        """Returns once all ranks have called it.

        Raises:
            GroupBroken: that will never happen.
        """
        with self._changed:
            if self._left:
                self._break(_left(self._left), None)
            self._check()
            this_round = self._round
            self._arrived += 1
            if self._arrived == self.size:
                self._arrived = 0
                self._round += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._round != this_round or self._broken is not None)
            # A group that breaks after the round was complete has still given its result.
            if self._round == this_round:
                self._check()

    def reopen(self) -> None:
        with self._changed:
            self._left.clear()

    def leave(self, rank: int) -> None:
        with self._changed:
            self._left.add(rank)
            # Ranks that wait already would wait for this one forever.
            if self._arrived:
                self._break(_left(self._left), None)

    def break_up(self, reason: str, cause: BaseException | None) -> None:
        with self._changed:
            self._break(reason, cause)

    def _break(self, reason: str, cause: BaseException | None) -> None:
        if self._broken is None:
            self._broken = (reason, cause)
            self._changed.notify_all()

    def _check(self) -> None:
        if self._broken is not None:
            reason, cause = self._broken
            raise GroupBroken(f"the group of {self.size} ranks is broken: {reason}") from cause


def _take_part(member: LocalCommunicator, work: Callable[[Communicator], Result]) -> Result:
    try:
        result = work(member)
    except BaseException as error:
        member.abort(error)
        raise
    member.leave()
    return result


def _left(ranks: set[int]) -> str:
    return f"rank {', '.join(map(str, sorted(ranks)))} has left while others wait for a collective"
