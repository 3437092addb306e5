"""Resolving a model folder and options into everything an engine is made of, before a weight is read."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from openinfer_core import (
    EngineCapability,
    EngineInfo,
    FamilyPlan,
    Plugin,
    Refused,
    find_plugin,
    read_config,
)
from openinfer_core.engine import adapter_part
from openinfer_core.grammars import GrammarCompiler, Vocabulary
from openinfer_core.plugins import QUEUE_POLICIES, SCHEDULERS
from openinfer_core.process.timeline import Timeline
from openinfer_core.scheduling import Scheduler, SchedulerConfig
from openinfer_engine.backends import Backend, open_backend
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.data_parallel.choice import check_data_parallel
from openinfer_engine.drafting import ChosenDrafter, choose_drafter
from openinfer_engine.grammars.choice import choose_grammar_compiler, make_grammar_compiler
from openinfer_engine.guard import GuardOptions, PlanCheck
from openinfer_engine.kernel_providers import ChosenProvider, choose_providers_of_model
from openinfer_engine.kv_events.opening import open_kv_events
from openinfer_engine.kv_events.recorder import KvEventRecorder
from openinfer_engine.kv_tables import TableChoice, capabilities_of, choose_tables
from openinfer_engine.kv_tiers.choice import (
    ChosenTiers,
    OpenTiers,
    choose_tiers,
    read_digest_key,
    require_snapshots,
)
from openinfer_engine.kv_transfer.checks import require_whole_prefixes
from openinfer_engine.lora.choice import adapter_bytes, check_adapters
from openinfer_engine.low_bit import check_low_bit, described_low_bit
from openinfer_engine.memory_plan import (
    drafter_bytes_next_to_weights,
    kv_cache_tokens,
    kv_tokens_per_gib,
    num_blocks_of_pool,
    num_snapshots_of_pool,
    plan_ranks,
    possible_ranks,
    slot_bytes_of_rank,
    weights_of_rank,
)
from openinfer_engine.model import ModelDefinition, ModelLimits
from openinfer_engine.options import DEFAULT_QUEUE_POLICY, EngineOptions, LoadFormat, LowBitActivations
from openinfer_engine.ranks.placement import Placement
from openinfer_engine.scheduler.choice import check_capabilities, make_scheduler, origin_of
from openinfer_engine.served_context import context_of_pool, fit_context, longest_context, told_context
from openinfer_engine.vocabulary import read_eos_token_ids, read_num_token_ids
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_engine.weights.fingerprint import fingerprint
from openinfer_engine.weights.quantization_config import QuantisedConfig
from openinfer_engine.weights.stored_config import check_stored
from openinfer_engine.weights.weight_bytes import RankWeights
from openinfer_engine.worker.kv_cache_dtype import check_scales, choose_kv_dtype, described_kv_dtype
from openinfer_kv_cache import KvDtype, KvLayout, KvSpec

_OUR_DISTRIBUTION = "openinfer-engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Everything that is known before loading."""

    definition: ModelDefinition[Any]
    config: Any  # the definition's typed config
    model_type: str
    model_dir: Path
    options: EngineOptions
    backend: Backend
    worker_limits: WorkerLimits
    model_context_tokens: int  # the model's own, of which `worker_limits` has what the pool holds
    eos_token_ids: tuple[int, ...]
    layouts: tuple[KvLayout, ...]  # one per rank
    tables: TableChoice
    num_blocks: int
    weights_bytes: int  # of one rank
    weight_kernels: Mapping[str, str]  # of quantised weights, by format
    scheduler: Plugin
    queue_policy: Plugin
    grammar_compiler: Plugin | None
    drafter: ChosenDrafter | None
    drafter_bytes: int  # of its weights on one rank, at most
    kernel_providers: tuple[ChosenProvider, ...]
    tiers: ChosenTiers | None  # where KV blocks go in addition to the pool
    adapters: Mapping[str, str]  # of those loaded at the start, name -> rank and content
    timeline: Timeline
    placement: Placement | None = None  # of ranks that are not all on this machine

    @property
    def has_states(self) -> bool:
        """Whether the model keeps recurrent states, too; then prefixes are shared where copies are kept."""
        return self.layouts[0].slot_bytes > 0

    def with_num_blocks(self, num_blocks: int) -> "EnginePlan":
        """The same with a pool of so many blocks, which is no larger: the smallest that a rank has."""
        limits = self.worker_limits
        fitting = replace(
            limits,
            num_snapshots=min(limits.num_snapshots, num_blocks),
            max_model_tokens=context_of_pool(num_blocks, limits.max_model_tokens, self.layouts[0].blocks_for_context),
        )
        return replace(self, num_blocks=num_blocks, worker_limits=fitting)

    def placed(self, placement: Placement) -> "EnginePlan":
        """The same for ranks elsewhere than where it was resolved for; rank 0 is here all the same."""
        if not placement.spans_nodes or self.placement == placement:
            return self
        return replace(self, placement=placement, backend=open_backend(self.options, placement=placement))

    @property
    def _asked_limits(self) -> WorkerLimits:
        return replace(self.worker_limits, max_model_tokens=self.options.max_model_tokens or self.model_context_tokens)

    @property
    def clipped_context(self) -> str | None:
        """Why the context is shorter than what was asked for, or than the model's own; None if it is not."""
        served = self.worker_limits.max_model_tokens
        if served == self._asked_limits.max_model_tokens:
            return None
        return told_context(served, self.model_context_tokens, self.options)

    def mark(self, phase: str) -> None:
        self.timeline.mark(phase, device_bytes=self.backend.used_bytes())

    @property
    def scheduler_config(self) -> SchedulerConfig:
        options = self.options
        return SchedulerConfig(
            num_blocks=self.num_blocks,
            block_size_tokens=options.block_size_tokens,
            table_windows=self.layouts[0].table_windows,
            max_num_seqs=options.max_num_seqs,
            max_step_tokens=options.max_step_tokens,
            max_model_tokens=self.worker_limits.max_model_tokens,
            max_waiting=options.max_waiting,
            prefix_cache=options.prefix_cache and not self.has_states,
            num_snapshots=self.worker_limits.num_snapshots,
            layout_digest=self.layouts[0].digest,
            max_itl_ms=options.max_itl_ms,
            max_drafts=0 if self.drafter is None else self.drafter.max_drafts,
            adapts_drafts=self.drafter is not None and self.drafter.is_adaptive,
            max_adapters=options.num_adapter_slots,
            options=options.scheduler_options,
        )

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model=self.model_dir.name,
            family=self.definition.name,
            max_model_tokens=self.worker_limits.max_model_tokens,
            num_token_ids=self.worker_limits.num_token_ids,
            eos_token_ids=self.eos_token_ids,
            block_size_tokens=self.options.block_size_tokens,
            num_blocks=self.num_blocks,
            max_num_seqs=self.options.max_num_seqs,
            max_waiting=self.options.max_waiting,
            max_adapters=self.options.num_adapter_slots,
            capabilities=self._capabilities,
            composition=self.parts,
            memory_bytes=self.memory_bytes,
            kv_layout_digest=self.layouts[0].digest,
        )

    @property
    def _capabilities(self) -> tuple[EngineCapability, ...]:
        takes_predictions = self.drafter is not None and self.drafter.takes_predictions
        predictions = (EngineCapability.PREDICTIONS,) if takes_predictions else ()
        adapters = (EngineCapability.LOAD_ADAPTER,) if self.options.num_adapter_slots else ()
        return predictions + adapters

    @property
    def parts(self) -> dict[str, str]:
        return {
            "engine": f"openinfer-engine {version('openinfer-engine')}",
            "scheduler": origin_of(self.scheduler),
            **{f"scheduler option {name}": value for name, value in sorted(self.options.scheduler_options.items())},
            "queue_policy": origin_of(self.queue_policy),
            "grammar_compiler": "none" if self.grammar_compiler is None else origin_of(self.grammar_compiler),
            "kv_cache": f"openinfer-kv-cache {version('openinfer-kv-cache')}",
            "kv_cache_dtype": described_kv_dtype(self.layouts[0], self.backend.dtype),
            **({} if self.described_tables is None else {"kv_tables": self.described_tables}),
            **self._data_parallel,
            "kernels": f"{self.options.device} (openinfer-kernels {version('openinfer-kernels')})",
            **({} if self.drafter is None else {"drafter": self.drafter.origin}),
            **self._drafter_kv,
            **({} if self.options.kv_events is None else {"kv_events": self.options.kv_events}),
            **({} if self.options.kv_transfer is None else {"kv_transfer": self.options.kv_transfer}),
            "weights": str(self.options.load_format),
            **{adapter_part(name): described for name, described in self.adapters.items()},
            **self._weight_format,
            **described_low_bit(self.options, self.config),
            **({"prefix_cache": self._prefix_cache} if self.has_states else {}),
            **({} if self.tiers is None else self.tiers.parts),
            **{f"operator {each.operator}": each.origin for each in self.kernel_providers},
        }

    @property
    def _data_parallel(self) -> dict[str, str]:
        ranks = self.options.data_parallel_size
        return {} if ranks == 1 else {"data_parallel": f"{ranks} ranks with whole attention, experts dealt out"}

    @property
    def _weight_format(self) -> dict[str, str]:
        """Of a model whose matrices are quantised."""
        stored = self.config.stored if isinstance(self.config, QuantisedConfig) else None
        return {} if stored is None else {"weight_format": stored.described}

    @property
    def described_tables(self) -> str | None:
        """Of a model whose layers have windows."""
        return self.tables.described(self.layouts[0].table_windows)

    @property
    def distributions(self) -> tuple[str, ...]:
        """Those that supply the parts."""
        plugins = [self.scheduler, self.queue_policy, self.grammar_compiler, self.drafter and self.drafter.plugin]
        plugins += [each.plugin for each in self.kernel_providers]
        plugins += () if self.tiers is None else (self.tiers.opener, *self.tiers.plugins)
        named = {plugin.distribution for plugin in plugins if plugin is not None}
        return tuple(sorted({"openinfer-engine", *(name for name in named if name is not None)}))

    @property
    def memory_bytes(self) -> dict[str, int]:
        """The ledger: what all ranks take of their devices' memory, by purpose."""
        ranks, options = self.options.num_ranks, self.options
        steps = {"max_step_tokens": options.max_step_tokens, "num_ranks": ranks}
        workspaces = self.backend.workspaces(self.worker_limits, **steps)
        return {
            "weights": ranks * self.weights_bytes,
            "kv_cache": ranks * self.layouts[0].pool_bytes(num_blocks=self.num_blocks),
            **self._states_bytes,
            **self._adapter_bytes,
            **self._drafter_memory,
            **{purpose: ranks * num_bytes for purpose, num_bytes in workspaces.items()},
        }

    @property
    def _rank_cache_tokens(self) -> int:
        return kv_cache_tokens(self.layouts[0], self.num_blocks, self.worker_limits.max_model_tokens)

    @property
    def _data_parallel_limits(self) -> dict[str, int]:
        ranks = self.options.data_parallel_size
        return {} if ranks == 1 else {"data_parallel_size": ranks, "kv_tokens_per_rank": self._rank_cache_tokens}

    @property
    def _adapter_bytes(self) -> dict[str, int]:
        itemsize = {"itemsize_bytes": self.backend.dtype.itemsize_bytes}
        num_bytes = adapter_bytes(self.definition, self.config, self.options, **itemsize)
        return {"lora": self.options.tensor_parallel_size * num_bytes} if num_bytes else {}

    @property
    def span_blocks(self) -> int:
        """Blocks of each rank's pool that no sequence has: what drafts add lies there."""
        asked = None if self.drafter is None else self.drafter.asked
        return 0 if asked is None else asked.span_blocks(self.options.tensor_parallel_size)

    @property
    def _drafter_memory(self) -> dict[str, int]:
        ranks = self.options.tensor_parallel_size
        sizes = {
            "drafter_weights": ranks * self.drafter_bytes,
            "drafter_spans": ranks * self.layouts[0].pool_bytes(num_blocks=self.span_blocks),
            "drafter_work": ranks * self._drafter_work_bytes,
        }
        return {purpose: num_bytes for purpose, num_bytes in sizes.items() if num_bytes}

    @property
    def _drafter_work_bytes(self) -> int:
        if self.drafter is None:
            return 0
        limits = self.worker_limits
        ranks = self.options.tensor_parallel_size
        return self.drafter.work_bytes(ranks, self.options, max_model_tokens=limits.max_model_tokens)

    @property
    def _drafter_kv(self) -> dict[str, str]:
        """Of a drafter that keeps any; its bytes are part of `kv_cache`."""
        asked = None if self.drafter is None else self.drafter.asked
        if asked is None:
            return {}
        ranks = self.options.tensor_parallel_size
        kept = asked.requirements(ranks)
        layers = sum(group.num_layers for group in kept.paged)
        described = f"{layers} layers, {ranks * asked.kv_bytes_per_token(ranks)} bytes of each token's KV"
        if kept.slots:
            described += f", {ranks * sum(group.bytes_per_slot for group in kept.slots)} bytes of each state slot"
        return {"drafter_kv": described, **({} if asked.folder is None else {"drafter_model": asked.folder})}

    @property
    def _states_bytes(self) -> dict[str, int]:
        if not self.has_states:
            return {}
        slot_bytes = self.options.tensor_parallel_size * self.worker_limits.slot_bytes
        copies = self.worker_limits.num_snapshots
        return {"states": slot_bytes * self.options.max_num_seqs, "state_snapshots": slot_bytes * copies}

    @property
    def _prefix_cache(self) -> str:
        copies = self.worker_limits.num_snapshots
        return f"where one of {copies} copies of recurrent states is kept" if copies else "off"

    def make_grammar_compiler(self) -> GrammarCompiler | None:
        """Raises `BrokenPlugin`, or `Refused` if it cannot serve this model."""
        vocabulary = Vocabulary(
            model_dir=self.model_dir,
            num_token_ids=self.worker_limits.num_token_ids,
            eos_token_ids=self.eos_token_ids,
        )
        return make_grammar_compiler(self.grammar_compiler, vocabulary)

    def open_tiers(self, *, rank: int = 0) -> OpenTiers | None:
        """Of a rank, the data-parallel one where there are such: these have one layout."""
        if self.tiers is None:
            return None
        layout = self.layouts[0 if self.options.data_parallel_size > 1 else rank]
        return self.tiers.open(layout, rank=rank)

    def make_scheduler(self, *, digest_key: bytes | None = None) -> Scheduler:
        """Blocks are named with `digest_key`, the key file's, or one that is drawn.

        Raises:
            InvalidRequest: the key file cannot be read.
            BrokenPlugin, Refused: the scheduler cannot be made.
        """
        if digest_key is None and self.options.kv_key_file is not None:
            digest_key = read_digest_key(self.options.kv_key_file)
        config = msgspec.structs.replace(self.scheduler_config, digest_key=digest_key)
        scheduler = make_scheduler(self.scheduler, self.queue_policy, config, self.options)
        check_capabilities(scheduler, self.scheduler, self.options, has_drafter=self.drafter is not None)
        return scheduler

    @property
    def guard_options(self) -> GuardOptions:
        """Plans of schedulers of other packages are checked; ours are, in tests."""
        distribution = self.scheduler.entry_point.dist
        is_ours = distribution is not None and distribution.name == _OUR_DISTRIBUTION
        config, num_token_ids = self.scheduler_config, self.worker_limits.num_token_ids
        return GuardOptions(
            plugin=origin_of(self.scheduler),
            rows=config,
            starvation_timeout_s=self.options.starvation_timeout_s,
            plan_check=None if is_ours else PlanCheck(config, num_token_ids=num_token_ids),
        )

    def open_kv_events(self, scheduler: Scheduler) -> KvEventRecorder | None:
        """Raises `Refused`: the scheduler does not tell, pyzmq is not installed, or an endpoint cannot be had."""
        if self.options.kv_events is None:
            return None
        return open_kv_events(
            self.options.kv_events,
            scheduler,
            block_size_tokens=self.options.block_size_tokens,
            table_windows=self.layouts[0].table_windows,
        )

    def plan(self) -> FamilyPlan:
        ranks = self.options.tensor_parallel_size
        config = self.scheduler_config
        return FamilyPlan(
            model_type=self.model_type,
            parts=self.parts,
            kernels={
                **self.backend.kernels(provided=[each.operator for each in self.kernel_providers]),
                **self.weight_kernels,
            },
            measured=self.backend.measured,
            distributions=self.distributions,
            memory_bytes=self.memory_bytes,
            limits={
                "max_model_tokens": self.worker_limits.max_model_tokens,
                **({} if self.clipped_context is None else {"model_context_tokens": self.model_context_tokens}),
                "num_blocks": self.num_blocks,
                "block_size_tokens": config.block_size_tokens,
                "kv_cache_tokens": self.options.data_parallel_size * self._rank_cache_tokens,
                **self._data_parallel_limits,
                "kv_tokens_per_gib": kv_tokens_per_gib(self.layouts[0], config.max_model_tokens),
                "max_num_seqs": config.max_num_seqs,
                "max_step_tokens": config.max_step_tokens,
                **(
                    {"max_loras": config.max_adapters, "max_lora_rank": self.options.max_lora_rank}
                    if config.max_adapters
                    else {}
                ),
                **({"max_drafts": config.max_drafts} if config.max_drafts else {}),
                **({} if config.max_itl_ms is None else {"max_itl_ms": config.max_itl_ms}),
                "tensor_parallel_size": ranks,
            },
            by_ranks=tuple(
                plan_ranks(
                    self.definition,
                    self.config,
                    self.options,
                    self.backend,
                    self._asked_limits,
                    tables=self.tables,
                    drafter=self.drafter,
                )
            ),
        )


