"""`TokenRows`: a batch whose tokens are rows of their own. `csrc/sampling/drafters.cu`.

Attention has a kernel for rows of one token, and one for longer rows, which is made for chunks of prompts. For a few
tokens each of a few rows with short contexts the first one is faster, though it reads contexts once for each token.
"""

import ctypes
from dataclasses import replace

import numpy as np

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.cuda.sampling.step_inputs import MixedInputs
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import AttentionBatch

_THREADS = 128


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "query_starts", "positions", "block_tables")),
        *((name, ctypes.c_int) for name in ("num_rows", "table_columns")),
    )


class TokenRows:
    """Of batches with one block table, on one device; queued on the current stream."""

    def __init__(self, device: Device) -> None:
        self._kernel = device.kernel("drafters", "drafters_rows")

    def batch(self, inputs: MixedInputs) -> AttentionBatch:
        """Where the tokens of prepared inputs stand, as rows for attention; a row sees what rows before it append."""
        batch, num_tokens = inputs.batch, len(inputs.token_ids)
        num_rows = len(batch.context_lens)
        table, *others = batch.block_tables
        if others:
            raise ArrayMismatchError("tokens are rows of their own where there is one block table")
        columns = table.shape[1]
        starts, context_lens = cupy.empty(num_tokens + 1, np.int32), cupy.empty(num_tokens, np.int32)
        tables = cupy.empty((num_tokens, columns), np.int32)
        step = _Step(
            *map(address, (inputs.record[:num_rows], batch.query_starts, batch.positions, table)), num_rows, columns
        )
        self._kernel((num_tokens, 1, 1), (_THREADS, 1, 1), [step, starts, context_lens, tables])
        return replace(
            batch,
            query_starts=starts,
            context_lens=context_lens,
            block_tables=(tables,),
            max_query_tokens=1,
            newest_tokens=num_tokens,
            chunk_context_tokens=None,
        )
