"""What one rank takes of its device, and would take for other numbers of ranks; before anything is loaded."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from openinfer_core import OpenInferError, RankLedger, Refused
from openinfer_engine.backends import Backend
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.drafting import ChosenDrafter
from openinfer_engine.kv_tables import TableChoice
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions
from openinfer_engine.served_context import fit_context
from openinfer_engine.weights.stored_tensor import StoredTensor, TensorSpec, spec_bytes
from openinfer_engine.weights.weight_bytes import RankWeights, rank_weights
from openinfer_engine.worker.kv_cache_dtype import BYTES_PER_GIB, choose_kv_dtype
from openinfer_engine.worker.state_slots import padded_slot_bytes
from openinfer_kv_cache import KvConfigError, KvLayout

PLANNED_RANKS = (1, 2, 4, 8)


def weights_of_rank(
    definition: ModelDefinition[Any],
    config: Any,
    tensors: Mapping[str, TensorSpec],
    backend: Backend,
    *,
    ranks: int,
    fp8_head: bool = False,
    data_parallel_size: int = 1,
) -> RankWeights:
    """What one rank's weights take of this device, and which of them have a kernel there."""
    itemsize = backend.dtype.itemsize_bytes
    is_shared = ranks > 1 or data_parallel_size > 1
    if is_shared or fp8_head or any(isinstance(spec, StoredTensor) for spec in tensors.values()):
        sizes = {"size": ranks, "itemsize_bytes": itemsize}
        return rank_weights(
            definition,
            config,
            tensors,
            **sizes,
            way_of=backend.way_of_weight,
            fp8_head=fp8_head,
            data_parallel_size=data_parallel_size,
        )
    num_bytes = sum(spec_bytes(spec, itemsize_bytes=itemsize) for spec in tensors.values())
    return RankWeights(num_bytes, Counter())


def states_bytes_of_rank(options: EngineOptions, layout: KvLayout, *, ranks: int) -> int:
    num_slots = options.max_num_seqs + most_snapshots(options, layout, ranks=ranks)
    return slot_bytes_of_rank(options, layout) * num_slots


def slot_bytes_of_rank(options: EngineOptions, layout: KvLayout) -> int:
    return padded_slot_bytes(layout, in_blocks=bool(options.kv_tier))


def most_snapshots(options: EngineOptions, layout: KvLayout, *, ranks: int) -> int:
    """Copies of states that their budget holds; none without states or a prefix cache."""
    if not layout.slot_bytes or not options.prefix_cache:
        return 0
    return options.state_snapshot_bytes // ranks // slot_bytes_of_rank(options, layout)


def num_blocks_of_pool(
    options: EngineOptions,
    layout: KvLayout,
    backend: Backend,
    sizes: WorkerLimits,
    *,
    weights_bytes: int,
    drafter_bytes: int = 0,
) -> int:
    """Blocks of the pool: as asked, or what the budget holds, at most what all slots can use."""
    taken = {"weights_bytes": weights_bytes, "drafter_bytes": drafter_bytes}
    num_blocks = _num_blocks(options, layout, backend, sizes, **taken)
    _require_tables(layout, num_blocks)
    return num_blocks


def _require_tables(layout: KvLayout, num_blocks: int) -> None:
    if num_blocks < layout.num_tables:
        raise Refused(
            f"the KV pool has {num_blocks} blocks, and a sequence has {layout.num_tables} block tables, each of at "
            "least one block; raise num_blocks or kv_cache_bytes"
        )


def drafter_bytes_next_to_weights(
    drafter: ChosenDrafter | None, options: EngineOptions, layout: KvLayout, sizes: WorkerLimits, *, ranks: int
) -> int:
    """What a drafter takes of one rank's memory in addition to weights and the KV of sequences."""
    if drafter is None:
        return 0
    work_bytes = drafter.work_bytes(ranks, options, max_model_tokens=sizes.max_model_tokens)
    return work_bytes + drafter.span_bytes(ranks, block_bytes=layout.block_bytes)


