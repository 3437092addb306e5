"""`WorkerSide`: one worker's tiers, and the copies between them and its KV pool. Called from the worker's thread."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from openinfer_kv_cache import Digest, KvTier, TierHit, Transfer, TransferState
from openinfer_kv_offload.vllm.copies import PoolCopies, StagedCopy
from openinfer_kv_offload.vllm.messages import Load, Save, StepMetadata, WorkerAnswers

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
_POLL_S = 0.001


@dataclass(slots=True)
class _Saving:
    copy: StagedCopy
    digests: Sequence[Digest]
    staging_ids: list[int]
    transfer: Transfer | None = None


@dataclass(slots=True)
class _Loading:
    request_id: str
    load: Load
    hit: TierHit
    staging_ids: list[int]
    transfer: Transfer | None = None
    copy: StagedCopy | None = None


class WorkerSide:
    """Blocks of staging memory go from free to a save or a load and back.

    A load that finds too few waits, and no save takes one meanwhile; a save takes what there is, and leaves the rest.
    """

    def __init__(self, tiers: KvTier, copies: PoolCopies, *, staging_bytes: int, load_timeout_s: float) -> None:
        self._tiers = tiers
        self._copies = copies
        self._load_timeout_s = load_timeout_s
        num_staging = max(staging_bytes // copies.block_bytes, 2)
        self._staging = copies.allocate_staging(num_staging)
        self._free = list(range(num_staging - 1, -1, -1))
        self._hits: dict[str, TierHit] = {}
        self._answers = WorkerAnswers()
        self._saving: list[_Saving] = []
        self._loading: list[_Loading] = []
        self._failed_block_ids: set[int] = set()
        self.unsaved_blocks = 0  # left out, because staging memory was short

    @property
    def is_moving(self) -> bool:
        return bool(self._saving or self._loading)

    def begin_step(self, metadata: StepMetadata) -> None:
        for request_id in metadata.drops:
            self._drop(request_id)
        for request_id, digests in metadata.queries.items():
            self._drop(request_id)
            hit = self._hits[request_id] = self._tiers.find(digests[: len(self._staging)])
            self._answers.found_blocks[request_id] = len(hit.digests)
        for request_id, load in metadata.loads.items():
            # A hit may be longer than what is loaded of it: another rank has found less.
            self._loading.append(_Loading(request_id, load, self._hits.pop(request_id), []))
        self._begin_loads()

    def save(self, saves: Sequence[Save]) -> None:
        if not self._tiers.accepts_saves:
            return
        has_waiting_load = any(loading.transfer is None for loading in self._loading)
        for save in saves:
            num_blocks = 0 if has_waiting_load else min(len(save.digests), len(self._free))
            self.unsaved_blocks += len(save.digests) - num_blocks
            if num_blocks:
                staging_ids = self._take(num_blocks)
                copy = self._copies.to_staging(save.block_ids[:num_blocks], staging_ids)
                self._saving.append(_Saving(copy, save.digests[:num_blocks], staging_ids))

    def poll(self) -> set[str]:
        """Carries on with what is under way; returns the requests whose load has ended, however it did."""
        self._saving = [saving for saving in self._saving if not self._has_saved(saving)]
        over = [loading for loading in self._loading if self._is_over(loading)]
        self._loading = [loading for loading in self._loading if loading not in over]
        self._begin_loads()
        return {loading.request_id for loading in over}

    def take_failed_block_ids(self) -> set[int]:
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def take_answers(self) -> WorkerAnswers | None:
        if not self._answers.found_blocks:
            return None
        answers, self._answers = self._answers, WorkerAnswers()
        return answers

    def close(self) -> None:
        for request_id in list(self._hits):
            self._drop(request_id)
        give_up_s = time.monotonic() + _CLOSE_S
        while self.is_moving and time.monotonic() < give_up_s:
            self.poll()
            time.sleep(_POLL_S)
        self._tiers.close()

    def _begin_loads(self) -> None:
        for loading in self._loading:
            if loading.transfer is not None:
                continue
            if len(self._free) < len(loading.hit.digests):
                return  # in the order in which they were asked for: a long prefix is not passed over for ever
            loading.staging_ids = self._take(len(loading.hit.digests))
            blocks = [self._staging[staging_id] for staging_id in loading.staging_ids]
            loading.transfer = self._tiers.load(loading.hit, blocks, timeout_s=self._load_timeout_s)

    def _is_over(self, loading: _Loading) -> bool:
        if loading.copy is None:
            if loading.transfer is None or loading.transfer.poll() is TransferState.PENDING:
                return False
            loading.copy = self._to_pool(loading, loading.transfer)
        if not loading.copy.is_done():
            return False
        self._free += loading.staging_ids
        return True

    def _to_pool(self, loading: _Loading, ended: Transfer) -> StagedCopy:
        """Begins to bring what completed into the pool; the other blocks have failed."""
        load = loading.load
        completed = min(max(ended.completed_blocks - load.skip_blocks, 0), len(load.block_ids))
        self._failed_block_ids.update(load.block_ids[completed:])
        if completed < len(load.block_ids):
            _log.warning("%d of %d blocks were loaded: %s", completed, len(load.block_ids), ended.failure)
        staging_ids = loading.staging_ids[load.skip_blocks : load.skip_blocks + completed]
        return self._copies.to_pool(staging_ids, load.block_ids[:completed])

    def _has_saved(self, saving: _Saving) -> bool:
        if saving.transfer is None:
            if not saving.copy.is_done():
                return False
            blocks = [self._staging[staging_id] for staging_id in saving.staging_ids]
            saving.transfer = self._tiers.save(saving.digests, blocks)
        if saving.transfer.poll() is TransferState.PENDING:
            return False
        self._free += saving.staging_ids
        return True

    def _take(self, num_staging: int) -> list[int]:
        taken = self._free[-num_staging:]
        del self._free[-num_staging:]
        return taken

    def _drop(self, request_id: str) -> None:
        hit = self._hits.pop(request_id, None)
        if hit is not None:
            hit.close()
