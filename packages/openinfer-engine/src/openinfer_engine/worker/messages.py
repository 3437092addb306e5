"""What the engine and the processes of its other ranks say to each other, over pipes or a socket; no pickle.

    engine ─► Build · Agree · RunStep … · Leave
              RunShared in the place of RunStep, where ranks are data-parallel
              LoadShare, SaveShare, PrefetchShare, LookShare, CancelTransfer between the steps, with KV tiers
              HoldAdapter, DropAdapter
              Obey between the steps, when weights change
    rank   ─► Resolved · WorkerReady · Fault
              Obeyed, once for each Obey; StepDone, once for each RunShared with a plan
              TransferEnded, once for each load, save and prefetch; AdapterHeld, once for each HoldAdapter
              TiersChanged, of a data-parallel rank, before WorkerReady and whenever its KV tiers change
    both   ─► Heartbeat, whatever else is said

Frames are those of `openinfer_core.process.wire`. End of file means that the other side is gone. Only the two ends
have the pipes, so no token is needed there; over a socket a token was shown before: `ranks.handshake`.
"""

import os
from collections.abc import Generator, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from openinfer_core import GenerateRequest, TokenLogprobs
from openinfer_core.engine import KvTierStats
from openinfer_core.errors import ContractViolation
from openinfer_core.process.wire import FrameBuffer, encode_frame
from openinfer_core.scheduling import AdapterLoad, SlotStart, StateCopy, StepPlan, StepResult
from openinfer_engine.lifecycle.orders import WeightsOrder
from openinfer_engine.ranks.placement import Placement

_READ_BYTES = 1 << 18
Column = TypeVar("Column", bound=np.generic)


class Build(msgspec.Struct, frozen=True, array_like=True, tag="build"):
    """First message to a rank: what it is a part of."""

    spec: bytes  # an `EngineSpec`, as JSON
    rank: int
    placement: Placement
    timeout_s: float  # of silence, once the rank is ready: `ranks.silence`
    wants_composition: bool  # whether its packages and files may be others than the engine's


class Agree(msgspec.Struct, frozen=True, array_like=True, tag="agree"):
    """All ranks have resolved: they load now."""

    num_blocks: int  # of the smallest pool
    ticket: bytes  # what the group is joined by: `Backend.open_group`


class Start(msgspec.Struct, frozen=True, array_like=True):
    """A `SlotStart`."""

    slot: int
    request: GenerateRequest
    seed: int
    output_token_ids: tuple[int, ...]


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """A `StepPlan`, field by field, but for what rank 0 alone reads: `token_masks`, `wants_drafts`, `released`."""

    step: int
    slots: bytes
    starts: bytes
    counts: bytes
    num_host_tokens: bytes
    max_new: bytes
    token_ids: bytes
    draft_counts: bytes
    new_block_counts: bytes
    new_blocks: bytes
    void_block_counts: bytes  # none where all are 0
    started: list[Start]
    state_restores: list[tuple[int, int, int | None]]
    state_snapshots: list[tuple[int, int]]
    adapter_loads: list[tuple[int, bytes]] = []

    @classmethod
    def of(cls, plan: StepPlan) -> "RunStep":
        return cls(
            step=plan.step,
            slots=_packed(plan.slots, np.int32),
            starts=_packed(plan.starts, np.int32),
            counts=_packed(plan.counts, np.int32),
            num_host_tokens=_packed(plan.num_host_tokens, np.int32),
            max_new=_packed(plan.max_new, np.int32),
            draft_counts=_packed(plan.draft_counts, np.int32),
            token_ids=_packed(plan.token_ids, np.int32),
            new_block_counts=_packed(plan.new_block_counts, np.int32),
            new_blocks=_packed(plan.new_blocks, np.int32),
            void_block_counts=_packed(plan.void_block_counts, np.int32) if plan.void_block_counts.any() else b"",
            started=[Start(each.slot, each.request, each.seed, each.output_token_ids) for each in plan.started],
            state_restores=[(copy.source, copy.target, copy.loaded_tokens) for copy in plan.state_restores],
            state_snapshots=[(copy.source, copy.target) for copy in plan.state_snapshots],
            adapter_loads=[(load.slot, load.digest) for load in plan.adapter_loads],
        )

    def plan(self) -> StepPlan:
        slots = np.frombuffer(self.slots, np.int32)
        new_block_counts = _unpacked_tables(self.new_block_counts, len(slots))
        return StepPlan(
            step=self.step,
            slots=slots,
            starts=np.frombuffer(self.starts, np.int32),
            counts=np.frombuffer(self.counts, np.int32),
            num_host_tokens=np.frombuffer(self.num_host_tokens, np.int32),
            max_new=np.frombuffer(self.max_new, np.int32),
            draft_counts=np.frombuffer(self.draft_counts, np.int32),
            token_ids=np.frombuffer(self.token_ids, np.int32),
            new_block_counts=new_block_counts,
            new_blocks=np.frombuffer(self.new_blocks, np.int32),
            void_block_counts=(
                _unpacked_tables(self.void_block_counts, len(slots))
                if self.void_block_counts
                else np.zeros_like(new_block_counts)
            ),
            started=tuple(
                SlotStart(slot=each.slot, request=each.request, seed=each.seed, output_token_ids=each.output_token_ids)
                for each in self.started
            ),
            state_restores=tuple(
                StateCopy(source=source, target=target, loaded_tokens=loaded_tokens)
                for source, target, loaded_tokens in self.state_restores
            ),
            state_snapshots=tuple(StateCopy(source=source, target=target) for source, target in self.state_snapshots),
            adapter_loads=tuple(AdapterLoad(slot=slot, digest=digest) for slot, digest in self.adapter_loads),
        )