def _num_blocks(
    options: EngineOptions,
    layout: KvLayout,
    backend: Backend,
    sizes: WorkerLimits,
    *,
    weights_bytes: int,
    drafter_bytes: int,
) -> int:
    if options.num_blocks is not None:
        return options.num_blocks
    ranks = options.num_ranks
    budget_bytes = options.kv_cache_bytes
    if budget_bytes is None:
        workspaces = backend.workspaces(sizes, max_step_tokens=options.max_step_tokens, num_ranks=ranks)
        workspace_bytes = sum(workspaces.values()) + states_bytes_of_rank(options, layout, ranks=ranks) + drafter_bytes
        budget_bytes = ranks * backend.kv_cache_bytes(weights_bytes=weights_bytes, workspace_bytes=workspace_bytes)
    try:
        fitting = layout.num_blocks_for(budget_bytes // ranks)
    except KvConfigError as error:
        raise Refused(f"kv_cache_bytes: {error}") from error
    # In each table as many as whole contexts have: what windows give back stays cached for other requests.
    usable = options.max_num_seqs * layout.num_tables * -(-sizes.max_model_tokens // options.block_size_tokens)
    return fitting if options.kv_cache_bytes is not None else min(fitting, usable)


def kv_cache_tokens(layout: KvLayout, num_blocks: int, max_model_tokens: int) -> int:
    """How many tokens a pool holds the KV of: with one table its blocks', else those of contexts of full length.

    In windows a context holds fewer blocks per token the longer it is.
    """
    if layout.table_windows == (None,):
        return num_blocks * layout.block_size_tokens
    return num_blocks * max_model_tokens // layout.blocks_for_context(max_model_tokens)


def kv_tokens_per_gib(layout: KvLayout, max_model_tokens: int) -> int:
    """How many tokens a GiB of one rank holds the KV of."""
    return kv_cache_tokens(layout, BYTES_PER_GIB // layout.block_bytes, max_model_tokens)


def num_snapshots_of_pool(options: EngineOptions, layout: KvLayout, num_blocks: int) -> int:
    """Copies of states that are kept: one per block at most."""
    return min(most_snapshots(options, layout, ranks=options.tensor_parallel_size), num_blocks)


def plan_ranks(
    definition: ModelDefinition[Any],
    config: Any,
    options: EngineOptions,
    backend: Backend,
    limits: WorkerLimits,
    *,
    tables: TableChoice,
    drafter: ChosenDrafter | None = None,
) -> Sequence[RankLedger]:
    """One per number of ranks, for devices like this one."""
    tensors = definition.tensors(config)  # of 70,000 it takes a second
    return [
        _ledger(
            definition,
            config,
            tensors,
            options=options,
            backend=backend,
            limits=limits,
            tables=tables,
            drafter=drafter,
            ranks=ranks,
        )
        for ranks in PLANNED_RANKS
    ]


def possible_ranks(ledgers: Sequence[RankLedger]) -> str:
    """On how many devices a model fits, for a refusal."""
    ranks = [each.ranks for each in ledgers if not each.refusal]
    if not ranks:
        return "more devices of this kind would not help"
    return f"by the same ledger it fits on {', '.join(map(str, ranks))} such devices (tensor_parallel_size)"


def _ledger(
    definition: ModelDefinition[Any],
    config: Any,
    tensors: Mapping[str, TensorSpec],
    *,
    options: EngineOptions,
    backend: Backend,
    limits: WorkerLimits,
    tables: TableChoice,
    drafter: ChosenDrafter | None,
    ranks: int,
) -> RankLedger:
    try:
        definition.check_ranks(config, ranks)
        kv_dtype = choose_kv_dtype(definition, options, backend)
        dtypes = {"kv_dtype": kv_dtype, "state_dtype": backend.dtype}
        spec = definition.kv_spec(config, model_tag="plan", **dtypes, num_ranks=ranks, rank_index=0)
        spec = spec if drafter is None else drafter.extended(spec)
        layout = KvLayout.from_spec(tables.of(spec), block_size_tokens=options.block_size_tokens)
        weights = weights_of_rank(definition, config, tensors, backend, ranks=ranks, fp8_head=options.fp8_head)
        weights_bytes = weights.num_bytes
        if drafter is not None:
            weights_bytes += drafter.weights_bytes(ranks, itemsize_bytes=backend.dtype.itemsize_bytes)
    except OpenInferError as error:
        return RankLedger(ranks=ranks, refusal=str(error))

    def beside(sizes: WorkerLimits) -> RankLedger:
        workspaces = backend.workspaces(sizes, max_step_tokens=options.max_step_tokens, num_ranks=ranks)
        workspace_bytes = sum(workspaces.values()) + states_bytes_of_rank(options, layout, ranks=ranks)
        workspace_bytes += drafter_bytes_next_to_weights(drafter, options, layout, sizes, ranks=ranks)
        return RankLedger(ranks=ranks, weights_bytes=weights_bytes, workspace_bytes=workspace_bytes)

    def pool_of(sizes: WorkerLimits) -> int:
        try:
            num_blocks = layout.num_blocks_for(_kv_cache_bytes(options, layout, backend, beside(sizes)))
        except KvConfigError as error:
            raise Refused(str(error)) from error
        _require_tables(layout, num_blocks)
        return num_blocks

    try:
        served, num_blocks = fit_context(limits, options, pool_of, blocks_for_context=layout.blocks_for_context)
    except Refused as error:
        return msgspec.structs.replace(beside(limits), refusal=str(error))
    known = beside(served)
    return msgspec.structs.replace(
        known,
        kv_cache_bytes=_kv_cache_bytes(options, layout, backend, known),
        kv_cache_tokens=kv_cache_tokens(layout, num_blocks, served.max_model_tokens),
    )


def _kv_cache_bytes(options: EngineOptions, layout: KvLayout, backend: Backend, known: RankLedger) -> int:
    if options.num_blocks is not None:
        return layout.pool_bytes(num_blocks=options.num_blocks)
    if options.kv_cache_bytes is not None:
        return options.kv_cache_bytes // known.ranks
    return backend.kv_cache_bytes(weights_bytes=known.weights_bytes, workspace_bytes=known.workspace_bytes)
