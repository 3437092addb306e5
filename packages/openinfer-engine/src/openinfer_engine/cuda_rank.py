"""`CudaRank`: a rank on a GPU. Plain decode steps are replayed from a captured graph, all others run op by op.

    plan ─► admit (host tables, device tables, slots' parameters)
       ├─ every row is one token whose id is on the device, and asks for nothing beside sampling
       │    └─► slots and positions to the device ─► replay the graph of so many rows ─► ids to the host
       └─ else ─► RankRunner.execute

A replay is not waited for: the next step is prepared and queued behind it, and its ids are read when the loop asks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from openinfer_core.scheduling import SlotStart, StepPlan, StepResult
from openinfer_engine.model import Model
from openinfer_engine.rank import NOT_FINITE, RankRunner, RunnerLimits
from openinfer_engine.runner import DoneStep, PendingStep
from openinfer_engine.slot_sampling import is_plain
from openinfer_kernels import Array, HostArray
from openinfer_kernels.cuda.graphs import Event, Graph, PinnedBuffers, Stream
from openinfer_kernels.cuda.ops import CudaOps
from openinfer_kernels.cuda.steps import SLOT_PARAMS, DecodeInputs, SlotState

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Numbers of rows that are captured; a step is padded to the next one."""
MOST_ROWS = ROW_BUCKETS[-1]
_IN_FLIGHT = 3
"""Steps whose host buffers are in use at a time, at most: one running, one queued, one being read."""


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: DecodeInputs
    token_ids: Array
    graph: Graph


class CudaRank:
    """Steps of one GPU, in order, on one stream."""

    def __init__(self, eager: RankRunner, model: Model, *, kv_cache: Array, ops: CudaOps, limits: RunnerLimits) -> None:
        self._eager = eager
        self._model = model
        self._kv_cache = kv_cache
        self._ops = ops
        self._limits = limits
        self._stream = Stream(ops.device)
        max_blocks = -(-limits.max_model_tokens // limits.block_size_tokens)
        self._slots = SlotState(
            ops.device, last_ids=eager.last_ids, max_num_seqs=limits.max_num_seqs, max_blocks=max_blocks
        )
        self._plain: HostArray = np.zeros(limits.max_num_seqs, np.bool_)
        """Slots whose request asks for nothing beside sampling."""
        self._captured: dict[int, _Captured] = {}
        self._buffers = PinnedBuffers(_IN_FLIGHT, inputs=2 * MOST_ROWS, outputs=MOST_ROWS)

    def warm_up(self, *, capture: bool, mark: Callable[[str], None]) -> None:
        """Runs each decode size once, so that nothing is compiled or measured later, and captures it.

        Args:
            capture: whether to capture.
            mark: told the phases of the start: `tuning` and `capture`.
        """
        buckets = [rows for rows in ROW_BUCKETS if rows <= _bucket(min(self._limits.max_num_seqs, MOST_ROWS))]
        with self._stream:
            with self._ops.tuning():
                for rows in buckets:
                    self._decode(self._make_inputs(rows))
                self._stream.synchronize()
            mark("tuning")
            if capture:
                pool = self._stream.private_pool()
                for rows in reversed(buckets):
                    inputs = self._make_inputs(rows)
                    with pool:
                        graph, token_ids = self._stream.capture(lambda inputs=inputs: self._decode(inputs))
                    self._captured[rows] = _Captured(inputs, token_ids, graph)
                self._stream.synchronize()
                mark("capture")

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begins a step."""
        with self._stream:
            entries = self._eager.admit(plan)
            if len(entries):
                self._slots.append_blocks(self._ops.upload(entries))
            for start in plan.started:
                self._start(start)
            if self._is_plain_decode(plan):
                return self._replay(plan)
            return DoneStep(self._eager.execute(plan))

    def _make_inputs(self, rows: int) -> DecodeInputs:
        return self._slots.make_decode_inputs(
            rows,
            num_token_ids=self._limits.num_token_ids,
            max_context_tokens=self._limits.max_model_tokens,
        )

    def _decode(self, inputs: DecodeInputs) -> Array:
        """A whole decode step: what is captured. Returns the sampled ids."""
        self._slots.prepare_decode(inputs, block_tokens=self._limits.block_size_tokens)
        hidden = self._model.forward(inputs.token_ids, batch=inputs.batch, kv_cache=self._kv_cache)
        token_ids = self._ops.sample(self._model.logits(hidden), inputs.sampling)
        self._slots.keep_last_ids(inputs.slots_and_positions[0], token_ids)
        return token_ids

    def _start(self, start: SlotStart) -> None:
        params = start.request.sampling
        self._plain[start.slot] = is_plain(params)
        record = np.zeros(1, SLOT_PARAMS)
        top_k = min(params.top_k, self._limits.vocab_size)
        record[0] = (params.temperature, params.top_p, params.min_p, top_k, start.seed)
        self._slots.write_params(start.slot, record)

    def _is_plain_decode(self, plan: StepPlan) -> bool:
        return (
            bool(self._captured)
            and plan.num_rows <= MOST_ROWS
            and not len(plan.token_ids)
            and plan.num_tokens == plan.num_rows
            and bool(self._plain[plan.slots].all())
            and bool(plan.sample.all())
        )

    def _replay(self, plan: StepPlan) -> PendingStep:
        rows = plan.num_rows
        captured = self._captured[_bucket(rows)]
        padded = captured.inputs.slots_and_positions.shape[1]
        turn = self._buffers.take()
        turn.inputs[: 2 * padded].reshape(2, padded)[:, rows:] = -1
        turn.inputs[:rows] = plan.slots
        turn.inputs[padded : padded + rows] = plan.starts
        turn.upload(captured.inputs.slots_and_positions)
        captured.graph.launch()
        turn.download(captured.token_ids)
        return _Replayed(turn.outputs, turn.done, rows)


@dataclass(frozen=True, slots=True)
class _Replayed:
    """A decode step on its way."""

    outputs: HostArray
    done: Event
    num_rows: int

    def result(self) -> StepResult:
        """Waits for the ids."""
        self.done.wait()
        token_ids = self.outputs[: self.num_rows].copy()
        failed = np.flatnonzero(token_ids < 0).tolist()
        return StepResult(token_ids=token_ids, failed_rows=dict.fromkeys(failed, NOT_FINITE))


def _bucket(rows: int) -> int:
    """The smallest captured number of rows that holds so many."""
    return next(bucket for bucket in ROW_BUCKETS if bucket >= rows)