def resolve(
    definition: ModelDefinition[Any],
    model_dir: Path,
    options: EngineOptions,
    *,
    timeline: Timeline | None = None,
    rank: int = 0,
    placement: Placement | None = None,
    backend: Backend | None = None,
    drafter: ChosenDrafter | None = None,
) -> EnginePlan:
    """Checks a model folder and options against each other; reads no weights.

    `backend` stands for a device that is not here; by default the options' own is opened, where `placement` has the
    rank: by default all are on this machine. `drafter` is one that no package offers; by default the one that the
    options name.

    Raises:
        InvalidCheckpoint: the folder is incomplete or contradicts its config.
        InvalidRequest: an option is out of the model's range.
        Refused: the options cannot be served.
        PluginError: the scheduler, queue policy, grammar compiler, drafter or a KV tier is not there.
    """
    if timeline is None:
        timeline = Timeline(begin_s=time.time())
    published = read_config(model_dir)
    config, limits = _checked_config(definition, published, model_dir, options)
    timeline.mark("config")
    tiers = choose_tiers(options)
    tag = _model_tag(model_dir, options)
    adapters = check_adapters(definition, config, options)
    backend = backend or open_backend(options, rank=rank, placement=placement)
    timeline.mark("device", device_bytes=backend.used_bytes())
    dtypes = {"kv_dtype": choose_kv_dtype(definition, options, backend), "state_dtype": backend.dtype}
    drafter = drafter or choose_drafter(options, published)
    if drafter is not None:
        drafter = drafter.asked_for(definition, config, model_dir, options, **dtypes)
    specs = _specs(definition, config, tag, options, **dtypes, drafter=drafter)
    scheduler = find_plugin(SCHEDULERS, options.scheduler)
    queue_policy = find_plugin(QUEUE_POLICIES, options.queue_policy or DEFAULT_QUEUE_POLICY)
    max_model_tokens = longest_context(options, limits)
    tables = choose_tables(
        specs[0],
        max_model_tokens=max_model_tokens,
        scheduler=scheduler,
        capabilities=lambda: capabilities_of(scheduler, queue_policy, options, max_model_tokens=max_model_tokens),
    )
    layouts = _checked_layouts(specs, tables, options, backend=backend, drafter=drafter)
    check_low_bit(options, config, backend)
    memory = _fit_memory(
        _longest_sizes(limits, model_dir, options, layouts[0], max_model_tokens=max_model_tokens),
        definition,
        config,
        options,
        layouts[0],
        backend=backend,
        tables=tables,
        drafter=drafter,
    )
    if tiers is not None:
        require_snapshots(specs[0], memory.sizes.num_snapshots)
    if options.kv_transfer is not None:
        require_whole_prefixes(layouts[0])
    return EnginePlan(
        definition=definition,
        config=config,
        model_type=str(published.get("model_type")),
        model_dir=model_dir,
        options=options,
        backend=backend,
        worker_limits=memory.sizes,
        model_context_tokens=limits.max_model_tokens,
        eos_token_ids=read_eos_token_ids(model_dir, published),
        layouts=layouts,
        tables=tables,
        num_blocks=memory.num_blocks,
        weights_bytes=memory.weights.num_bytes,
        weight_kernels=backend.weight_kernels(memory.weights.products),
        scheduler=scheduler,
        queue_policy=queue_policy,
        grammar_compiler=choose_grammar_compiler(options.grammar_compiler, model_dir),
        drafter=drafter,
        drafter_bytes=memory.drafter_bytes,
        kernel_providers=choose_providers_of_model(definition, options, backend),
        tiers=tiers,
        adapters=adapters,
        timeline=timeline,
        placement=placement,
    )


