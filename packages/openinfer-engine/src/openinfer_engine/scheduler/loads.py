"""`Loads`: sequences whose prefix comes from KV tiers, from their admission until they run.

    admitted ── begin ──► loading ── its load ends ──► ready ──► running, behind what has landed
                             │                           │
                             └──────── give up ──────────┴──► preempted or finished

A loading sequence has its slot and all its blocks, as if it ran; others are planned meanwhile. What did not land is
computed. A load that is given up keeps the sequence's blocks until no copy touches them (`settle`).
"""

from openinfer_engine.kv_tiers.port import TierPort
from openinfer_engine.scheduler.sequence import Sequence


class Loads:
    """Loads of one pool's sequences, by `Sequence.load`."""

    def __init__(self, port: TierPort, *, block_size_tokens: int) -> None:
        self._port = port
        self._block_tokens = block_size_tokens
        self.sequences: list[Sequence] = []
        """Loading or ready, in order of admission."""
        self.given_up: list[Sequence] = []
        """Loading no more, their blocks not given back yet."""
        self.loaded_tokens = 0

    @property
    def is_ending(self) -> bool:
        """Whether blocks of a load that was given up come back soon."""
        return bool(self.given_up)

    def begin(self, sequence: Sequence, cached_tokens: int) -> bool:
        """Asks the tiers for what a sequence with reserved blocks would compute; whether anything is on its way."""
        kv, begin = sequence.kv, cached_tokens // self._block_tokens
        digests = kv.matchable_digests()[begin:]
        move = self._port.load(digests, kv.blocks[begin : begin + len(digests)])
        if move is None:
            return False
        sequence.load = move
        self.sequences.append(sequence)
        return True

    def take_ready(self) -> tuple[Sequence, int] | None:
        """The first sequence whose load is over, with the tokens whose KV is there; None while none is."""
        for place, sequence in enumerate(self.sequences):
            if sequence.load is not None and sequence.load.is_over():
                del self.sequences[place]
                return sequence, self._seal(sequence)
        return None

    def give_up(self, sequence: Sequence) -> None:
        """Cancels the load of a sequence, which stops loading; its blocks are given back when the copy has ended."""
        self.sequences.remove(sequence)
        if sequence.load is not None:
            sequence.load.cancel()
        self.given_up.append(sequence)

    def settle(self) -> list[Sequence]:
        """Sequences that were given up and whose blocks nothing touches any more; what had landed is kept."""
        over = [sequence for sequence in self.given_up if sequence.load is None or sequence.load.is_over()]
        if over:
            self.given_up = [sequence for sequence in self.given_up if sequence not in over]
        for sequence in over:
            self._seal(sequence)
        return over

    def _seal(self, sequence: Sequence) -> int:
        """Makes what has landed part of the prefix cache."""
        kv, move = sequence.kv, sequence.load
        landed_tokens = 0 if move is None else move.landed_blocks * self._block_tokens
        tokens = kv.num_sealed_blocks * self._block_tokens + landed_tokens
        kv.seal(tokens)
        sequence.load = None
        self.loaded_tokens += landed_tokens
        return tokens
