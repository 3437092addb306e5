"""Hidden states at the ends of KV blocks, in the blocks themselves: a cached prefix has the one that a drafter needs.

    block of 16 tokens   [layers of the model, layers of the drafter, boundary layers]
                                                                      the first h numbers: hidden state of token 15

They lie there as if they were KV of further layers, so that whatever moves, shares or evicts a block takes them along.
For models without recurrent states; copies of these keep hidden states of their own (`DrafterRequirements.slots`).
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from openinfer_engine.drafters.contract import ObservedStep
from openinfer_kernels import Array, HostArray, Ops, PagedCache
from openinfer_kv_cache import PagedGroup


def boundary_group(like: PagedGroup, *, name: str, num_layers: int) -> PagedGroup:
    """Layers of the shape of a drafter's KV, as many as one hidden state takes in a block."""
    return msgspec.structs.replace(like, name=name, num_layers=num_layers, rope_tag="hidden state of the last token")


class BoundaryStates:
    """Keeps hidden states at the ends of blocks, and gives a slot that begins after one its state back.

    Args:
        last: `[slots, h]`, the hidden state before the next token of each sequence slot; written to.
        ops: of the device.
    """

    def __init__(self, last: Array, *, ops: Ops) -> None:
        self._last = last
        self._ops = ops
        self._begun: set[int] = set()
        self._caches: Sequence[PagedCache] = ()

    def attach(self, caches: Sequence[PagedCache]) -> None:
        """The layers of the group, which follow each other."""
        self._caches = caches

    def start(self, slots: Iterable[int]) -> None:
        """Sequences begin in these slots."""
        self._begun.update(slots)

    def restore(self, step: ObservedStep) -> None:
        """Before a step is taken in: slots that begin after a cached prefix get the hidden state at its end.

        A sequence that begins inside a block gets zeros: its drafts are a little worse there.
        """
        if not self._begun:
            return
        slots = self._ops.download(step.slots)
        rows = np.flatnonzero([slot in self._begun for slot in slots.tolist()])
        self._begun.difference_update(slots.tolist())
        begins = self._ops.download(step.batch.query_starts)[rows]
        positions = self._ops.download(step.batch.positions)[begins]
        self._last[self._ops.upload(slots[rows])] = 0
        at_end = (positions > 0) & (positions % step.batch.block_tokens == 0)
        rows, places = rows[at_end], positions[at_end] // step.batch.block_tokens - 1
        if len(rows):
            table = step.batch.block_tables[self._first.table]
            blocks = table[self._ops.upload(rows), self._ops.upload(places)]
            width = self._last.shape[1]
            kept = self._first.data[blocks, self._layers].reshape(len(rows), -1)[:, :width]
            self._last[self._ops.upload(slots[rows])] = kept

    def keep(self, step: ObservedStep, hidden: Array) -> None:
        """After a step: those of its `hidden [T, h]` whose token ends a block."""
        positions: HostArray = self._ops.download(step.batch.positions)
        tokens = np.flatnonzero((positions + 1) % step.batch.block_tokens == 0)
        if not len(tokens):
            return
        at = self._ops.upload(tokens)
        blocks = step.batch.cache_slots[self._first.table][at] // step.batch.block_tokens
        shape = (len(tokens), len(self._caches), *self._first.data.shape[2:])
        padded = self._ops.zeros((len(tokens), int(np.prod(shape[1:]))))
        padded[:, : hidden.shape[1]] = hidden[at]
        self._first.data[blocks, self._layers] = padded.reshape(shape)

    @property
    def _first(self) -> PagedCache:
        return self._caches[0]

    @property
    def _layers(self) -> slice:
        return slice(self._first.layer, self._first.layer + len(self._caches))