def _checked_config(
    definition: ModelDefinition[Any], published: Mapping[str, Any], model_dir: Path, options: EngineOptions
) -> tuple[Any, ModelLimits]:
    """The definition's typed config and its limits; the folder's tensors and the options go with them."""
    config = definition.parse(published)
    limits = definition.limits(config)
    definition.check_device(options.device)
    definition.check_ranks(config, options.tensor_parallel_size)
    check_data_parallel(definition, config, options)
    if options.load_format is LoadFormat.SAFETENSORS:
        advice = "--load-format dummy starts it with random weights, for sizes and speed"
        with Checkpoint.open(model_dir, keeps_gguf=options.keeps_gguf, advice=advice) as checkpoint:
            config = check_stored(definition, config, checkpoint)
    return config, limits


def _checked_layouts(
    specs: Sequence[KvSpec],
    tables: TableChoice,
    options: EngineOptions,
    *,
    backend: Backend,
    drafter: ChosenDrafter | None,
) -> tuple[KvLayout, ...]:
    """Of each rank, for block tables as they were chosen; the device and the drafter take them."""
    layouts = tuple(KvLayout.from_spec(tables.of(spec), block_size_tokens=options.block_size_tokens) for spec in specs)
    check_scales(layouts[0])
    if drafter is not None and drafter.asked is not None:
        drafter.asked.check(layouts[0])
    backend.check_layout(layouts[0])
    return layouts


