"""`AdapterRows`: which adapter the rows of a step use, known on the host when their sequence begins."""

import numpy as np

from openinfer_core.request import NO_ADAPTER_SLOT
from openinfer_core.scheduling import Int32Column, StepPlan
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_kernels import HostArray


class AdapterRows:
    """Of one rank: brings adapters into their slots, and remembers the one of each sequence slot."""

    def __init__(self, adapters: RankAdapters | None, *, max_num_seqs: int) -> None:
        self.adapters = adapters
        """None where none are served."""
        self._slots: HostArray = np.full(max_num_seqs, NO_ADAPTER_SLOT, np.int32)

    def advance(self, plan: StepPlan) -> None:
        """Queues what a plan has placed, ahead of its step, and takes over the sequences that it begins."""
        if self.adapters is None:
            return
        for load in plan.adapter_loads:
            self.adapters.place(load)
        for start in plan.started:
            adapter = start.request.adapter
            self._slots[start.slot] = NO_ADAPTER_SLOT if adapter is None else adapter.slot

    def of(self, sequence_slots: Int32Column) -> HostArray | None:
        """`[R]` int32 adapter slots of rows in these sequence slots; None if no row has an adapter."""
        if self.adapters is None:
            return None
        slots = self._slots[sequence_slots]
        return slots if (slots != NO_ADAPTER_SLOT).any() else None
