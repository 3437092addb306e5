"""`check_books`: do the scheduler's lists, slots and counts agree with each other?"""

from collections import Counter
from collections.abc import Collection, Iterable

from openinfer_core.errors import ContractViolation
from openinfer_engine.scheduler.draft import StepInFlight
from openinfer_engine.scheduler.sequence import NO_SLOT, Sequence, SequenceState


def check_books(
    *,
    open_: Collection[Sequence],
    running: list[Sequence],
    preempted: list[Sequence],
    num_waiting: int,
    free_slots: list[int],
    num_slots: int,
    in_flight: Iterable[StepInFlight],
    num_live: int,
) -> None:
    """Compares what the scheduler knows with what it ought to be.

    Raises:
        ContractViolation: with the first disagreement found.
    """
    flying = Counter(sequence for record in in_flight for sequence in record.rows)
    everyone = {*open_, *flying}
    for sequence in everyone:
        _check_sequence(sequence, rows_in_flight=flying[sequence])
    _require(len(running) + len(preempted) + num_waiting == len(open_), "the line and the open requests differ")
    _require({s.state for s in running} <= {SequenceState.RUNNING}, "a running sequence is in another state")
    _require({s.state for s in preempted} <= {SequenceState.PREEMPTED}, "a preempted sequence is in another state")
    line = [sequence.admission for sequence in (*running, *reversed(preempted))]
    _require(line == sorted(line), "the line is not sorted by age")
    slots = sorted([*free_slots, *(s.slot for s in everyone if s.slot != NO_SLOT)])
    _require(slots == list(range(num_slots)), "a slot is lost or held twice")
    _require(num_live == len(everyone), f"{num_live} sequences have KV and {len(everyone)} are known")


def _check_sequence(sequence: Sequence, *, rows_in_flight: int) -> None:
    what = f"request {sequence.request_id} ({sequence.state.name.lower()})"
    _require(sequence.rows_in_flight == rows_in_flight, f"{what} counts {sequence.rows_in_flight} rows in flight")
    _require(sequence.known_tokens == sequence.kv.num_tokens, f"{what} and its KV disagree about the known ids")
    holds = sequence.state is SequenceState.RUNNING or rows_in_flight > 0
    _require((sequence.slot != NO_SLOT) == holds, f"{what} has slot {sequence.slot}")
    _require(bool(sequence.kv.blocks) == holds, f"{what} holds {len(sequence.kv.blocks)} blocks")
    if sequence.state is SequenceState.RUNNING:
        marks = (sequence.computed_tokens, sequence.target_tokens, sequence.final_tokens)
        _require(marks == tuple(sorted(marks)), f"{what} has its marks out of order: {marks}")
        _require(sequence.computed_tokens <= sequence.kv.capacity_tokens, f"{what} computes beyond its blocks")


def _require(condition: bool, contradiction: str) -> None:  # noqa: FBT001 -- an assertion's condition
    if not condition:
        raise ContractViolation(contradiction)
