"""One request inside the scheduler, and the states it goes through.

                admit             preempt
    waiting ────────────► running ◄────────► preempted
       │                     │      resume       │
       │ finish              │ finish            │ finish
       └─────────────────────┴───────────────────┴──────► finished

    waiting    in the queue, without slot and blocks
    loading    with KV tiers, between waiting or preempted and running: has slot and blocks, and its prefix is on its
               way; gives way to preempted, and finishes like the others
    running    has a slot, and blocks for every position it has computed or that is planned
    preempted  gave way when blocks were short; resumes from the ids it knows, before anything waiting is admitted
    finished   its terminal event is out; it is never planned again

`Sequence.transition` enforces the diagram. A preempted or finished sequence keeps its slot and blocks while a step in
flight has a row of it (`rows_in_flight`), because that step still writes to them.

Positions of a running sequence, each mark at or after the one before it:

    0 ──── given ────► given_tokens ──── from the device ────► target_tokens ────► final_tokens
                computed_tokens transfers from the cached prefix to target_tokens

Its blocks have room up to `capacity_tokens`: for all given ids, unless a block table has a window; then for the next
ones, and a row of given ids ends there.

`given_tokens` ids were known when it took its slot and are sent by the host. Every later id is sampled in the
slot and read on the device, so that a step can be planned before the last one's ids are known.

While drafts are in flight (`drafts_in_flight`), `computed_tokens` and `target_tokens` are upper bounds, as if all were
accepted; when their step is applied, both are lowered by what was not (`reject`).
"""

from collections.abc import Sequence as ListLike
from enum import IntEnum

import msgspec

from openinfer_core.errors import ContractViolation
from openinfer_core.request import GenerateRequest, LoadedAdapter
from openinfer_core.scheduling import SlotStart
from openinfer_engine.scheduler.drafts.record import DraftRecord
from openinfer_engine.scheduler.states.load import StateLoad
from openinfer_kv_cache import BlockSequence, TableLoad

NO_SLOT = -1


