"""How the ranks of an engine share the experts of a layer, whatever they do with its attention.

    tensor parallel     every rank has the same rows: each computes its experts' part of them, and the parts are added
    data parallel       every rank has rows of its own:  dispatch ─► its experts' part of all ranks' rows ─► combine

`expert_group` gives a model one of the two, so that it need not ask which; `dispatch.py` has the second. Its sums are
the ones of tensor parallelism, in the order of ranks.

A step that is replayed from a graph has the graph's number of places on every rank, whatever its rows are.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from openinfer_engine.distributed.communicator import Communicator, SoloCommunicator
from openinfer_engine.distributed.dispatch import ChosenRows, ComputeExperts, DeviceRows, ExchangesRows, GroupEnd
from openinfer_kernels import Array, ExpertChoice, Ops


class ExpertGroup(Protocol):
    """One rank's end of the group that experts are dealt out to. All ranks call the same, in the same order."""

    @property
    def rank(self) -> int:
        """This rank, which has the `rank`-th of `size` equal shares of the experts."""
        ...

    @property
    def size(self) -> int: ...

    def apply(
        self, compute: ComputeExperts, rows: Array, choice: ExpertChoice, *, shared: Array, num_experts: int
    ) -> Array:
        """`[T, h]` float32 for this rank's `rows [T, h]`: the sum over all ranks of what `compute` gives, in order.

        Args:
            compute: called once, with the rows of all ranks that this one's experts are chosen for, or with more.
            rows: of this rank.
            choice: theirs.
            shared: `[T, h]`, what is added to them once, on this rank.
            num_experts: of each rank.
        """
        ...


@runtime_checkable
class DealsExperts(Protocol):
    """A `Communicator` of a rank whose experts are shared with other ranks than its attention is."""

    def expert_group(self, ops: Ops) -> ExpertGroup: ...


def expert_group(communicator: Communicator, ops: Ops) -> ExpertGroup:
    """The group in which a rank with this communicator shares experts."""
    return communicator.expert_group(ops) if isinstance(communicator, DealsExperts) else SharedRows(communicator)


def is_first(communicator: Communicator) -> bool:
    """Whether this is the first of all ranks of an engine."""
    if isinstance(communicator, DataParallelCommunicator):
        return communicator.data_parallel_rank == 0
    return communicator.rank == 0


class SharedRows(GroupEnd):
    """Of ranks that have all rows, each."""

    def apply(
        self, compute: ComputeExperts, rows: Array, choice: ExpertChoice, *, shared: Array, num_experts: int
    ) -> Array:
        del num_experts
        return self._others.all_reduce(compute(rows, choice, shared))


class DataParallelCommunicator(SoloCommunicator):
    """Of a data-parallel rank: alone with its attention, one of several with its experts.

    Args:
        others: this rank's end of the group of all data-parallel ranks, which is closed with it.
        group: the ends of all ranks, where they are threads of this process: a rank that fails aborts each of them.
    """

    def __init__(self, others: Communicator, group: Sequence[Communicator] = ()) -> None:
        self._others = others
        self._group = tuple(group) or (others,)
        self._counts: Sequence[int] = (0,) * others.size
        self._is_decode = False
        self._is_rehearsal = False

    @property
    def data_parallel_rank(self) -> int:
        return self._others.rank

    def begin_step(self, counts: Sequence[int], *, is_decode: bool = False) -> None:
        """What is exchanged from now on are the rows of a step in which the ranks have `counts` tokens.

        Args:
            counts: of each rank.
            is_decode: whether all ranks have rows of one token alone, which their slots sampled last.

        Raises:
            ValueError: there is not one count for each rank.
        """
        if len(counts) != self._others.size:
            raise ValueError(f"{len(counts)} counts are not those of {self._others.size} ranks")
        self._counts, self._is_decode = tuple(counts), is_decode

    @property
    def is_decode(self) -> bool:
        return self._is_decode

    @property
    def is_rehearsal(self) -> bool:
        return self._is_rehearsal

    @contextmanager
    def rehearsal(self) -> Generator[None]:
        """Within it nothing is exchanged: other ranks' rows are zeros.

        What a GPU loads and measures when it first runs something is so where no rank waits for another: products are
        measured without the wait.
        """
        self._is_rehearsal = True
        try:
            yield
        finally:
            self._is_rehearsal = False

    @property
    def counts(self) -> Sequence[int]:
        """Tokens of each rank in this step."""
        return self._counts

    def expert_group(self, ops: Ops) -> ExpertGroup:
        if isinstance(self._others, ExchangesRows):
            return DeviceRows(self, self._others, self._others, ops)
        return ChosenRows(self, self._others)

    def abort(self, error: BaseException) -> None:
        for each in self._group:
            each.abort(error)

    def close(self) -> None:
        self._others.close()
