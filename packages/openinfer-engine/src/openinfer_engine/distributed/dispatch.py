"""How rows of data-parallel ranks reach the experts that they chose, on other ranks too, and their sums come back.

    host     counts of chosen rows exchanged, then one all-to-all of these rows, and one of their sums     `ChosenRows`
    GPUs     one kernel each way: a row's ids say whether it comes, so that no host waits for counts       `DeviceRows`
             where GPUs cannot reach each other's memory: all rows gathered, and sums scattered, through NCCL

A row's sum is added up in float32 in the order of ranks, whichever way it went. A rank has its own shared experts'
part of its own rows, which goes nowhere. On a host it is added last, so that a row's bits are the same on every rank:
which one has a request depends on the others. On GPUs it is part of the rank's own sum.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from openinfer_engine.distributed.communicator import Communicator, QueuesTogether
from openinfer_kernels import Array, ExpertChoice, HostArray, Ops

ComputeExperts = Callable[[Array, ExpertChoice, Array], Array]
"""`[R, h]` float32: what a rank's experts make of rows `[R, h]`, given their choices and, in the order of rows, what
shared experts made of them."""


class SharedStep(Protocol):
    """The step of all ranks."""

    @property
    def counts(self) -> Sequence[int]:
        """Tokens of each rank."""
        ...

    @property
    def is_rehearsal(self) -> bool:
        """Whether nothing is exchanged."""
        ...


class RowExchange(Protocol):
    """Brings rows to other GPUs' experts, and their sums back: `openinfer_kernels.cuda.comm.expert_rows.ExpertRows`."""

    def fits(self, rows: Array, choice: ExpertChoice) -> bool: ...

    def dispatch(
        self, rows: Array, choice: ExpertChoice, *, shared: Array, places: int, experts: int
    ) -> tuple[Array, Array, Array, Array]: ...

    def combine(self, parts: Array, all_ids: Array, *, tokens: int, experts: int) -> Array: ...


@runtime_checkable
class ExchangesRows(Protocol):
    """A `Communicator` of GPUs, for whose counts a host would have to wait."""

    def row_exchange(self) -> AbstractContextManager[RowExchange | None]:
        """None where they cannot reach each other's memory; on every rank the same."""
        ...


class GroupEnd:
    """A rank's end of the group that experts are dealt out to."""

    def __init__(self, others: Communicator) -> None:
        self._others = others

    @property
    def rank(self) -> int:
        return self._others.rank

    @property
    def size(self) -> int:
        return self._others.size


class ChosenRows(GroupEnd):
    """Of ranks on a host: each row goes to the ranks that have experts which it chose, and to no other."""

    def __init__(self, step: SharedStep, others: Communicator) -> None:
        super().__init__(others)
        self._step = step

    def apply(
        self, compute: ComputeExperts, rows: HostArray, choice: ExpertChoice, *, shared: HostArray, num_experts: int
    ) -> HostArray:
        if self._step.is_rehearsal:
            return compute(rows, choice, shared)
        chosen = self._chosen(choice.ids, num_experts)
        most, tokens = self._most(chosen), len(rows)
        if not most:
            return compute(rows, choice, shared)
        brought = self._others.all_to_all(self._pieces(rows, chosen, most, padding=0))
        ids = self._others.all_to_all(self._pieces(choice.ids, chosen, most, padding=-1))
        weights = self._others.all_to_all(self._pieces(choice.weights, chosen, most, padding=0))
        # This rank's rows first, then those that came, of each rank as many places.
        parts = compute(
            _joined(rows, brought),
            replace(choice, ids=_joined(choice.ids, ids), weights=_joined(choice.weights, weights)),
            np.zeros((tokens + self.size * most, shared.shape[1]), shared.dtype),
        )
        returned = self._others.all_to_all(parts[tokens:].reshape(self.size, most, parts.shape[1]))
        total = np.zeros((tokens, parts.shape[1]), parts.dtype)
        for rank, sent in enumerate(chosen):
            if rank == self.rank:
                total += parts[:tokens]
            else:
                total[sent] += returned[rank, : len(sent)]
        return total + shared

    def _chosen(self, ids: HostArray, num_experts: int) -> Sequence[HostArray]:
        """The rows that each other rank gets, in their order."""
        ranks = np.where(ids >= 0, ids // num_experts, -1)
        return [
            np.flatnonzero((ranks == rank).any(axis=1)) if rank != self.rank else np.empty(0, np.intp)
            for rank in range(self.size)
        ]

    def _most(self, chosen: Sequence[HostArray]) -> int:
        """Rows of the pair of ranks that has most, which all pieces have places for."""
        counts = np.asarray([[len(each) for each in chosen]], np.int64)
        return int(self._others.all_gather(counts, axis=0).max())

    def _pieces(self, array: HostArray, chosen: Sequence[HostArray], most: int, *, padding: int) -> HostArray:
        pieces = np.full((self.size, most, *array.shape[1:]), padding, array.dtype)
        for piece, sent in zip(pieces, chosen, strict=True):
            piece[: len(sent)] = array[sent]
        return pieces


class DeviceRows(GroupEnd):
    """Of ranks on GPUs: row `t` of rank `r` has place `t` of `r` on every rank, as many places as the most rows."""

    def __init__(self, step: SharedStep, others: Communicator, peers: ExchangesRows, ops: Ops) -> None:
        super().__init__(others)
        self._step = step
        self._peers = peers
        self._ops = ops
        self._padding: dict[int, Array] = {}

    def apply(
        self, compute: ComputeExperts, rows: Array, choice: ExpertChoice, *, shared: Array, num_experts: int
    ) -> Array:
        if self._step.is_rehearsal:
            placed = replace(choice, ids=self._placed(choice.ids), weights=self._placed(choice.weights))
            return self._own(compute(self._placed(rows), placed, self._placed(shared)))
        with self._peers.row_exchange() as exchange:
            if exchange is not None and exchange.fits(rows, choice):
                brought, ids, weights, placed = exchange.dispatch(
                    rows, choice, shared=shared, places=self._places, experts=num_experts
                )
                parts = compute(brought, replace(choice, ids=ids, weights=weights), placed)
                return exchange.combine(parts, ids, tokens=len(rows), experts=num_experts)
        return self._gathered(compute, rows, choice, shared)

    def _gathered(self, compute: ComputeExperts, rows: Array, choice: ExpertChoice, shared: Array) -> Array:
        with self._others.together() if isinstance(self._others, QueuesTogether) else nullcontext():
            ids = self._gather(choice.ids, padding=-1)
            weights, gathered = self._gather(choice.weights), self._gather(rows)
        parts = compute(gathered, replace(choice, ids=ids, weights=weights), self._placed(shared))
        return self._others.reduce_scatter(parts, axis=0)[: self._step.counts[self.rank]]

    def _gather(self, rows: Array, *, padding: int = 0) -> Array:
        """`[R, ...]`, the rows of all ranks; places that a rank does not use are `padding`."""
        return self._others.all_gather(self._padded(rows, padding), axis=0)

    def _placed(self, rows: Array) -> Array:
        """`[R, ...]`, zeros but for this rank's rows."""
        placed = self._ops.zeros((self.size * self._places, *rows.shape[1:]), rows.dtype)
        begin = self.rank * self._places
        if len(rows):
            placed[begin : begin + len(rows)] = rows
        return placed

    def _own(self, parts: Array) -> Array:
        begin = self.rank * self._places
        return parts[begin : begin + self._step.counts[self.rank]]

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


def _joined(own: HostArray, brought: HostArray) -> HostArray:
    return np.concatenate([own, brought.reshape(-1, *own.shape[1:])])
