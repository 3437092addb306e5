"""`EngineHandle`: an engine as its caller sees it, in this process or in another one."""

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from openinfer_core.events import TokenEvent
from openinfer_core.plugins import SCHEDULERS
from openinfer_core.process.timeline import StartPhase
from openinfer_core.request import GenerateRequest, RequestId

if TYPE_CHECKING:
    from openinfer_core.control import ControlCommand


class EngineCapability(StrEnum):
    """What an engine may be able to do beyond serving requests; it refuses by name what it cannot."""

    KV_TRANSFER = "kv_transfer"
    """`GenerateRequest.transfer`."""
    FLUSH_CACHE = "flush_cache"
    LOAD_ADAPTER = "load_adapter"
    PAUSE = "pause"
    SLEEP = "sleep"
    UPDATE_WEIGHTS = "update_weights"
    PREDICTIONS = "predictions"
    """`GenerateRequest.prediction_token_ids`."""


class EngineState(StrEnum):
    """Whether an engine serves, and if not, what has to happen first."""

    SERVING = "serving"
    PAUSED = "paused"
    """Until `Resume`; requests wait."""
    ASLEEP = "asleep"
    """Until `Wake`; requests fail with `UNAVAILABLE`."""
    WITHOUT_WEIGHTS = "without_weights"
    """Until a complete `UpdateWeights`, because the last one failed or nothing could be read after a sleep; requests
    fail with `UNAVAILABLE`."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What does not change while an engine lives."""

    model: str
    """Name of the model folder."""
    family: str
    max_model_tokens: int
    """Longest context: prompt and completion together."""
    num_token_ids: int
    """Ids from here on are padding of the embedding: refused in prompts and never sampled."""
    eos_token_ids: tuple[int, ...]
    """Stop tokens of the model; a frontend adds them to `stop_token_ids` unless told to ignore them."""
    block_size_tokens: int
    num_blocks: int
    max_num_seqs: int
    """Sequences in one step at most."""
    max_adapters: int = 0
    """Adapters that requests of one step may use at most; 0: none are served."""
    max_waiting: int
    """Requests in the queue at most; beyond it `submit` is answered with `Failed(OVERLOADED)`."""
    capabilities: tuple[EngineCapability, ...] = ()
    composition: dict[str, str] = {}
    """What supplies each part: name -> distribution and version, as `openinfer plan` prints it."""
    start: tuple[StartPhase, ...] = ()
    """Where the time of its start went; empty for an engine that does not say."""
    memory_bytes: dict[str, int] = {}
    """The ledger of its device's memory: purpose -> bytes, as `openinfer plan` prints it."""
    kv_layout_digest: str = ""
    """Names the layout of its KV and the checkpoint: part of every block's digest, so that with the same digest key two
    engines name equal blocks alike if these are equal. Empty for an engine that does not say."""


def adapter_part(name: str) -> str:
    """The part of `EngineInfo.composition` that says which adapter was loaded at the start under a name."""
    return f"adapter {name}"


class KvTierStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Totals of one KV tier since the engine began, but for `stored_blocks`, which is a gauge."""

    tier: str
    """Its name."""
    finds: int = 0
    """Times it was asked for a chain, or a part of one."""
    hit_blocks: int = 0
    missed_blocks: int = 0
    loaded_blocks: int = 0
    saved_blocks: int = 0
    evicted_blocks: int = 0
    corrupt_blocks: int = 0
    """Dropped, because their bytes did not fit their checksum."""
    stored_blocks: int = 0
    """Held at this moment."""
    failures: dict[str, int] = {}
    """Partial transfers, by reason; each cost a recomputation at most."""
    condition: str = "ok"
    """How it does: `ok`, or what is wrong with it for longer than a transfer, such as `full`; of several ranks, what is
    wrong with one."""


MASK_OUTCOMES = ("in_time", "late", "refused", "unwanted")
"""What became of a mask: it was there for the next step or was not, its request failed, or it had ended."""


class GrammarStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a grammar compiler keeps at this moment, and what it has used since the engine began."""

    kept: int = 0
    """Grammars, and refusals of some, that are there at once when they come again."""
    kept_bytes: int = 0
    """Their memory, about."""
    max_kept_bytes: int = 0
    waiting: int = 0
    """Requests whose grammar waits for the compiler's thread."""
    compile_s: float = 0.0
    """Seconds of that thread."""
    guard_faults: int = 0
    """Times that a process that checks grammars was killed, stalled or could not be started."""
    mask_s: dict[str, float] = {}
    """Seconds of processor time in which masks were computed, by `MASK_OUTCOMES`."""
    masks_computed: int = 0
    masks_shared: int = 0
    """Masks that were taken from another request, or from an earlier one, that stood in the same place."""
    mask_wait_s: float = 0.0
    """Seconds that steps have waited for masks."""
    rows_sat_out: int = 0
    """Rows that steps went without, because their mask was not computed yet."""
    masks_pending: int = 0
    """Masks that are to be computed at this moment."""
    kept_owners: int = 0
    """Tenants that grammars are kept for."""
    evicted: int = 0
    """Grammars, and refusals, that made room for others."""
    renewed: int = 0
    """Times that a grammar's lexer was made anew, because outputs had made it grow to its bound."""


class AdapterStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter that requests may name, at this moment."""

    name: str
    digest: str
    """Of its content, in hexadecimal digits."""
    path: str
    """Its folder on the engine's machine: for operators alone."""
    rank: int
    tenants: tuple[str, ...] = ()
    """Who may see and use it; none named: all."""
    running: int = 0
    """Unfinished requests that were admitted."""
    waiting: int = 0


class PluginFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often a plug-in broke its contract, since the engine began."""

    group: str
    """Of entry points, such as `openinfer.schedulers`."""
    plugin: str
    """Its name, its distribution and that one's version, as `EngineInfo.composition` has them."""
    counts: dict[str, int]
    """By kind; those that never happened are there with 0."""


class SlowCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plug-in has had the step loop, or a thread for masks, for longer than a second, and cannot be interrupted."""

    plugin: str
    call: str
    """What it was called for: `plan`, `apply`, `add` or `abort`; of a queue policy its own call, such as `key`; of a
    grammar's matcher, `fill`."""
    age_s: float
    group: str = SCHEDULERS
    """Of entry points."""


class KvTransferStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests whose KV goes from one engine to another, since the engine began."""

    prompts: int = 0
    """Prompts left for other engines."""
    tokens: int = 0
    """Of these, tokens that could be read by others when the request was answered."""
    partial_prompts: int = 0
    """Prompts of which less than all full blocks could be read by then."""
    mismatches: int = 0
    """Requests that came with another layout's blocks, or another prompt's; they were computed."""
    late_look_ups: int = 0
    """Requests that went on before the tiers had said what other engines saved."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A snapshot of gauges and counters (counters start at 0 with the engine)."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Tokens that the requests in the queue have yet to compute before their first one, about."""
    blocks_used: int = 0
    """Blocks that belong to a running sequence."""
    blocks_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    """Given tokens computed: prompts, without what a cache had, and what preemptions made sequences compute again."""
    cached_tokens: int = 0
    """Prompt tokens found in a cache."""
    generated_tokens: int = 0
    preemptions: int = 0
    share_preemptions: int = 0
    """Of these, those by which a tenant beyond its share of slots or blocks made room for another."""
    share_rows_sat_out: int = 0
    """Decode rows that a step went without, because more of their tenant's would have made another's slow."""
    tenants: int = 0
    """Tenants that have requests running or waiting."""
    protected_blocks: int = 0
    """Blocks of cached prefixes that tenants below their share of the pool keep, though others wait for blocks."""
    wasted_rows: int = 0
    """Rows computed after their sequence had ended: the price of overlap."""
    failed_requests: int = 0
    spec_decode_num_drafts: int = 0
    """Rows whose drafts were compared with what was sampled."""
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    """Drafts that were what was sampled; the mean length of a row is 1 + accepted tokens / drafts."""
    spec_decode_num_accepted_tokens_per_pos: tuple[int, ...] = ()
    """The same by place among a row's drafts, from the first on."""
    policy_faults: int = 0
    """Times the queue policy raised; each cost the request it was asked about."""
    drafter_faults: int = 0
    """Times the drafter raised, or returned no drafts; it is not used after that."""
    state_snapshots: int = 0
    """Copies of recurrent states at prefix boundaries that can be found."""
    evicted_state_snapshots: int = 0
    """Such copies given up for others."""
    loading: int = 0
    """Sequences whose prefix is on its way from a KV tier; part of `waiting`."""
    tier_tokens: int = 0
    """Of `cached_tokens` and of what preempted sequences resumed with, those that came from KV tiers; with recurrent
    states, those that were not computed because tiers had their KV, or the states after it."""
    retained_blocks: int = 0
    """Blocks that were asked to be kept longer than others (`GenerateRequest.retain_s`), in use or idle."""
    unsaved_blocks: int = 0
    """Blocks, and chunks of recurrent states, that KV tiers were not given, because too many were on their way."""
    kv_tier_faults: int = 0
    """Times a KV tier raised where it may not; it is not used after that."""
    kv_tiers: tuple[KvTierStats, ...] = ()
    """One for each KV tier, fastest first."""
    kv_transfer: KvTransferStats | None = None
    """None for an engine that hands no KV to others."""
    grammars: GrammarStats | None = None
    """None without a grammar compiler, or with one that does not say."""
    adapters: tuple[AdapterStats, ...] = ()
    """By name."""
    plugin_faults: tuple[PluginFaults, ...] = ()
    """One for each plug-in that is guarded; of a queue policy once it has been slow."""
    slow_call: SlowCall | None = None
    state: EngineState = EngineState.SERVING
    weights_version: str = ""
    """What KV is told apart by since the weights were changed; empty for those that the engine began with."""
    weight_updates: int = 0
    """Complete ones."""
    failed_weight_updates: int = 0
    """Those that left the engine without weights."""
    sleeps: int = 0
    step_age_s: float = 0.0
    """Seconds since the loop last completed an iteration while there was work; 0 when idle. Health is this number."""
    prefetched_blocks: int = 0
    """Blocks that were brought from slow KV tiers into the fastest one for requests that waited."""
    early_blocks: int = 0
    """Blocks that came from KV tiers for turns of conversations that had not arrived yet."""
    early_unused_blocks: int = 0
    """Of these, given up before a turn used them."""