class RunShared(msgspec.Struct, frozen=True, array_like=True, tag="shared"):
    """A step of all data-parallel ranks, with the plan of the rank that it goes to, which samples its own rows."""

    counts: list[int]  # tokens of each rank
    is_decode: bool  # whether all ranks have rows of one token alone
    plan: RunStep | None
    token_masks: list[tuple[int, int, bytes]]  # row, sampled position, words

    @classmethod
    def of(cls, plan: StepPlan | None, counts: Sequence[int], *, is_decode: bool) -> "RunShared":
        if plan is None:
            return cls(list(counts), is_decode, None, [])
        masks = [(row, position, _packed(words, np.uint32)) for (row, position), words in plan.token_masks.items()]
        return cls(list(counts), is_decode, RunStep.of(plan), masks)

    def step_plan(self) -> StepPlan | None:
        if self.plan is None:
            return None
        masks = {(row, position): np.frombuffer(words, np.uint32) for row, position, words in self.token_masks}
        return replace(self.plan.plan(), token_masks=masks)


class LoadShare(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """The rank fills places of its pool with as much of a chain as its KV tiers hold."""

    number: int  # of the load or save, in this engine
    digests: bytes  # one after the other
    places: bytes  # int32, as many


class SaveShare(msgspec.Struct, frozen=True, array_like=True, tag="save"):
    """The rank saves places of its pool, which no later step writes to, in its KV tiers."""

    number: int
    digests: bytes
    places: bytes


class PrefetchShare(msgspec.Struct, frozen=True, array_like=True, tag="prefetch"):
    """The rank brings what its slow KV tiers have of a chain into its fastest one."""

    number: int
    digests: bytes


class LookShare(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """The rank's KV tiers look for what other processes have stored; not answered."""

    digest: bytes  # of a block that they were not known to hold


class CancelTransfer(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """A load or save is to end early; one that has ended is not meant."""

    number: int


class Obey(msgspec.Struct, frozen=True, array_like=True, tag="obey"):
    """The rank changes its weights, or its memory, after the steps that came before."""

    number: int  # of the order, in this engine
    order: WeightsOrder


class Obeyed(msgspec.Struct, frozen=True, array_like=True, tag="obeyed"):
    """The rank has done what an order asked, or could not, and lives on."""

    number: int
    failure: str | None


class HoldAdapter(msgspec.Struct, frozen=True, array_like=True, tag="hold_adapter"):
    """The rank reads an adapter, and keeps its share in host memory; answered by `AdapterHeld`."""

    number: int
    folder: str
    digest: bytes  # what its content must be


class DropAdapter(msgspec.Struct, frozen=True, array_like=True, tag="drop_adapter"):
    """The rank need not keep an adapter in host memory; slots keep theirs."""

    digest: bytes


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """The engine closes: no step follows."""


class Resolved(msgspec.Struct, frozen=True, array_like=True, tag="resolved"):
    """The rank's device is open, and what it can hold is known."""

    num_blocks: int  # of its own pool
    composition: dict[str, str] = {}  # what it computes with, if that was wanted: `ranks.composition`


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """The sender lives."""


class WorkerReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The rank is loaded and warm."""


class TransferEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A load or save touches the rank's pool no more."""

    number: int
    completed_blocks: int  # of a load, how many leading blocks hold their right bytes
    faults: int  # of the rank's tiers, so far
    stats: tuple[KvTierStats, ...]  # of the rank's tiers, so far


class TiersChanged(msgspec.Struct, frozen=True, array_like=True, tag="tiers"):
    """Blocks can be found in the rank's KV tiers from now on, or no longer."""

    digests: bytes  # one after the other
    is_stored: bool


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The `StepResult` of a data-parallel rank, which has no drafts."""

    step: int
    new_counts: bytes
    token_ids: bytes
    logprobs: dict[int, tuple[TokenLogprobs, ...]]
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]
    failed_rows: dict[int, str]

    @classmethod
    def of(cls, step: int, result: StepResult) -> "StepDone":
        return cls(
            step=step,
            new_counts=_packed(result.new_counts, np.int32),
            token_ids=_packed(result.token_ids, np.int32),
            logprobs=dict(result.logprobs),
            prompt_logprobs=dict(result.prompt_logprobs),
            failed_rows=dict(result.failed_rows),
        )

    def result(self) -> StepResult:
        return StepResult(
            new_counts=np.frombuffer(self.new_counts, np.int32),
            token_ids=np.frombuffer(self.token_ids, np.int32),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            failed_rows=self.failed_rows,
        )


class AdapterHeld(msgspec.Struct, frozen=True, array_like=True, tag="adapter_held"):
    """The rank holds its share of an adapter, or cannot."""

    number: int
    num_bytes: int
    refusal: str | None


class FaultKind(StrEnum):
    """Why a rank cannot go on."""

    REFUSED = "refused"  # what was asked is not possible
    FAILED = "failed"  # it found a fault of its own
    BROKEN = "broken"  # another rank did


class Fault(msgspec.Struct, frozen=True, array_like=True, tag="fault"):
    """The rank cannot go on, and ends."""

    kind: FaultKind
    message: str


ToRank: TypeAlias = (
    Build
    | Agree
    | RunStep
    | RunShared
    | LoadShare
    | SaveShare
    | PrefetchShare
    | LookShare
    | CancelTransfer
    | HoldAdapter
    | DropAdapter
    | Obey
    | Heartbeat
    | Leave
)
FromRank: TypeAlias = (
    Resolved | WorkerReady | StepDone | TransferEnded | TiersChanged | AdapterHeld | Obeyed | Heartbeat | Fault
)

to_rank_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
from_rank_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def send(descriptor: int, message: ToRank | FromRank) -> None:
    """Writes one message, whole; `BrokenPipeError` if the other side is gone."""
    write_all(descriptor, encode_frame(message))


def write_all(descriptor: int, frame: bytes | bytearray) -> None:
    """Writes one frame, whole; raises as `send`."""
    left = memoryview(frame)
    while left:
        left = left[os.write(descriptor, left) :]


def bodies(descriptor: int) -> Generator[bytes]:
    """The frames that come until the other side closes its end; `ContractViolation` if that is within a frame."""
    frames = FrameBuffer()
    while data := os.read(descriptor, _READ_BYTES):
        yield from frames.feed(data)
    if len(frames):
        raise ContractViolation("the link between the engine and a rank ended within a message")


def _packed(column: NDArray[Column], dtype: type[Column]) -> bytes:
    return np.ascontiguousarray(column, dtype).tobytes()


def _unpacked_tables(data: bytes, num_rows: int) -> NDArray[np.int32]:
    # With no rows, how many tables there are is not to be seen, and means nothing.
    return np.frombuffer(data, np.int32).reshape(-1 if num_rows else 1, num_rows)
