"""`WorkerSide`: one worker's tiers, and the copies between them and its KV pool. Called from the worker's thread."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from openinfer_kv_cache import KvTier, TierHit, Transfer, TransferState, table_digests
from openinfer_kv_offload.vllm.copies import PoolCopies, StagedCopy
from openinfer_kv_offload.vllm.messages import Load, Query, Save, StepMetadata, WorkerAnswers
from openinfer_kv_offload.vllm.tables import CacheTables

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
_POLL_S = 0.001


@dataclass(slots=True)
class _Saving:
    copy: StagedCopy
    save: Save
    staging_ids: list[int]
    transfer: Transfer | None = None


@dataclass(slots=True)
class _Held:
    """What was found for a request: of each table the blocks from `begins` on."""

    query: Query
    hits: list[TierHit]
    begins: list[int]

    def close(self) -> None:
        for hit in self.hits:
            hit.close()


@dataclass(slots=True)
class _Part:
    """What is loaded of one table."""

    table: int
    hit: TierHit
    skip_blocks: int  # leading ones of the hit, which the pool has
    block_ids: Sequence[int]
    staging_ids: list[int] = field(default_factory=list[int])
    transfer: Transfer | None = None

    @property
    def completed_blocks(self) -> int:
        completed = 0 if self.transfer is None else self.transfer.completed_blocks - self.skip_blocks
        return min(max(completed, 0), len(self.block_ids))

    @property
    def is_waiting(self) -> bool:
        """Whether its load has not begun; with nothing found there is none."""
        return self.transfer is None and bool(self.hit.digests)

    @property
    def is_pending(self) -> bool:
        return self.is_waiting or (self.transfer is not None and self.transfer.poll() is TransferState.PENDING)


@dataclass(slots=True)
class _Loading:
    request_id: str
    parts: list[_Part]
    copies: list[StagedCopy] | None = None  # into the pool, once all parts have ended

    @property
    def is_waiting(self) -> bool:
        return any(part.is_waiting for part in self.parts)

    @property
    def num_staging(self) -> int:
        return sum(len(part.hit.digests) for part in self.parts)


class WorkerSide:
    """Blocks of staging memory go from free to a save or a load and back.

    A load that finds too few waits, and no save takes one meanwhile; a save takes what there is, and leaves the rest.
    """

    def __init__(
        self, tiers: KvTier, copies: PoolCopies, tables: CacheTables, *, staging_bytes: int, load_timeout_s: float
    ) -> None:
        self._tiers = tiers
        self._copies = copies
        self._tables = tables
        self._load_timeout_s = load_timeout_s
        num_staging = max(staging_bytes // copies.block_bytes, 2 * len(tables))
        self._staging = copies.allocate_staging(num_staging)
        self._most_blocks = num_staging // len(tables)  # of a prefix that is loaded
        self._free = list(range(num_staging - 1, -1, -1))
        self._held: dict[str, _Held] = {}
        self._answers = WorkerAnswers()
        self._saving: list[_Saving] = []
        self._loading: list[_Loading] = []
        self._failed_block_ids: set[int] = set()
        self._failed_requests: set[str] = set()
        self.unsaved_blocks = 0  # left out, because staging memory was short

    @property
    def is_moving(self) -> bool:
        return bool(self._saving or self._loading)

    def begin_step(self, metadata: StepMetadata) -> None:
        for request_id in metadata.drops:
            self._drop(request_id)
        for request_id, query in metadata.queries.items():
            self._drop(request_id)
            self._answers.found_blocks[request_id] = self._find(request_id, query)
        for request_id, load in metadata.loads.items():
            held = self._held.pop(request_id)
            parts = [self._part(held, table, load) for table in range(len(self._tables)) if load.block_ids[table]]
            self._loading.append(_Loading(request_id, parts))
        self._begin_loads()

    def save(self, saves: Sequence[Save]) -> None:
        if not self._tiers.accepts_saves:
            return
        has_waiting_load = any(loading.is_waiting for loading in self._loading)
        for save in saves:
            num_blocks = 0 if has_waiting_load else min(len(save.digests), len(self._free))
            self.unsaved_blocks += len(save.digests) - num_blocks
            if num_blocks:
                staging_ids = self._take(num_blocks)
                copy = self._copies.to_staging(save.block_ids[:num_blocks], staging_ids, table=save.table)
                self._saving.append(_Saving(copy, save, staging_ids))

    def poll(self) -> set[str]:
        """Carries on with what is under way; returns the requests whose load has ended, however it did."""
        self._saving = [saving for saving in self._saving if not self._has_saved(saving)]
        over = [loading for loading in self._loading if self._is_over(loading)]
        self._loading = [loading for loading in self._loading if loading not in over]
        self._begin_loads()
        return {loading.request_id for loading in over}

    def take_failed_block_ids(self) -> set[int]:
        """With one table: blocks whose load has ended without them."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """With several tables: requests whose load has ended without some of their blocks."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_answers(self) -> WorkerAnswers | None:
        if not self._answers.found_blocks:
            return None
        answers, self._answers = self._answers, WorkerAnswers()
        return answers

    def close(self) -> None:
        for request_id in list(self._held):
            self._drop(request_id)
        give_up_s = time.monotonic() + _CLOSE_S
        while self.is_moving and time.monotonic() < give_up_s:
            self.poll()
            time.sleep(_POLL_S)
        self._tiers.close()

    def _find(self, request_id: str, query: Query) -> int:
        """Holds the longest prefix of which the tiers have all that its next token sees; returns its blocks.

        A block that is missing in a window is where a shorter prefix may end, whose window is then looked for.
        """
        asked = Query(query.first_block, query.digests[: self._most_blocks])
        whole = [self._tiers.find(table_digests(asked.digests, table)) for table in self._tables.whole]
        windowed: list[tuple[int, TierHit]] = []
        num_blocks = min(len(hit.digests) for hit in whole)
        while num_blocks and len(whole) + len(windowed) < len(self._tables):
            table, end = len(whole) + len(windowed), asked.first_block + num_blocks
            begin = max(asked.first_block, self._tables.first_block(table, end))
            windowed.append((begin, self._find_blocks(asked, table, begin, end)))
            found_end = begin + len(windowed[-1][1].digests)
            if found_end < end:
                num_blocks = found_end - asked.first_block
                while windowed:
                    windowed.pop()[1].close()
        for table, hit in enumerate(whole):
            if len(hit.digests) > num_blocks:
                whole[table] = self._find_blocks(asked, table, asked.first_block, asked.first_block + num_blocks)
                hit.close()
        begins = [asked.first_block] * len(whole) + [begin for begin, _ in windowed]
        self._held[request_id] = _Held(asked, [*whole, *(hit for _, hit in windowed)], begins)
        return num_blocks

    def _find_blocks(self, query: Query, table: int, begin: int, end: int) -> TierHit:
        digests = query.digests[begin - query.first_block : end - query.first_block]
        return self._tiers.find(table_digests(digests, table))

    def _part(self, held: _Held, table: int, load: Load) -> _Part:
        block_ids = load.block_ids[table]
        begin = load.end_block - len(block_ids)
        hit, held_begin = held.hits[table], held.begins[table]
        # A hit may be longer than what is loaded of it: another rank has found less. Then a window may begin before it.
        if held_begin > begin:
            hit.close()
            hit, held_begin = self._find_blocks(held.query, table, begin, load.end_block), begin
        return _Part(table, hit, begin - held_begin, block_ids)

    def _begin_loads(self) -> None:
        for loading in self._loading:
            if not loading.is_waiting:
                continue
            if len(self._free) < loading.num_staging:
                return  # in the order in which they were asked for: a long prefix is not passed over for ever
            for part in [each for each in loading.parts if each.is_waiting]:
                part.staging_ids = self._take(len(part.hit.digests))
                blocks = [self._staging[staging_id] for staging_id in part.staging_ids]
                part.transfer = self._tiers.load(part.hit, blocks, timeout_s=self._load_timeout_s)

    def _is_over(self, loading: _Loading) -> bool:
        if loading.copies is None:
            if any(part.is_pending for part in loading.parts):
                return False
            loading.copies = self._to_pool(loading)
        loading.copies = [copy for copy in loading.copies if not copy.is_done()]
        if loading.copies:
            return False
        for part in loading.parts:
            self._free += part.staging_ids
        return True

    def _to_pool(self, loading: _Loading) -> list[StagedCopy]:
        """Begins to bring what completed into the pool; the other blocks, or the request, have failed."""
        short = [part for part in loading.parts if part.completed_blocks < len(part.block_ids)]
        for part in short:
            failure = None if part.transfer is None else part.transfer.failure
            _log.warning("%d of %d blocks were loaded: %s", part.completed_blocks, len(part.block_ids), failure)
        if short and len(self._tables) > 1:
            self._failed_requests.add(loading.request_id)
            return []
        for part in short:
            self._failed_block_ids.update(part.block_ids[part.completed_blocks :])
        return [self._part_to_pool(part) for part in loading.parts]

    def _part_to_pool(self, part: _Part) -> StagedCopy:
        end = part.skip_blocks + part.completed_blocks
        block_ids = part.block_ids[: part.completed_blocks]
        return self._copies.to_pool(part.staging_ids[part.skip_blocks : end], block_ids, table=part.table)

    def _has_saved(self, saving: _Saving) -> bool:
        if saving.transfer is None:
            if not saving.copy.is_done():
                return False
            blocks = [self._staging[staging_id] for staging_id in saving.staging_ids]
            saving.transfer = self._tiers.save(saving.save.digests[: len(blocks)], blocks)
        if saving.transfer.poll() is TransferState.PENDING:
            return False
        self._free += saving.staging_ids
        return True

    def _take(self, num_staging: int) -> list[int]:
        taken = self._free[-num_staging:]
        del self._free[-num_staging:]
        return taken

    def _drop(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            held.close()
