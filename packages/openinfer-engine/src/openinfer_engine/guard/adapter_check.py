"""`AdapterCheck`: whether every row of a plan runs with its own adapter."""

from openinfer_core.scheduling import StepPlan
from openinfer_engine.guard.errors import BadPlan


class AdapterCheck:
    """Knows what lies in each adapter slot, and which sequence slots use it."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._digests: dict[int, bytes] = {}
        self._users: dict[int, int] = {}  # sequence slot -> adapter slot

    def check(self, plan: StepPlan) -> None:
        """Raises `BadPlan`: a load into a slot that is in use or is none, or a row whose adapter is not in its slot."""
        if not self._num_slots:  # none are served
            if plan.adapter_loads:
                raise BadPlan("adapter_loads has entries, and no adapters are served")
            return
        for slot in (*plan.released, *(start.slot for start in plan.started)):
            self._users.pop(slot, None)
        for load in plan.adapter_loads:
            if not 0 <= load.slot < self._num_slots:
                raise BadPlan(f"adapter_loads names slot {load.slot}; adapter slots are 0 .. {self._num_slots - 1}")
            if load.slot in self._users.values():
                raise BadPlan(f"adapter_loads names slot {load.slot}, whose adapter a sequence still runs with")
            self._digests[load.slot] = load.digest
        for start in plan.started:
            adapter = start.request.adapter
            if adapter is None:
                continue
            if self._digests.get(adapter.slot) != adapter.digest:
                raise BadPlan(
                    f"request {start.request.request_id} begins with adapter slot {adapter.slot}, in which its adapter "
                    "does not lie"
                )
            self._users[start.slot] = adapter.slot
