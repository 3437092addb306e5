"""`check_integrity`: do the queue, the open requests and the steps in flight agree with each other?"""

from collections import Counter
from collections.abc import Collection, Iterable

from openinfer_core.errors import ContractViolation
from openinfer_engine.scheduler.run_queue import RunQueue
from openinfer_engine.scheduler.sequence import NO_SLOT, Sequence, SequenceState
from openinfer_engine.scheduler.step_builder import StepInFlight
from openinfer_engine.scheduler.windows import Windows


def check_integrity(queue: RunQueue, *, open_requests: Collection[Sequence], in_flight: Iterable[StepInFlight]) -> None:
    """Raises `ContractViolation` with the first disagreement found."""
    flying = Counter(sequence for record in in_flight for sequence in record.rows)
    everyone = {*open_requests, *flying, *queue.given_up}
    for sequence in everyone:
        _check_sequence(sequence, rows_in_flight=flying[sequence])
    if queue.windows is not None:
        for sequence in queue.running:
            _check_windows(sequence, queue.windows)
    _check_order(queue, num_open=len(open_requests))
    slots = sorted([*queue.free_slots, *(sequence.slot for sequence in everyone if sequence.slot != NO_SLOT)])
    _require(slots == list(range(queue.num_slots)), f"of {queue.num_slots} slots these are free or held: {slots}")
    num_live = queue.kv.num_live_sequences
    _require(num_live == len(everyone), f"{num_live} sequences have KV and {len(everyone)} are known")


def _check_order(queue: RunQueue, *, num_open: int) -> None:
    loading = [] if queue.loads is None else queue.loads.sequences
    num_queued = len(queue.running) + len(queue.preempted) + len(queue.waiting) + len(queue.followers) + len(loading)
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
    is_one_order = queue.loads is None and not queue.waiting.chooses_victim and not queue.has_passed_over
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
        _require(sequence.capacity_tokens == sequence.kv.capacity_tokens, f"{what} and its KV disagree about its room")
        lengths = [len(table.blocks) for table in sequence.kv.tables]
        _require(
            all(sent <= length for sent, length in zip(sequence.sent_blocks, lengths, strict=True)),
            f"{what} has sent {sequence.sent_blocks} entries of block tables that have {lengths}",
        )


def _check_windows(sequence: Sequence, windows: Windows) -> None:
    what = f"request {sequence.request_id}"
    void_counts = [table.num_void for table in sequence.kv.tables]
    told = windows.void_counts([sequence.slot])[:, 0].tolist()
    _require(told == void_counts, f"{what} has {void_counts} void entries and tells of {told}")
    bounds = windows.bounds(sequence)
    is_kept = all(num_void <= first for num_void, first in bounds)
    _require(is_kept, f"{what} has void entries that its next row may see: {bounds}")


def _require(condition: bool, contradiction: str) -> None:  # noqa: FBT001 -- an assertion's condition
    if not condition:
        raise ContractViolation(contradiction)