class SequenceState(IntEnum):
    """See the module's diagram."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3
    LOADING = 4


_TRANSITIONS = frozenset(
    {
        (SequenceState.WAITING, SequenceState.RUNNING),
        (SequenceState.WAITING, SequenceState.FINISHED),
        (SequenceState.RUNNING, SequenceState.PREEMPTED),
        (SequenceState.RUNNING, SequenceState.FINISHED),
        (SequenceState.PREEMPTED, SequenceState.RUNNING),
        (SequenceState.PREEMPTED, SequenceState.FINISHED),
        (SequenceState.WAITING, SequenceState.LOADING),
        (SequenceState.PREEMPTED, SequenceState.LOADING),
        (SequenceState.LOADING, SequenceState.RUNNING),
        (SequenceState.LOADING, SequenceState.PREEMPTED),
        (SequenceState.LOADING, SequenceState.FINISHED),
    }
)


def count_limit_tokens(request: GenerateRequest, max_model_tokens: int) -> int:
    return min(len(request.prompt_token_ids) + request.sampling.max_tokens, max_model_tokens)


def count_final_tokens(request: GenerateRequest, max_model_tokens: int) -> int:
    """Positions a request ever computes: the last sampled token is never fed back."""
    limit_tokens = count_limit_tokens(request, max_model_tokens)
    return limit_tokens - 1 if request.sampling.max_tokens else limit_tokens


class Sequence:
    """What the scheduler knows of one request. Plain attributes: the step's loops read them."""

    __slots__ = (
        "accepted_drafts",
        "adapter_slot",
        "admission",
        "arrived_s",
        "asked_tiers",
        "cached_tokens",
        "capacity_tokens",
        "computed_tokens",
        "draft_record",
        "drafts",
        "drafts_in_flight",
        "estimated_s",
        "final_tokens",
        "given_tokens",
        "has_policy_fault",
        "has_run",
        "is_announced",
        "is_masked",
        "known_tokens",
        "kv",
        "limit_tokens",
        "load",
        "prompt_logprobs_sent",
        "prompt_tokens",
        "rejected_drafts",
        "request",
        "request_id",
        "rows_in_flight",
        "samples",
        "seed",
        "sent_blocks",
        "slot",
        "snapshot_positions",
        "state",
        "stop_token_ids",
        "target_tokens",
        "uncached_tokens",
    )

    def __init__(
        self, request: GenerateRequest, kv: BlockSequence, *, seed: int, arrived_s: float, max_model_tokens: int
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.kv = kv
        self.seed = seed
        self.arrived_s = arrived_s
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self.state = SequenceState.WAITING
        self.admission = -1  # number in order of first admission: its age
        self.slot = NO_SLOT
        self.rows_in_flight = 0
        self.prompt_tokens = len(request.prompt_token_ids)
        self.known_tokens = self.prompt_tokens  # ids that `kv` holds: the prompt's and those of applied steps
        self.limit_tokens = count_limit_tokens(request, max_model_tokens)
        self.final_tokens = count_final_tokens(request, max_model_tokens)
        # whether anything is generated; otherwise only the prompt's log-probabilities are wanted
        self.samples = request.sampling.max_tokens > 0
        self.given_tokens = self.target_tokens = self.computed_tokens = self.capacity_tokens = 0
        self.sent_blocks: list[int] = []  # entries of each block table that rows were sent with
        # positions at which rows end so that the recurrent states before them can be kept, ascending
        self.snapshot_positions: tuple[int, ...] = ()
        self.cached_tokens = 0  # that it began to run with, the first time
        # about what it would compute if it began now, and when that was looked up: `CachedFirst`
        self.uncached_tokens = self.prompt_tokens
        self.estimated_s: float | None = None
        self.has_run = False
        # its prefix on the way from KV tiers; until it is over its blocks stay
        self.load: TableLoad | StateLoad | None = None
        # whether tiers were asked for what it would compute: once, and again after a preemption
        self.asked_tiers = False
        self.adapter_slot = NO_SLOT  # from its first admission on, until it has ended
        self.has_policy_fault = False  # whether the queue policy raised on it; then its first row fails
        self.is_masked = request.sampling.is_masked  # whether it waits for each token before the next row is planned
        # host drafts of its next row, with a grammar, and those of all rows in flight
        self.drafts: tuple[int, ...] = ()
        self.drafts_in_flight = 0
        self.accepted_drafts = self.rejected_drafts = 0
        self.draft_record = DraftRecord()
        self.is_announced = False  # whether `Scheduled` is out
        self.prompt_logprobs_sent = 0

    def transition(self, state: SequenceState) -> None:
        """Raises `ContractViolation` if the diagram has no such arrow."""
        if (self.state, state) not in _TRANSITIONS:
            raise ContractViolation(f"request {self.request_id} cannot go from {self.state.name} to {state.name}")
        self.state = state

    @property
    def is_held(self) -> bool:
        return self.rows_in_flight > 0 or self.load is not None

    @property
    def completion_tokens(self) -> int:
        return self.known_tokens - self.prompt_tokens

    @property
    def may_stop(self) -> bool:
        return self.completion_tokens >= self.request.sampling.min_tokens

    def count_before_stop(self, token_ids: list[int]) -> int:
        """How many of the tokens sampled next come before one that ends the request; all if none does."""
        first = max(0, self.request.sampling.min_tokens - self.completion_tokens)
        stops = (index for index in range(first, len(token_ids)) if token_ids[index] in self.stop_token_ids)
        return next(stops, len(token_ids))

    @property
    def may_match(self) -> bool:
        """Whether a cached prefix helps; not while log-probabilities of prompt positions are still owed."""
        owes_logprobs = self.request.sampling.prompt_logprobs is not None
        return not owes_logprobs or self.prompt_logprobs_sent >= self.prompt_tokens - 1

    def reject(self, num_drafts: int) -> None:
        """Lowers the bounds: so many drafts of a row that was applied were not accepted."""
        if num_drafts:
            self.computed_tokens -= num_drafts
            self.target_tokens = self.computed_tokens + 1

    def take_unsent_blocks(self, table: int) -> ListLike[int]:
        """What a block table has grown by since the last row of the sequence, void entries at its start left out."""
        place, first = self.kv.tables[table], self.sent_blocks[table]
        first = max(first, place.num_void)
        added = place.blocks[first:]
        self.sent_blocks[table] = first + len(added)
        return added

    def take_slot(self, *, cached_tokens: int) -> SlotStart:
        """Begins, or begins again, to run in its slot, with blocks for every known id; see `capacity_tokens`."""
        self.computed_tokens = cached_tokens
        self.given_tokens = self.target_tokens = self.known_tokens
        self.drafts = ()
        self.capacity_tokens = self.kv.capacity_tokens
        self.sent_blocks = [0] * len(self.kv.tables)
        return SlotStart(
            slot=self.slot,
            request=self._placed_request(),
            seed=self.seed,
            output_token_ids=tuple(self.kv.token_ids[self.prompt_tokens :]),
        )

    def _placed_request(self) -> GenerateRequest:
        """With the adapter slot that the sequence was given."""
        adapter = self.request.adapter
        if adapter is None or self.adapter_slot == NO_SLOT:
            return self.request
        placed = LoadedAdapter(digest=adapter.digest, slot=self.adapter_slot)
        return msgspec.structs.replace(self.request, adapter=placed)
