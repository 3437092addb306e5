"""What one rank takes of its device, and would take for other numbers of ranks; before anything is loaded."""

from collections.abc import Sequence
from typing import Any

from openinfer_core import OpenInferError, RankLedger, Refused
from openinfer_engine.backends import Backend
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions
from openinfer_engine.weights.stored_tensor import spec_bytes
from openinfer_engine.weights.weight_bytes import rank_weights_bytes
from openinfer_engine.worker.state_slots import padded_slot_bytes
from openinfer_kv_cache import KvConfigError, KvLayout

PLANNED_RANKS = (1, 2, 4, 8)


def weights_bytes_of_rank(definition: ModelDefinition[Any], config: Any, backend: Backend, *, ranks: int) -> int:
    itemsize = backend.dtype.itemsize_bytes
    if ranks == 1:
        return sum(spec_bytes(spec, itemsize_bytes=itemsize) for spec in definition.tensors(config).values())
    return rank_weights_bytes(definition, config, size=ranks, itemsize_bytes=itemsize)


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
    options: EngineOptions, layout: KvLayout, backend: Backend, sizes: WorkerLimits, *, weights_bytes: int
) -> int:
    """Blocks of the pool: as asked, or what the budget holds, at most what all slots can use."""
    if options.num_blocks is not None:
        return options.num_blocks
    ranks = options.tensor_parallel_size
    budget_bytes = options.kv_cache_bytes
    if budget_bytes is None:
        workspaces = backend.workspaces(sizes, max_step_tokens=options.max_step_tokens, num_ranks=ranks)
        workspace_bytes = sum(workspaces.values()) + states_bytes_of_rank(options, layout, ranks=ranks)
        budget_bytes = ranks * backend.kv_cache_bytes(weights_bytes=weights_bytes, workspace_bytes=workspace_bytes)
    try:
        fitting = layout.num_blocks_for(budget_bytes // ranks)
    except KvConfigError as error:
        raise Refused(f"kv_cache_bytes: {error}") from error
    usable = options.max_num_seqs * -(-sizes.max_model_tokens // options.block_size_tokens)
    return fitting if options.kv_cache_bytes is not None else min(fitting, usable)


def num_snapshots_of_pool(options: EngineOptions, layout: KvLayout, num_blocks: int) -> int:
    """Copies of states that are kept: one per block at most."""
    return min(most_snapshots(options, layout, ranks=options.tensor_parallel_size), num_blocks)


def plan_ranks(
    definition: ModelDefinition[Any], config: Any, options: EngineOptions, backend: Backend, limits: WorkerLimits
) -> Sequence[RankLedger]:
    """One per number of ranks, for devices like this one."""
    return [
        _ledger(definition, config, options=options, backend=backend, limits=limits, ranks=ranks)
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
    *,
    options: EngineOptions,
    backend: Backend,
    limits: WorkerLimits,
    ranks: int,
) -> RankLedger:
    try:
        definition.check_ranks(config, ranks)
        spec = definition.kv_spec(config, model_tag="plan", kv_dtype=backend.dtype, num_ranks=ranks, rank_index=0)
        layout = KvLayout.from_spec(spec, block_size_tokens=options.block_size_tokens)
        weights_bytes = weights_bytes_of_rank(definition, config, backend, ranks=ranks)
    except OpenInferError as error:
        return RankLedger(ranks=ranks, refusal=str(error))
    workspaces = backend.workspaces(limits, max_step_tokens=options.max_step_tokens, num_ranks=ranks)
    workspace_bytes = sum(workspaces.values()) + states_bytes_of_rank(options, layout, ranks=ranks)
    known = RankLedger(ranks=ranks, weights_bytes=weights_bytes, workspace_bytes=workspace_bytes)
    try:
        kv_cache_bytes = _kv_cache_bytes(options, layout, backend, known)
        num_blocks = layout.num_blocks_for(kv_cache_bytes)
    except (OpenInferError, KvConfigError) as error:
        return RankLedger(ranks=ranks, weights_bytes=weights_bytes, workspace_bytes=workspace_bytes, refusal=str(error))
    return RankLedger(
        ranks=ranks,
        weights_bytes=weights_bytes,
        workspace_bytes=workspace_bytes,
        kv_cache_bytes=kv_cache_bytes,
        kv_cache_tokens=num_blocks * options.block_size_tokens,
    )


def _kv_cache_bytes(options: EngineOptions, layout: KvLayout, backend: Backend, known: RankLedger) -> int:
    if options.num_blocks is not None:
        return layout.pool_bytes(num_blocks=options.num_blocks)
    if options.kv_cache_bytes is not None:
        return options.kv_cache_bytes // known.ranks
    return backend.kv_cache_bytes(weights_bytes=known.weights_bytes, workspace_bytes=known.workspace_bytes)
