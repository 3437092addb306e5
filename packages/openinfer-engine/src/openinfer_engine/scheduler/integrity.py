"""`check_integrity`: do the queue, the open requests and the steps in flight agree with each other?"""

from collections import Counter
from collections.abc import Collection, Iterable

from openinfer_core.errors import ContractViolation
from openinfer_engine.scheduler.run_queue import RunQueue
from openinfer_engine.scheduler.sequence import NO_SLOT, Sequence, SequenceState
from openinfer_engine.scheduler.step_builder import StepInFlight


def check_integrity(queue: RunQueue, *, open_requests: Collection[Sequence], in_flight: Iterable[StepInFlight]) -> None:
    """Raises `ContractViolation` with the first disagreement found."""
    flying = Counter(sequence for record in in_flight for sequence in record.rows)
    everyone = {*open_requests, *flying, *queue.given_up}
    for sequence in everyone:
        _check_sequence(sequence, rows_in_flight=flying[sequence])
    _check_order(queue, num_open=len(open_requests))
    slots = sorted([*queue.free_slots, *(sequence.slot for sequence in everyone if sequence.slot != NO_SLOT)])
    _require(slots == list(range(queue.num_slots)), f"of {queue.num_slots} slots these are free or held: {slots}")
    num_live = queue.kv.num_live_sequences
    _require(num_live == len(everyone), f"{num_live} sequences have KV and {len(everyone)} are known")


def _check_order(queue: RunQueue, *, num_open: int) -> None:
    loading = [] if queue.loads is None else queue.loads.sequences
    num_queued = len(queue.running) + len(queue.preempted) + len(queue.waiting) + len(loading)
    _require(num_queued == num_open, f"{num_queued} sequences are queued and {num_open} are open")
    for state, members in (
        (SequenceState.RUNNING, queue.running),
        (SequenceState.PREEMPTED, queue.preempted),
        (SequenceState.LOADING, loading),
    ):
        wrong = [sequence.request_id for sequence in members if sequence.state is not state]
        _require(not wrong, f"requests {wrong} are listed as {state.name.lower()} and are not")
    running = [sequence.admission for sequence in queue.running]
    preempted = [sequence.admission for sequence in reversed(queue.preempted)]
    is_one_order = queue.loads is None and not queue.waiting.chooses_victim
    parts = [[*running, *preempted]] if is_one_order else [running, preempted]
    _require(all(ages == sorted(ages) for ages in parts), f"the run queue is not sorted by age: {parts}")


def _check_sequence(sequence: Sequence, *, rows_in_flight: int) -> None:
    what = f"request {sequence.request_id} ({sequence.state.name.lower()})"
    _require(sequence.rows_in_flight == rows_in_flight, f"{what} counts {sequence.rows_in_flight} rows in flight")
    _require(sequence.known_tokens == sequence.kv.num_tokens, f"{what} and its KV disagree about the known ids")
    holds = sequence.state in (SequenceState.RUNNING, SequenceState.LOADING) or sequence.is_held
    _require((sequence.slot != NO_SLOT) == holds, f"{what} has slot {sequence.slot}")
    _require(bool(sequence.kv.blocks) == holds, f"{what} holds {len(sequence.kv.blocks)} blocks")
    if sequence.state is SequenceState.RUNNING:
        marks = [sequence.computed_tokens, sequence.target_tokens, sequence.final_tokens]
        _require(marks == sorted(marks), f"{what} has its marks out of order: {marks}")
        _require(sequence.computed_tokens <= sequence.kv.capacity_tokens, f"{what} computes beyond its blocks")


def _require(condition: bool, contradiction: str) -> None:  # noqa: FBT001 -- an assertion's condition
    if not condition:
        raise ContractViolation(contradiction)
