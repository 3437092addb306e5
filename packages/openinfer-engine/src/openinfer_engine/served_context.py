"""The longest context that an engine serves: the model's own, or what one sequence finds room for in the KV pool.

The pool depends on the context, too: rows of block tables and positions of RoPE take memory of the device.
"""

import bisect
from collections.abc import Callable
from dataclasses import replace

from openinfer_core import InvalidRequest, Refused
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.model import ModelLimits
from openinfer_engine.options import DeviceKind, EngineOptions

PoolOf = Callable[[WorkerLimits], int]
"""The blocks of the pool beside workspaces of these sizes; raises `Refused` where nothing is left for one."""


def longest_context(options: EngineOptions, limits: ModelLimits) -> int:
    """Tokens as asked, or as the model has them, whatever the pool holds."""
    asked = options.max_model_tokens
    if asked is not None and asked > limits.max_model_tokens:
        raise InvalidRequest(
            f"max_model_tokens is {asked}; the model's position encoding reaches {limits.max_model_tokens}",
            field="max_model_tokens",
        )
    return limits.max_model_tokens if asked is None else asked


def context_of_pool(num_blocks: int, longest: int, blocks_for_context: Callable[[int], int]) -> int:
    """The longest context that so many blocks hold, at most `longest`; 0 if they hold no token."""
    return bisect.bisect_right(range(1, longest + 1), num_blocks, key=blocks_for_context)


def fit_context(
    sizes: WorkerLimits, options: EngineOptions, pool_of: PoolOf, *, blocks_for_context: Callable[[int], int]
) -> tuple[WorkerLimits, int]:
    """The sizes with a context that the pool holds, and the pool's blocks.

    A clipped context is as long as the pool, to the block: so the smallest pool of several ranks is a context that all
    of them have sizes for.

    Args:
        sizes: with the longest context.
        options: the engine's.
        pool_of: the blocks that are there for each context.
        blocks_for_context: the blocks that one sequence needs for so many tokens, in all its block tables.

    Raises:
        Refused: not one block is left; or the options ask for a longer context than the pool holds.
    """
    longest, block_tokens = sizes.max_model_tokens, sizes.block_size_tokens
    needed = -(-longest // block_tokens)

    def context_of(context_blocks: int) -> int:
        return min(longest, context_blocks * block_tokens)

    def blocks_beside(context_blocks: int) -> int:
        return pool_of(replace(sizes, max_model_tokens=context_of(context_blocks)))

    def holds(context_blocks: int) -> bool:
        try:
            return blocks_beside(context_blocks) >= blocks_for_context(context_of(context_blocks))
        except Refused:
            return False

    if holds(needed):
        return sizes, blocks_beside(needed)
    fitting = bisect.bisect_left(range(1, needed), True, key=lambda blocks: not holds(blocks))
    if not fitting:
        blocks_beside(1)  # raises, with what takes the memory
    if options.max_model_tokens is not None:
        raise Refused(
            f"max_model_tokens is {longest}, and the KV pool holds {fitting * block_tokens} tokens: lower it, leave it "
            f"out to serve what fits, or {_larger_pool(options)}"
        )
    return replace(sizes, max_model_tokens=context_of(fitting)), blocks_for_context(context_of(fitting))


def told_context(served: int, own: int, options: EngineOptions) -> str:
    """Why a context is shorter than the model's own, and what makes it longer."""
    return (
        f"the context is {served} of the model's {own} tokens, because the KV pool holds no more: to serve a longer "
        f"one, {_larger_pool(options)}"
    )


def _larger_pool(options: EngineOptions) -> str:
    if options.num_blocks is not None:
        return "raise num_blocks"
    if options.kv_cache_bytes is not None or options.device is DeviceKind.CPU:
        return "raise kv_cache_bytes"
    return "use more GPUs (tensor_parallel_size) or lower max_num_seqs and max_step_tokens"
