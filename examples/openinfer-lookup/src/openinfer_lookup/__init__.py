"""Prompt lookup: what followed the last two tokens before may follow again."""

from collections.abc import Sequence

import numpy as np

from openinfer_core.scheduling import SlotStart
from openinfer_engine import DrafterContext
from openinfer_kernels import Array

OPENINFER_CONTRACT = 1

__all__ = ["LookupDrafter"]


class LookupDrafter:
    """Keeps the tokens of each sequence slot on the host."""

    def __init__(self, context: DrafterContext) -> None:
        self.max_drafts = context.max_drafts
        self._ops = context.ops
        self._ids: dict[int, list[int]] = {}
        self._drafts: dict[int, list[int]] = {}

    def start(self, starts: Sequence[SlotStart]) -> None:
        for start in starts:
            self._ids[start.slot] = [*start.request.prompt_token_ids, *start.output_token_ids]
            self._drafts[start.slot] = []

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        columns = [self._ops.download(column).tolist() for column in (slots, last_ids, lengths)]
        rows = [self._row(*each) for each in zip(*columns, strict=True)]
        return self._ops.upload(np.asarray(rows, np.int32))

    def _row(self, slot: int, last_id: int, length: int) -> list[int]:
        ids = self._ids[slot]
        ids += self._drafts[slot][: length - 1 - len(ids)]  # what was accepted of them
        ids += [-1] * (length - 1 - len(ids))  # accepted drafts that came from elsewhere
        ids.append(last_id)
        found = next((i for i in range(len(ids) - 1, 1, -1) if ids[i - 2 : i] == ids[-2:]), len(ids))
        drafts = ids[found : found + self.max_drafts]
        self._drafts[slot] = drafts
        return drafts + [-1] * (self.max_drafts - len(drafts))
