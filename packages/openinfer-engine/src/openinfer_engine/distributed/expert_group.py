"""How the ranks of an engine share the experts of a layer, whatever they do with its attention.

    tensor parallel     every rank has the same rows: each computes its experts' part of them, and the parts are added
    data parallel       every rank has rows of its own:  gather ─► its experts' part of all ranks' rows ─► combine

`expert_group` gives a model one of the two, so that it need not ask which. Rows of data-parallel ranks are gathered
whole and their sums scattered: each rank sends its rows to all others, whichever experts they chose. That moves more
than an all-to-all of chosen rows where ranks are many (a row has `k` experts, so more than `k` ranks); its sums are the
ones of tensor parallelism, in the order of ranks.

A step that is replayed from a graph has the graph's number of places on every rank, whatever its rows are.
"""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, runtime_checkable

import numpy as np

from openinfer_engine.distributed.communicator import Communicator, QueuesTogether, SoloCommunicator
from openinfer_kernels import Array, Ops


class ExpertGroup(Protocol):
    """One rank's end of the group that experts are dealt out to. All ranks call the same, in the same order."""

    @property
    def rank(self) -> int:
        """This rank, which has the `rank`-th of `size` equal shares of the experts."""
        ...

    @property
    def size(self) -> int: ...

    def gather(self, rows: Array, *, padding: int = 0) -> Array:
        """`[R, ...]`, the rows of all ranks in order of ranks, for this rank's `rows [T, ...]`.

        Each rank has as many places as the rank with most rows; those that it does not use are `padding`. Takes over
        `rows`, as a `Communicator` does.
        """
        ...

    def together(self) -> AbstractContextManager[None]:
        """What is gathered within it is there after it, and costs less than one after the other."""
        ...

    def place(self, rows: Array) -> Array:
        """`[R, ...]`, zeros but for this rank's `rows [T, ...]` at their places in what `gather` returns."""
        ...

    def combine(self, rows: Array) -> Array:
        """This rank's `[T, ...]` of the sum over all ranks of `rows [R, ...]`, in the order of ranks."""
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


class SharedRows:
    """Of ranks that have all rows, each."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    @property
    def rank(self) -> int:
        return self._communicator.rank

    @property
    def size(self) -> int:
        return self._communicator.size

    def gather(self, rows: Array, *, padding: int = 0) -> Array:
        del padding
        return rows

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def place(self, rows: Array) -> Array:
        return rows

    def combine(self, rows: Array) -> Array:
        return self._communicator.all_reduce(rows)


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
        """What is gathered from now on are the rows of a step in which the ranks have `counts` tokens.

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

        What a GPU loads and measures when it first runs something may wait for its stream. In one process that can hold
        up the other ranks' launches, which the stream's collectives wait for; so it happens where there are none.
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
        return GatheredRows(self, self._others, ops)

    def abort(self, error: BaseException) -> None:
        for each in self._group:
            each.abort(error)

    def close(self) -> None:
        self._others.close()


class GatheredRows:
    """Of ranks that have rows of their own."""

    def __init__(self, step: DataParallelCommunicator, others: Communicator, ops: Ops) -> None:
        self._step = step
        self._others = others
        self._ops = ops
        self._padding: dict[int, Array] = {}

    @property
    def rank(self) -> int:
        return self._others.rank

    @property
    def size(self) -> int:
        return self._others.size

    def gather(self, rows: Array, *, padding: int = 0) -> Array:
        padded = self._padded(rows, padding)
        return self.place(padded) if self._step.is_rehearsal else self._others.all_gather(padded, axis=0)

    def together(self) -> AbstractContextManager[None]:
        if self._step.is_rehearsal or not isinstance(self._others, QueuesTogether):
            return nullcontext()
        return self._others.together()

    def place(self, rows: Array) -> Array:
        placed = self._ops.zeros((self.size * self._places, *rows.shape[1:]), rows.dtype)
        begin = self.rank * self._places
        if len(rows):
            placed[begin : begin + len(rows)] = rows
        return placed

    def combine(self, rows: Array) -> Array:
        begin, count = self.rank * self._places, self._step.counts[self.rank]
        if self._step.is_rehearsal:
            return rows[begin : begin + count]
        return self._others.reduce_scatter(rows, axis=0)[:count]

    @property
    def _places(self) -> int:
        return max(self._step.counts)

    def _padded(self, rows: Array, padding: int) -> Array:
        """The rows themselves where they fill all places, as in a graph; copies of whole arrays else, no kernels."""
        missing = self._places - len(rows)
        if not missing:
            return rows
        padded = self._ops.zeros((self._places, *rows.shape[1:]), rows.dtype)
        if len(rows):
            padded[: len(rows)] = rows
        if padding:
            padded[len(rows) :] = self._padding_rows(padding, missing, rows)
        return padded

    def _padding_rows(self, padding: int, count: int, like: Array) -> Array:
        kept = self._padding.get(padding)
        if kept is None or len(kept) < count or kept.shape[1:] != like.shape[1:] or kept.dtype != like.dtype:
            kept = self._ops.upload(np.full((count, *like.shape[1:]), padding, like.dtype))
            self._padding[padding] = kept
        return kept[:count]
