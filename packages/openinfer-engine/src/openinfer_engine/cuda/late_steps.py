"""`LateSteps`: steps that a drafter is shown several at once, later, where nothing asks for its drafts meanwhile.

    step without drafts ─► ids and vectors kept ─┬─► the next one of the same rows: kept, too
                                                 └─► any other step, drafts wanted, 16 of them: shown before it

What a drafter computes of one token reads all of the weights that it has for that; of sixteen tokens it takes hardly
longer. Blocks that the drafter has not filled yet belong to rows of the step before: all that could read them, or give
them to another sequence, comes after a step of other rows. Copies to KV tiers do not, and with tiers nothing is late.
Copies of recurrent states follow any step: what is kept is shown before them.
"""

from openinfer_core.scheduling import StepPlan
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.drafters.contract import LATE_STEPS, LATE_TOKENS, ObservedStep
from openinfer_engine.drafting import SharedDrafter
from openinfer_engine.worker.step_observer import StepObserver
from openinfer_kernels import Array, HostArray
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.sampling.draft_state import DraftedSlotState
from openinfer_kernels.cuda.sampling.late_rows import LateRows
from openinfer_kernels.cuda.sampling.step_inputs import BatchMemory, DecodeInputs, MixedInputs


class LateSteps:
    """Of one worker, whose drafter allows it (`DrafterRequirements.observes_late`).

    Args:
        observer: of the model and the drafter.
        drafter: whose.
        slots: where sequences stand.
        device: of the worker.
        limits: of the worker.
        memory: of its batches.
    """

    def __init__(
        self,
        observer: StepObserver,
        drafter: SharedDrafter,
        *,
        slots: DraftedSlotState,
        device: Device,
        limits: WorkerLimits,
        memory: BatchMemory,
    ) -> None:
        self._observer = observer
        self._drafter = drafter
        self._reads_hidden = drafter.requirements.reads_hidden
        self._slots = slots
        self._device = device
        self._limits = limits
        self._memory = memory
        self._rows: LateRows | None = None
        self._kept: tuple[Array, HostArray, int] | None = None  # slots, on the host, too, and the longest context
        self._count = 0

    def put(self, inputs: DecodeInputs, hidden: Array, taps: tuple[Array, ...]) -> None:
        """Queues that a decode step is kept; captured with it."""
        parts = (hidden, *taps) if self._reads_hidden else taps
        if self._rows is None:
            self._rows = LateRows(self._device, max_num_seqs=self._limits.max_num_seqs, depth=LATE_STEPS, like=parts)
        self._rows.put(inputs, parts)

    def note(self, plan: StepPlan, inputs: DecodeInputs) -> None:
        """A step that was kept has been queued."""
        self._kept = inputs.rows[0][: plan.num_rows], plan.slots, int(plan.starts.max()) + 1
        self._count += 1

    def goes_on(self, plan: StepPlan) -> bool:
        """Whether a step that will be kept can be shown with those that are."""
        if self._kept is None:
            return True
        slots = self._kept[1]
        return self._count < LATE_STEPS and len(slots) == plan.num_rows and bool((slots == plan.slots).all())

    def show(self) -> None:
        """Queues that the drafter observes what is kept, before the slots are brought up to date for another step, and
        before recurrent states are copied: what a drafter keeps of a sequence may be among them.
        """
        if self._kept is None or self._rows is None:
            return
        slots, of_host, longest = self._kept
        count, most_rows = self._count, max(1, LATE_TOKENS // self._count)
        self._kept, self._count = None, 0
        for first in range(0, len(of_host), most_rows):
            self._show(self._rows, slots[first : first + most_rows], count, longest=longest)

    def _show(self, rows: LateRows, slots: Array, count: int, *, longest: int) -> None:
        num_rows = len(slots)
        inputs = MixedInputs.make(
            num_rows,
            num_rows * count,
            max_blocks=-(-longest // self._limits.block_size_tokens),
            longest=(count, longest),
            chunk_context_tokens=num_rows * longest,
            record=self._slots.place_late(slots, count),
            memory=self._memory,
        )
        self._slots.prepare_mixed(inputs)
        token_ids, parts = rows.take(inputs)
        hidden, taps = (parts[0], parts[1:]) if self._reads_hidden else (token_ids[:0], parts)
        slots = inputs.record[:num_rows]
        self._drafter.observe(
            ObservedStep(token_ids=token_ids, hidden=hidden, taps=taps, slots=slots, batch=inputs.batch)
        )
