"""What is on its way between a pool and tiers: `ChunkedTransfer` of one rank, `RankedTransfer` of all."""

from collections.abc import Sequence

from openinfer_engine.tracing.trace import TIERS, Span, Tracer
from openinfer_kv_cache import TierTransfer, Transfer, TransferState


class ChunkedTransfer:
    """Neighbouring blocks of one chain, in chunks that a tier transfers side by side."""

    __slots__ = ("_chunks", "_open", "begin_s", "num_blocks")

    def __init__(self, chunks: Sequence[Transfer], *, num_blocks: int, begin_s: float) -> None:
        self._chunks = chunks
        self._open = list(chunks)
        self.num_blocks = num_blocks
        self.begin_s = begin_s

    def is_over(self) -> bool:
        still_open = [chunk for chunk in self._open if chunk.poll() is TransferState.PENDING]
        if still_open and len(still_open) < len(self._open):
            self._cancel_after_gap()
        self._open = still_open
        return not still_open

    @property
    def completed_blocks(self) -> int:
        completed = 0
        for chunk in self._chunks:
            completed += chunk.completed_blocks
            if chunk.completed_blocks < chunk.num_blocks:
                break
        return completed

    def cancel(self) -> None:
        for chunk in self._open:
            chunk.cancel()

    def wait(self, timeout_s: float) -> None:
        if self._open:
            self._open[0].wait(timeout_s)

    def _cancel_after_gap(self) -> None:
        """What comes after a chunk that has ended without all its blocks is of no use; what comes before it is."""
        has_gap = False
        for chunk in self._chunks:
            state = chunk.poll()
            if state is not TransferState.PENDING:
                has_gap |= state is not TransferState.COMPLETED
            elif has_gap:
                chunk.cancel()


class RankedTransfer:
    """The same blocks on every rank, rank 0 first, each of which has a share of them; what one lacks, none has."""

    __slots__ = ("_pending", "_shares", "begin_s", "num_blocks")

    def __init__(self, shares: Sequence[TierTransfer]) -> None:
        self._shares = shares
        self._pending = list(shares)
        self.num_blocks = shares[0].num_blocks
        self.begin_s = shares[0].begin_s

    def is_over(self) -> bool:
        before, self._pending = self._pending, [share for share in self._pending if not share.is_over()]
        ended = [share for share in before if share not in self._pending]
        if any(share.completed_blocks < self.num_blocks for share in ended):
            self.cancel()  # what one rank lacks is of no use on the others
        return not self._pending

    @property
    def completed_blocks(self) -> int:
        return min(share.completed_blocks for share in self._shares)

    def cancel(self) -> None:
        for share in self._pending:
            share.cancel()

    def wait(self, timeout_s: float) -> None:
        if self._pending:
            self._pending[0].wait(timeout_s)


class TracedTransfer:
    """A transfer that tells a tracer how long it was on its way, until the scheduler saw that it is over."""

    __slots__ = ("_begin_s", "_name", "_tracer", "_transfer")

    def __init__(self, transfer: TierTransfer, name: str, tracer: Tracer) -> None:
        self._transfer = transfer
        self._name = name
        self._tracer: Tracer | None = tracer
        self._begin_s = tracer.clock()

    @property
    def num_blocks(self) -> int:
        return self._transfer.num_blocks

    @property
    def begin_s(self) -> float:
        return self._transfer.begin_s

    @property
    def completed_blocks(self) -> int:
        return self._transfer.completed_blocks

    def is_over(self) -> bool:
        is_over = self._transfer.is_over()
        tracer = self._tracer
        if is_over and tracer is not None:
            self._tracer = None
            details = {"blocks": self.num_blocks, "completed": self.completed_blocks}
            tracer.add(Span(TIERS, self._name, self._begin_s, tracer.clock(), details))
        return is_over

    def cancel(self) -> None:
        self._transfer.cancel()

    def wait(self, timeout_s: float) -> None:
        self._transfer.wait(timeout_s)
