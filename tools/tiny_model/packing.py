"""Turn documents into rows of fixed length; every document keeps its own positions and sees only itself."""

import multiprocessing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from . import corpus
from .documents import Document

ROW_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed documents, each array `[rows, ROW_TOKENS]`.

    `positions` restart at 0 with each document; `is_target` marks the tokens that the model must predict.
    `num_too_long` documents did not fit into a row and are left out.
    """

    ids: np.ndarray
    positions: np.ndarray
    is_target: np.ndarray
    num_too_long: int


@dataclass(frozen=True, slots=True)
class _Shard:
    tokenizer_file: Path
    seed: str
    num_documents: int


def pack(documents: Iterable[Document], tokenizer: Tokenizer) -> Rows:
    """Pack documents in order, starting a new row when one does not fit."""
    rows = _RowWriter()
    for document in documents:
        context, target = (tokenizer.encode(text).ids for text in (document.context, document.target))
        rows.add(context, target)
    return rows.finish()


def pack_training(
    tokenizer_file: Path, seed: str, *, num_shards: int, documents_per_shard: int, processes: int
) -> Rows:
    """Generate, tokenise and pack the training text on several processes; the shards are concatenated in order."""
    shards = [_Shard(tokenizer_file, f"{seed}-{index}", documents_per_shard) for index in range(num_shards)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        parts = pool.map(_pack_shard, shards, chunksize=1)
    return Rows(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.is_target for part in parts]),
        sum(part.num_too_long for part in parts),
    )


def _pack_shard(shard: _Shard) -> Rows:
    tokenizer = Tokenizer.from_file(str(shard.tokenizer_file))
    return pack(corpus.training_documents(shard.seed, shard.num_documents), tokenizer)


class _RowWriter:
    """Collects documents into rows."""

    def __init__(self) -> None:
        self._rows: list[tuple[list[int], list[int], list[bool]]] = []
        self._free = 0
        self._num_too_long = 0

    def add(self, context: list[int], target: list[int]) -> None:
        length = len(context) + len(target)
        if length > ROW_TOKENS:
            self._num_too_long += 1
            return
        if length > self._free:
            self._pad()
            self._rows.append(([], [], []))
            self._free = ROW_TOKENS
        ids, positions, is_target = self._rows[-1]
        ids += context + target
        positions += range(length)
        flags = [False] * len(context) + [True] * len(target)
        flags[0] = False  # nothing comes before the first token
        is_target += flags
        self._free -= length

    def finish(self) -> Rows:
        self._pad()
        columns = zip(*self._rows, strict=True)
        ids, positions, is_target = (np.array(column) for column in columns)
        return Rows(ids.astype(np.int16), positions.astype(np.int16), is_target, self._num_too_long)

    def _pad(self) -> None:
        if self._rows and self._free:
            ids, positions, is_target = self._rows[-1]
            ids += [0] * self._free
            positions += range(self._free)
            is_target += [False] * self._free
            self._free = 0
