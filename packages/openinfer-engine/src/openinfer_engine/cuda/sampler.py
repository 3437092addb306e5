"""`CudaSampler`: from logits to the next tokens on a GPU, captured or not."""

from collections.abc import Iterable

import numpy as np

from openinfer_core.grammars import MaskWords, mask_words
from openinfer_core.sampling import MAX_LOGPROBS
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.cuda.sampling_state import CudaSamplingState
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.worker.logprobs import HostLogprobs
from openinfer_kernels import Array, HostArray, Logprobs, TokenMask
from openinfer_kernels.cuda.common.pinned import StagingBuffer
from openinfer_kernels.cuda.ops import CudaOps
from openinfer_kernels.cuda.sampling.step_inputs import MASK_LINE, DecodeInputs, SampledRows


class CudaSampler:
    """Queues sampling of rows whose parameters are in `CudaSamplingState`."""

    def __init__(
        self, ops: CudaOps, slots: CudaSamplingState, communicator: Communicator, limits: WorkerLimits, *, max_rows: int
    ) -> None:
        self._ops = ops
        self._slots = slots
        self._communicator = communicator
        self._limits = limits
        self._mask_bits = ops.zeros((max_rows, mask_words(limits.vocab_size)), np.uint32)

    def sample(
        self, logits: Array, sampled: SampledRows, *, changes: bool = False, mask: TokenMask | None = None
    ) -> Array:
        """Token ids `[R]` for `logits [R, V]`, which the slots' next rows begin with."""
        state = self._slots.state
        if self._communicator.rank == 0:
            changed = state.changes(sampled) if changes else None
            batch = sampled.batch(self._limits.num_token_ids, changes=changed, token_mask=mask)
            token_ids = self._ops.sample(logits, batch)
        else:
            token_ids = self._ops.zeros((len(logits),), np.int32)
        token_ids = self._communicator.broadcast(token_ids, root=0)
        state.keep_sampled(sampled.slots, token_ids, counts=changes)
        return token_ids

    def sample_fully(self, logits: Array, inputs: DecodeInputs) -> tuple[Array, Logprobs]:
        """Token ids and log-probabilities of decode rows that may have penalties, a bias or a mask."""
        num_rows = inputs.rows.shape[1]
        mask = TokenMask(rows=inputs.rows[MASK_LINE], bits=self._mask_bits[:num_rows])
        token_ids = self.sample(logits, inputs.sampled, changes=True, mask=mask)
        return token_ids, self._ops.logprobs(logits, token_ids, top=min(MAX_LOGPROBS, self._limits.vocab_size))

    def token_mask(self, masks: Iterable[tuple[int, MaskWords]], num_rows: int, staging: StagingBuffer) -> TokenMask:
        (rows,) = staging.upload(self.send_masks(masks, num_rows, staging))
        return TokenMask(rows=rows, bits=self._mask_bits[:num_rows])

    def send_masks(self, masks: Iterable[tuple[int, MaskWords]], num_rows: int, staging: StagingBuffer) -> HostArray:
        """Brings masks to where captured steps read them; returns the rows that they are for, then -1: `[num_rows]`."""
        present = list(masks)
        bits = np.zeros((len(present), self._mask_bits.shape[1]), np.uint32)
        rows = np.full(num_rows, -1, np.int32)
        for index, (row, words) in enumerate(present):
            bits[index, : len(words)], rows[index] = words, row
        staging.upload_into(bits, self._mask_bits)
        return rows


def download_logprobs(logprobs: Logprobs, staging: StagingBuffer) -> HostLogprobs:
    columns = (logprobs.chosen, logprobs.ranks, logprobs.top_ids, logprobs.top)
    return HostLogprobs(*map(staging.download, columns))
