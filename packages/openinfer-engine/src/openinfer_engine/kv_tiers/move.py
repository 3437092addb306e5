"""`BlockMove`: neighbouring blocks of one chain on their way, in pieces that a tier moves side by side."""

from collections.abc import Sequence

from openinfer_kv_cache import Transfer, TransferState


class BlockMove:
    """Transfers of one load or save. Until `is_over` its blocks are the tier's: hold them.

    Args:
        pieces: in the order of their blocks.
        num_blocks: of all of them.
        begin_s: when it began, on the caller's clock.
    """

    __slots__ = ("_open", "_pieces", "begin_s", "num_blocks")

    def __init__(self, pieces: Sequence[Transfer], *, num_blocks: int, begin_s: float) -> None:
        self._pieces = pieces
        self._open = list(pieces)
        self.num_blocks = num_blocks
        self.begin_s = begin_s

    def is_over(self) -> bool:
        """Whether no piece is pending; what follows a piece that fell short is cancelled, as it is of no use."""
        still_open = [piece for piece in self._open if piece.poll() is TransferState.PENDING]
        if len(still_open) < len(self._open) and still_open and self._has_fallen_short():
            for piece in still_open:
                piece.cancel()
        self._open = still_open
        return not still_open

    @property
    def landed_blocks(self) -> int:
        """Of a load that is over, how many leading blocks hold their right bytes."""
        landed = 0
        for piece in self._pieces:
            landed += piece.landed_blocks
            if piece.landed_blocks < piece.num_blocks:
                break
        return landed

    def cancel(self) -> None:
        """Asks for an early end; it is over once no copy touches its blocks."""
        for piece in self._open:
            piece.cancel()

    def wait(self, timeout_s: float) -> None:
        """Waits for a piece that is pending, at most so long."""
        if self._open:
            self._open[0].wait(timeout_s)

    def _has_fallen_short(self) -> bool:
        return any(piece.poll() in (TransferState.SHORT, TransferState.CANCELLED) for piece in self._pieces)
