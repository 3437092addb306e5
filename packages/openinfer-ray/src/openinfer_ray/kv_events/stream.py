"""`KvEventStream`: one replica's KV events, in their order, without what is missing or comes twice.

    hear(n) with n = next ─► applied, next = n + 1
            with n < next ─► known already
            with n > next ─► refused: what lies between has to be asked for, from `next_sequence` on
    replayed(batches)     ─► applied; where they begin later than asked for, all that was known is void

The messages are described in docs/reference/kv-events.md. Of a model with several block tables the first one's blocks
count alone.
"""

import logging
from collections.abc import Iterable
from typing import Annotated

import msgspec

from openinfer_ray.kv_events.told_prefixes import ToldPrefixes

logger = logging.getLogger("openinfer.engine")

_Hash = Annotated[int, msgspec.Meta(ge=0)]


class _Stored(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="BlockStored"):
    block_hashes: list[_Hash]
    parent: msgspec.Raw
    token_ids: msgspec.Raw  # not needed: digests are computed from prompts
    block_size: msgspec.Raw
    lora_id: msgspec.Raw
    medium: str | None
    lora_name: msgspec.Raw
    extra_keys: msgspec.Raw = msgspec.Raw()
    table: int = 0


class _Removed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: str | None
    table: int = 0


class _Cleared(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    time_s: float
    events: list[_Stored | _Removed | _Cleared]


_decoder: msgspec.msgpack.Decoder[_Batch] = msgspec.msgpack.Decoder(_Batch)


class KvEventStream:
    """Belongs to one replica.

    Args:
        held: is kept as the events say.
    """

    def __init__(self, held: ToldPrefixes) -> None:
        self._held = held
        self.next_sequence = 0

    def hear(self, sequence: int, batch: bytes) -> bool:
        """Takes a message; False if there is a gap before it, and it was not taken."""
        if sequence > self.next_sequence:
            return False
        if sequence == self.next_sequence:
            self._apply(batch)
        return True

    def replayed(self, batches: Iterable[tuple[int, bytes]]) -> None:
        """Takes what the replica still has from `next_sequence` on, in order."""
        for sequence, batch in batches:
            self.hear_after_gap(sequence, batch)

    def hear_after_gap(self, sequence: int, batch: bytes) -> None:
        """Takes a message whatever is missing before it, which cannot be had: then nothing told is sure any more."""
        if sequence > self.next_sequence:
            self._held.clear()
            self.next_sequence = sequence
        self.hear(sequence, batch)

    def _apply(self, batch: bytes) -> None:
        self.next_sequence += 1
        try:
            events = _decoder.decode(batch).events
        except msgspec.MsgspecError as error:
            logger.error("KV events that cannot be read, so what the replica holds is not known: %s", error)
            self._held.clear()
            return
        for event in events:
            if isinstance(event, _Cleared):
                self._held.clear()
            elif event.table:
                continue
            elif isinstance(event, _Stored):
                self._held.stored(event.block_hashes, event.medium)
            else:
                self._held.removed(event.block_hashes, event.medium)
