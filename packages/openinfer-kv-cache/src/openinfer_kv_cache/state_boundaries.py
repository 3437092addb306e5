"""`StateBoundaries`: what a listener hears of a model with recurrent states: prefixes that a sequence can begin on.

    blocks   b0 ── b1 ── b2 ── b3        sealed, in the pool
    states             ▲                  kept after b1
    told     b0    b1                     b2 and b3 are of no use yet

A block is told of while a copy of the states is kept after it, or after a block that follows it in the pool. It is
removed when the last of these copies is given up, or the block, or one between the two.
"""

from array import array
from collections.abc import Sequence
from typing import Protocol

from openinfer_kv_cache.digest import Digest
from openinfer_kv_cache.listener import BlockListener, StoredBlocks


class StateListener(Protocol):
    """Hears after which prefixes copies of recurrent states can be found, on the thread of their pool."""

    def kept(self, digest: Digest) -> None: ...

    def given_up(self, digest: Digest) -> None: ...


class _Block:
    __slots__ = ("blocks", "is_told", "num_states", "parent", "token_ids")

    def __init__(self, blocks: StoredBlocks, parent: Digest | None, token_ids: "array[int]") -> None:
        self.blocks = blocks  # for the names that its chain depends on
        self.parent = parent
        self.token_ids = token_ids
        self.num_states = 0  # copies after it, or after blocks that follow it
        self.is_told = False


class StateBoundaries:
    """A `BlockListener` and a `StateListener`, of one block table, before another listener."""

    def __init__(self, listener: BlockListener) -> None:
        self._listener = listener
        self._blocks: dict[Digest, _Block] = {}
        self._children: dict[Digest, set[Digest]] = {}
        self._states: set[Digest] = set()

    def stored(self, blocks: StoredBlocks) -> None:
        size = len(blocks.token_ids) // len(blocks.digests)
        parent = blocks.parent
        for place, digest in enumerate(blocks.digests):
            token_ids = blocks.token_ids[place * size : (place + 1) * size]
            self._blocks[digest] = _Block(blocks, parent, token_ids)
            if parent is not None:
                self._children.setdefault(parent, set()).add(digest)
            parent = digest
            # Blocks after one that comes back may have outlived it, and their states count for it again.
            after = sum(self._blocks[child].num_states for child in self._children.get(digest, ()))
            self._add(digest, after + (digest in self._states))

    def removed(self, digests: Sequence[Digest]) -> None:
        gone: list[Digest] = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                continue  # it was never told of: events are advice, and do not end an engine
            gone += [digest] if block.is_told else []
            block.is_told = False
            gone += self._add(digest, -block.num_states)
            del self._blocks[digest]
            if block.parent is not None:
                self._leave(block.parent, digest)
        self._tell_removed(gone)

    def cleared(self) -> None:
        self._blocks.clear()
        self._children.clear()
        self._states.clear()
        self._listener.cleared()

    def kept(self, digest: Digest) -> None:
        self._states.add(digest)
        if digest in self._blocks:
            self._add(digest, 1)

    def given_up(self, digest: Digest) -> None:
        self._states.discard(digest)
        if digest in self._blocks:
            self._tell_removed(self._add(digest, -1))

    def _add(self, digest: Digest, num_states: int) -> list[Digest]:
        """Counts copies for a block and those before it; tells of what is of use now, returns what no longer is."""
        fresh: list[Digest] = []
        gone: list[Digest] = []
        each: Digest | None = digest
        while num_states and each is not None and (block := self._blocks.get(each)) is not None:
            block.num_states += num_states
            if block.num_states and not block.is_told:
                fresh.append(each)
            elif not block.num_states and block.is_told:
                block.is_told = False
                gone.append(each)
            each = block.parent
        self._tell_stored(fresh[::-1])
        return gone

    def _tell_stored(self, digests: Sequence[Digest]) -> None:
        if not digests:
            return
        blocks = [self._blocks[digest] for digest in digests]
        token_ids = array("I")
        for block in blocks:
            block.is_told = True
            token_ids += block.token_ids
        told = blocks[0].blocks._replace(parent=blocks[0].parent, digests=list(digests), token_ids=token_ids)
        self._listener.stored(told)

    def _tell_removed(self, digests: Sequence[Digest]) -> None:
        if digests:
            self._listener.removed(digests)

    def _leave(self, parent: Digest, digest: Digest) -> None:
        children = self._children[parent]
        children.discard(digest)
        if not children:
            del self._children[parent]
