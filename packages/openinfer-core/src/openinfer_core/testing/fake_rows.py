"""Rows of a fake device, and what a planned row must be."""

from dataclasses import dataclass, field

from openinfer_core.request import GenerateRequest
from openinfer_core.scheduling import SchedulerConfig
from openinfer_core.testing.errors import require


@dataclass(slots=True)
class FakeSlot:
    """A sequence in a slot of a fake device."""

    request: GenerateRequest
    token_ids: list[int]  # given and sampled ids, by position
    states: list[int]  # the fake model's state at each of them
    end: int | None = None  # position after the last one computed and kept; None before the first row
    num_sampled: int = 0  # how many of `token_ids` were sampled in this sequence slot
    drafts: list[int] = field(default_factory=list[int])  # that follow the last sampled id
    # step -> drafts of its row that were rejected; a scheduler learns of them when the step is applied
    rejected: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def what(self) -> str:
        return f"request {self.request.request_id}"

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)


@dataclass(slots=True)
class FakeRow:
    """A row while it is computed."""

    slot: FakeSlot
    planned_start: int
    start: int  # where it is computed: the planned start, less what was rejected and is not known to be
    count: int
    host_ids: list[int]
    draft_count: int  # device drafts
    max_new: int
    kv: list[int]  # the state at each of its positions, of a wrong prefix from a wrong draft on
    masks: list[int]  # tokens that may be sampled at each sampled position, by bits; all after the last
    num_compared: int = 0  # drafts that were there
    new_ids: list[int] = field(default_factory=list[int])

    @property
    def num_drafts(self) -> int:
        return max(0, self.max_new - 1)

    @property
    def known_end(self) -> int:
        return self.start + self.count - self.num_drafts

    @property
    def end(self) -> int:
        # Position after the last one that is kept.
        return self.known_end + max(0, len(self.new_ids) - 1)

    @property
    def what(self) -> str:
        return f"{self.slot.what}, row {self.planned_start}:{self.planned_start + self.count}"


def check_row(row: FakeRow, config: SchedulerConfig) -> None:
    """What a row must be, given what its slot has been through."""
    slot = row.slot
    known, planned_end = len(slot.token_ids), row.planned_start + row.count
    if slot.end is None:
        require(row.start >= 0, lambda: f"{row.what}: begins before the sequence")
    else:
        bound = slot.end + sum(slot.rejected.values())
        require(row.start == slot.end, lambda: f"{row.what}: its last row ended at {bound}, drafts in flight included")
    require(row.count > 0, lambda: f"{row.what}: no tokens")
    _check_drafts(row, config)
    require(row.known_end <= known, lambda: f"{row.what}: only {known} ids are there")
    from_device = row.count - len(row.host_ids) - row.draft_count
    require(from_device in (0, 1), lambda: f"{row.what}: {from_device} ids are to come from the device, at most 1 can")
    if from_device:
        is_there = slot.num_sampled > 0 and row.start == known - 1
        require(is_there, lambda: f"{row.what}: no id of that position was sampled in the slot")
    right = slot.token_ids[row.start + from_device : row.known_end]
    given = row.host_ids[: row.known_end - row.start - from_device]
    require(given == right, lambda: f"{row.what}: ids {given} are given; its ids are {right}")
    if row.max_new:
        require(row.known_end == known, lambda: f"{row.what}: samples position {row.known_end}, whose id is known")
    require(planned_end <= config.max_model_tokens, lambda: f"{row.what}: beyond max_model_tokens")


def _check_drafts(row: FakeRow, config: SchedulerConfig) -> None:
    most = config.max_drafts
    require(row.max_new >= 0, lambda: f"{row.what}: max_new is {row.max_new}")
    require(row.num_drafts <= most, lambda: f"{row.what}: {row.num_drafts} drafts; max_drafts is {most}")
    require(
        0 <= row.draft_count <= row.num_drafts,
        lambda: (
            f"{row.what}: {row.draft_count} drafts of the device, and max_new of {row.max_new} leaves {row.num_drafts}"
        ),
    )
    host_drafts = row.num_drafts - row.draft_count
    require(
        host_drafts <= len(row.host_ids), lambda: f"{row.what}: {host_drafts} drafts and {len(row.host_ids)} ids given"
    )
    require(row.known_end > row.start, lambda: f"{row.what}: all of its positions are drafts")
    is_exact = not any(row.slot.rejected.values())
    from_device = row.count - len(row.host_ids) - row.draft_count
    require(
        is_exact or from_device, lambda: f"{row.what}: drafts are in flight, and it does not begin with the last id"
    )
