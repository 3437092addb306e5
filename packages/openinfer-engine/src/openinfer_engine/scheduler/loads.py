"""`Loads`: sequences whose prefix comes from KV tiers, from their admission until they run.

    admitted ── begin ──► loading ── its load ends ──► ready ──► running, after what has completed
                             │                           │
                             └──────── give up ──────────┴──► preempted or finished

A loading sequence has its slot and all its blocks, as if it ran; others are planned meanwhile. What is not completed is
computed; where recurrent states are not, either, or what a window sees, the sequence begins anew on what is in the
pool. A load that is given up keeps the sequence's blocks until no copy touches them (`settle`).
"""

from openinfer_core.errors import ContractViolation
from openinfer_engine.scheduler.sequence import Sequence
from openinfer_engine.scheduler.states.load import StateLoad
from openinfer_engine.scheduler.states.snapshots import Snapshots
from openinfer_kv_cache import TableLoad, TierPort, begin_table_load


class Loads:
    """Loads of one pool's sequences, by `Sequence.load`."""

    def __init__(self, port: TierPort, *, block_size_tokens: int, snapshots: Snapshots | None = None) -> None:
        self._port = port
        self._snapshots = snapshots
        self._block_tokens = block_size_tokens
        self.sequences: list[Sequence] = []  # loading or ready, in order of admission
        self.given_up: list[Sequence] = []  # loading no more, their blocks not given back yet
        self.loaded_tokens = 0

    @property
    def is_ending(self) -> bool:
        return bool(self.given_up)

    def begin(self, sequence: Sequence) -> bool:
        """Asks the tiers for what a sequence with reserved blocks would compute; whether anything is on its way."""
        load = begin_table_load(self._port, sequence.kv)
        if load is not None:
            self.add(sequence, load)
        return load is not None

    def add(self, sequence: Sequence, load: TableLoad | StateLoad) -> None:
        sequence.load = load
        self.sequences.append(sequence)

    def take_ready(self) -> tuple[Sequence, int | None] | None:
        """The first sequence whose load is over, and the tokens after which it begins; None: it looks in the pool."""
        for place, sequence in enumerate(self.sequences):
            if sequence.load is not None and sequence.load.is_over():
                del self.sequences[place]
                return sequence, self._finish(sequence)
        return None

    def give_up(self, sequence: Sequence) -> None:
        """Cancels the load of a sequence, which stops loading; its blocks are given back when the copy has ended."""
        self.sequences.remove(sequence)
        if sequence.load is not None:
            sequence.load.cancel()
        self.given_up.append(sequence)

    def settle(self) -> list[Sequence]:
        """Sequences that were given up and whose blocks nothing touches any more; what had completed is kept."""
        over = [sequence for sequence in self.given_up if sequence.load is None or sequence.load.is_over()]
        if over:
            self.given_up = [sequence for sequence in self.given_up if sequence not in over]
        for sequence in over:
            self._finish(sequence)
        return over

    def _finish(self, sequence: Sequence) -> int | None:
        load, sequence.load = sequence.load, None
        if isinstance(load, StateLoad):
            sequence.kv.seal((sequence.kv.num_sealed_blocks + load.completed_blocks) * self._block_tokens)
            return self._end_states(load)
        if load is None:
            return None
        tokens = load.finish()
        self.loaded_tokens += load.loaded_tokens
        return tokens

    def _end_states(self, load: StateLoad) -> int | None:
        if self._snapshots is None:
            raise ContractViolation("recurrent states were loaded, and none are kept")
        self._snapshots.end(load.copy, good=load.are_states_complete)
        if not load.is_complete:
            return None
        self.loaded_tokens += load.end_tokens - load.cached_tokens
        return load.end_tokens