def _longest_sizes(
    limits: ModelLimits, model_dir: Path, options: EngineOptions, layout: KvLayout, *, max_model_tokens: int
) -> WorkerLimits:
    """A worker's sizes for the longest context, whatever the pool holds; without snapshots."""
    return WorkerLimits(
        max_num_seqs=options.max_num_seqs,
        max_model_tokens=max_model_tokens,
        block_size_tokens=options.block_size_tokens,
        num_tables=layout.num_tables,
        num_token_ids=read_num_token_ids(model_dir, vocab_size=limits.vocab_size),
        vocab_size=limits.vocab_size,
        tokens_per_score=limits.tokens_per_score,
        slot_bytes=slot_bytes_of_rank(options, layout),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """What a rank's memory holds."""

    weights: RankWeights
    drafter_bytes: int
    sizes: WorkerLimits
    num_blocks: int


def _fit_memory(
    longest: WorkerLimits,
    definition: ModelDefinition[Any],
    config: Any,
    options: EngineOptions,
    layout: KvLayout,
    *,
    backend: Backend,
    tables: TableChoice,
    drafter: ChosenDrafter | None,
) -> _Memory:
    """Weights and drafter, the KV pool that is left, and sizes for a context that this pool holds.

    Raises:
        Refused: they do not fit; the message says on how many devices they would.
    """
    ranks = options.tensor_parallel_size
    weights = weights_of_rank(
        definition,
        config,
        definition.tensors(config),
        backend,
        ranks=ranks,
        fp8_head=options.fp8_head,
        data_parallel_size=options.data_parallel_size,
    )
    itemsize_bytes = backend.dtype.itemsize_bytes
    drafter_bytes = 0 if drafter is None else drafter.weights_bytes(ranks, itemsize_bytes=itemsize_bytes)

    def blocks_left(sizes: WorkerLimits) -> int:
        return num_blocks_of_pool(
            options,
            layout,
            backend,
            sizes,
            weights_bytes=weights.num_bytes + drafter_bytes,
            drafter_bytes=drafter_bytes_next_to_weights(drafter, options, layout, sizes, ranks=ranks),
        )

    try:
        sizes, num_blocks = fit_context(longest, options, blocks_left, blocks_for_context=layout.blocks_for_context)
    except Refused as error:
        ledgers = plan_ranks(definition, config, options, backend, longest, tables=tables, drafter=drafter)
        raise Refused(f"{error}; {possible_ranks(ledgers)}") from error
    sizes = replace(sizes, num_snapshots=num_snapshots_of_pool(options, layout, num_blocks))
    return _Memory(weights=weights, drafter_bytes=drafter_bytes, sizes=sizes, num_blocks=num_blocks)


def _model_tag(model_dir: Path, options: EngineOptions) -> str:
    """Names the weights and what computes KV: none of random ones may ever be found among a checkpoint's."""
    tag = fingerprint(model_dir)
    if options.low_bit_activations is not LowBitActivations.OFF:
        tag = f"low-bit-activations-{tag}"
    return f"dummy-{tag}" if options.load_format is LoadFormat.DUMMY else tag


def _specs(
    definition: ModelDefinition[Any],
    config: Any,
    tag: str,
    options: EngineOptions,
    *,
    kv_dtype: KvDtype,
    state_dtype: KvDtype,
    drafter: ChosenDrafter | None,
) -> list[KvSpec]:
    ranks, dtypes = options.tensor_parallel_size, {"kv_dtype": kv_dtype, "state_dtype": state_dtype}
    specs = [
        definition.kv_spec(config, model_tag=tag, **dtypes, num_ranks=ranks, rank_index=rank) for rank in range(ranks)
    ]
    return specs if drafter is None else [drafter.extended(spec) for spec in specs]
