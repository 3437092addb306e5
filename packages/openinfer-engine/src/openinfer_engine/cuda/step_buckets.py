"""Sizes that steps are captured in; a step is padded to the next one. Known without a device, for plans."""

from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.options import EngineOptions, KvCacheDtype

# rows of captured decode steps
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
# tokens of captured mixed batches: the fewest are a row with drafts, by the kernels of so many tokens. Of more tokens
# the device has work for longer than it takes to launch them
TOKEN_BUCKETS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
# of those that are captured once more with a row for each token: steps of a few drafts of a few rows
BY_TOKEN_TOKENS = 64
# more of them that are captured with adapters alone: with adapters launches take the host for twice as long
ADAPTED_TOKEN_BUCKETS = (640, 768, 896, 1024)
# of scores of a captured mixed batch, at most: to write and read more takes longer than to launch it
_CAPTURED_SCORE_BYTES = 1 << 26


def token_buckets(limits: WorkerLimits) -> tuple[int, ...]:
    """The buckets of mixed batches: a captured one computes scores of the longest context, whatever its own is."""
    return tuple(each for each in TOKEN_BUCKETS if each * limits.score_bytes_per_token <= _CAPTURED_SCORE_BYTES)


def adapted_token_buckets(options: EngineOptions) -> tuple[int, ...]:
    """The buckets of mixed batches that are captured with adapters alone; none beyond what a step can have.

    Not with a KV cache of FP8, where steps of so many tokens bring contexts to BF16, whose lengths no graph knows.
    """
    if not options.num_adapter_slots or options.kv_cache_dtype is KvCacheDtype.FP8:
        return ()
    sizes = zip((TOKEN_BUCKETS[-1], *ADAPTED_TOKEN_BUCKETS), ADAPTED_TOKEN_BUCKETS, strict=False)
    return tuple(bucket for before, bucket in sizes if before < options.max_step_tokens)


def row_buckets(max_num_seqs: int) -> tuple[int, ...]:
    largest = bucket_of(ROW_BUCKETS, max_num_seqs) or ROW_BUCKETS[-1]
    return tuple(bucket for bucket in ROW_BUCKETS if bucket <= largest)


def bucket_of(buckets: tuple[int, ...], count: int) -> int | None:
    return next((bucket for bucket in buckets if bucket >= count), None)
