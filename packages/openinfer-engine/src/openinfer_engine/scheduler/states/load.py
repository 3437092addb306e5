"""`StateLoad`: a prefix of a model with recurrent states on its way from KV tiers: blocks, and states after them."""

from openinfer_kv_cache import StateSlotCopy, TierTransfer


class StateLoad:
    """Both have to complete; where one is partial, the other is cancelled. Until `is_over` the blocks are the tiers'.

    Args:
        end_tokens: the boundary that it brings a sequence to.
        cached_tokens: where the sequence could begin without it.
        copy: of the snapshot that the sequence will begin on: a load, or a hold if the states are there.
        blocks: that are missing before the boundary; None if there is none, or the tiers gave none.
        num_blocks: of them, how many are needed.
        states: the chunks of the states; None as for blocks.
        num_chunks: of them, how many are needed.
    """

    __slots__ = ("_blocks", "_num_blocks", "_num_chunks", "_states", "cached_tokens", "copy", "end_tokens")

    def __init__(
        self,
        *,
        end_tokens: int,
        cached_tokens: int,
        copy: StateSlotCopy,
        blocks: TierTransfer | None,
        num_blocks: int,
        states: TierTransfer | None,
        num_chunks: int,
    ) -> None:
        self.end_tokens = end_tokens
        self.cached_tokens = cached_tokens
        self.copy = copy
        self._blocks = blocks
        self._num_blocks = num_blocks
        self._states = states
        self._num_chunks = num_chunks

    def is_over(self) -> bool:
        """Whether no copy touches the blocks and the snapshot any more."""
        pending = [transfer for transfer in self._transfers if not transfer.is_over()]
        if pending and any(
            transfer.completed_blocks < transfer.num_blocks for transfer in self._transfers if transfer not in pending
        ):
            self.cancel()
        return not pending

    @property
    def completed_blocks(self) -> int:
        """How many leading blocks hold their right bytes, once the load is over."""
        return _completed(self._blocks)

    @property
    def are_states_complete(self) -> bool:
        return _completed(self._states) == self._num_chunks

    @property
    def is_complete(self) -> bool:
        """Whether the sequence can begin at the boundary, once the load is over."""
        return self.completed_blocks == self._num_blocks and self.are_states_complete

    def cancel(self) -> None:
        for transfer in self._transfers:
            transfer.cancel()

    @property
    def _transfers(self) -> list[TierTransfer]:
        return [transfer for transfer in (self._blocks, self._states) if transfer is not None]


def _completed(transfer: TierTransfer | None) -> int:
    return 0 if transfer is None else transfer.completed_blocks
