"""`StateLoad`: a prefix of a model with recurrent states on its way from KV tiers: blocks, and states behind them."""

from openinfer_engine.kv_tiers.transfer import Move
from openinfer_kv_cache import StateSlotCopy


class StateLoad:
    """Both have to land; where one falls short, the other is cancelled. Until `is_over` the blocks are the tiers'.

    Args:
        end_tokens: the boundary that it brings a sequence to.
        cached_tokens: where the sequence could begin without it.
        copy: of the snapshot that the sequence will begin on: a load, or a hold if the states are there.
        blocks: that are missing before the boundary; None if there is none, or the tiers gave none.
        num_blocks: of them, how many are needed.
        states: the pieces of the states; None as for blocks.
        num_pieces: of them, how many are needed.
    """

    __slots__ = ("_blocks", "_num_blocks", "_num_pieces", "_states", "cached_tokens", "copy", "end_tokens")

    def __init__(
        self,
        *,
        end_tokens: int,
        cached_tokens: int,
        copy: StateSlotCopy,
        blocks: Move | None,
        num_blocks: int,
        states: Move | None,
        num_pieces: int,
    ) -> None:
        self.end_tokens = end_tokens
        self.cached_tokens = cached_tokens
        self.copy = copy
        self._blocks = blocks
        self._num_blocks = num_blocks
        self._states = states
        self._num_pieces = num_pieces

    def is_over(self) -> bool:
        """Whether no copy touches the blocks and the snapshot any more."""
        pending = [move for move in self._moves if not move.is_over()]
        if pending and any(move.completed_blocks < move.num_blocks for move in self._moves if move not in pending):
            self.cancel()
        return not pending

    @property
    def completed_blocks(self) -> int:
        """Of a load that is over, how many leading blocks hold their right bytes."""
        return _landed(self._blocks)

    @property
    def have_states_landed(self) -> bool:
        """Of a load that is over, whether the snapshot is whole."""
        return _landed(self._states) == self._num_pieces

    @property
    def has_landed(self) -> bool:
        """Of a load that is over, whether the sequence can begin at the boundary."""
        return self.completed_blocks == self._num_blocks and self.have_states_landed

    def cancel(self) -> None:
        """Asks for an early end."""
        for move in self._moves:
            move.cancel()

    @property
    def _moves(self) -> list[Move]:
        return [move for move in (self._blocks, self._states) if move is not None]


def _landed(move: Move | None) -> int:
    return 0 if move is None else move.completed_blocks