@runtime_checkable
class ElasticQueue(Protocol):
    """An `EngineHandle` of several engines that come and go, whose queues have other places than `info` says then."""

    @property
    def max_waiting(self) -> int:
        """Requests that may wait in the queues of those that get requests now; 0 while there are none."""
        ...


@runtime_checkable
class EngineHandle(Protocol):
    """An engine that runs. `submit` and `abort` never block; answers arrive as events.

    One task consumes `events()`. All methods are called from the thread of that task's event loop.
    """

    @property
    def info(self) -> EngineInfo:
        """What does not change while the engine lives."""
        ...

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request. It is answered by exactly one terminal event, also when it cannot be served.

        Raises:
            EngineClosed: the engine has ended.
            InvalidRequest: the request's id is that of one that has not ended.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """Ends a request with `Finished(ABORT)`; does nothing if it has ended or is unknown."""
        ...

    def events(self) -> AsyncIterator[list[TokenEvent]]:
        """Yields all events that are there, each time there are any.

        Ends after `close`. When the engine dies, yields `Failed(SHUTDOWN)` for every open request and then
        raises `EngineClosed`.
        """
        ...

    async def stats(self) -> EngineStats:
        """A fresh snapshot.

        Raises:
            EngineClosed: the engine has ended.
        """
        ...

    async def control(self, command: "ControlCommand") -> None:
        """Has the engine do something beside serving requests, after the requests submitted before.

        Raises:
            InvalidRequest: a value of the command is out of range, or of another type; the engine has not heard of it.
            Refused: it cannot do that (`EngineInfo.capabilities`), or not now; the message says which.
            EngineClosed: the engine has ended.
        """
        ...

    async def close(self) -> None:
        """Ends the engine: open requests get `Failed(SHUTDOWN)`, resources are freed. Idempotent."""
        ...
