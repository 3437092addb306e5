"""Adapters as options ask for them: held against the model before anything is loaded, and made."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from openinfer_core import Refused
from openinfer_engine.lora.adapter_folder import read_adapter
from openinfer_engine.lora.arena import AdapterArena, adapted_modules, arena_bytes
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import DeviceKind, EngineOptions
from openinfer_kernels import Ops
from openinfer_kernels.ops.lora import DeltaOperator

_FUSED = frozenset({"linear", "linear_swiglu"})
"""Operators that are one with adapters, where a device has that."""


def check_adapters(definition: ModelDefinition[Any], config: Any, options: EngineOptions) -> dict[str, str]:
    """Those of `--lora`, each by its rank and content.

    Raises:
        Refused: the model serves no adapters, or one of them cannot be read.
    """
    if not options.num_adapter_slots:
        return {}
    if not definition.adapted_matrices(config):
        raise Refused(f"--lora: the family {definition.name} serves no LoRA adapters; merge them into the checkpoint")
    modules = adapted_modules(definition.adapted_matrices(config))
    found: dict[str, str] = {}
    for name, folder in options.adapters.items():
        adapter = read_adapter(Path(folder), modules=modules, max_rank=options.max_lora_rank)
        found[name] = f"rank {adapter.rank}, content {adapter.digest.hex()}"
    return found


def adapter_bytes(definition: ModelDefinition[Any], config: Any, options: EngineOptions, *, itemsize_bytes: int) -> int:
    """What the slots of one rank take of its device; 0 without adapters."""
    if not options.num_adapter_slots:
        return 0
    return arena_bytes(
        definition.adapted_matrices(config),
        num_slots=options.num_adapter_slots,
        rank=options.max_lora_rank,
        size=options.tensor_parallel_size,
        itemsize_bytes=itemsize_bytes,
        may_fuse=options.device is DeviceKind.CUDA,
    )


def make_arena(
    options: EngineOptions,
    ops: Ops,
    *,
    provided: AbstractSet[str],
    memory: Callable[[], AbstractContextManager[None]],
) -> AdapterArena | None:
    """None where no adapters are served. `provided` operators are another package's; slots are made in `memory`."""
    if not options.num_adapter_slots:
        return None
    return AdapterArena(
        ops=ops,
        num_slots=options.num_adapter_slots,
        max_rank=options.max_lora_rank,
        may_fuse=provided.isdisjoint(_FUSED),
        may_defer=provided.isdisjoint(DeltaOperator),
        memory=memory,
    )


def make_rank_adapters(
    arena: AdapterArena, definition: ModelDefinition[Any], config: Any, options: EngineOptions
) -> RankAdapters:
    """Of a loaded model; raises `ContractViolation` if the family adapts other matrices than it says."""
    modules = adapted_modules(definition.adapted_matrices(config))
    arena.check(modules)
    return RankAdapters(arena, modules=modules, max_rank=options.max_lora_rank)
