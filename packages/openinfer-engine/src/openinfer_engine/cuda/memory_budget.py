"""What an engine takes of a GPU next to weights and KV cache, by purpose: bounds from sizes known before loading.

The bounds are checked against the device: `openinfer bench startup` prints memory in use next to the ledger, and
`benchmarks/results/h200/*-startup.json` has both after every phase.
"""

from collections.abc import Mapping, Sequence

from openinfer_core import Refused
from openinfer_core.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from openinfer_engine.cpu.worker import PROMPT_LOGPROB_ROWS, WorkerLimits
from openinfer_engine.cuda.step_buckets import BY_TOKEN_TOKENS
from openinfer_kernels.cuda.sampling.slot_sizes import SlotSizes, drafted_state_bytes, state_bytes

_MIB = 1 << 20
_GIB = 1 << 30
_CONTEXT_BYTES = 640 * _MIB  # the CUDA context with our kernels, cuBLASLt's, and its workspace
# of tables of RoPE: cosines and sines of 128 rotated dimensions, or of 64 at two frequencies
_ROPE_BYTES_PER_POSITION = 512
# of one captured forward pass and the sampling after it: nodes, and the places where their results stay
_GRAPH_BYTES = 10 * _MIB
# of one token of a step, at most: a few vectors of the widest layer of any model served, and 64 KiB of contexts that
# are brought from FP8 to BF16 (`openinfer_kernels.cuda.attention.fp8_contexts`)
_ACTIVATION_BYTES_PER_TOKEN = 1 << 18
# of the same where activations are quantised: codes, sums of gate and up in int32, and its share of a copy of a matrix
_LOW_BIT_BYTES_PER_TOKEN = 1 << 17
# of one rank's end of a group, by far the most of it NCCL's channels; measured with two ranks, 1352 MiB
_COMMUNICATOR_BYTES = 1408 * _MIB
_GATHERED_LOGIT_BYTES = 8  # of one logit of a sampled row, where each rank computes some: as they arrive, and in order
# of one logit of a sampled row: float32, float32 scratch of sampling, and what a copy of some rows takes
_LOGIT_BYTES = 12


def workspaces(
    limits: WorkerLimits,
    *,
    max_step_tokens: int,
    slot_state_bytes: int,
    decode_rows: Sequence[int],
    mixed_tokens: Sequence[int],
    adapted_tokens: Sequence[int] = (),
    graphs_per_size: int = 1,
    num_ranks: int = 1,
    gathered_tokens: int = 0,
    max_drafts: int = 0,
    low_bit_activations: bool = False,
) -> Mapping[str, int]:
    """Purpose -> bytes on one GPU; what a drafter has of its own is not among them.

    `gathered_tokens` are those of other data-parallel ranks, whose rows this one's experts compute.
    """
    rows = limits.max_num_seqs + PROMPT_LOGPROB_ROWS
    gathered_bytes = rows * limits.vocab_size * _GATHERED_LOGIT_BYTES
    scored_tokens = max_step_tokens + max((*decode_rows, *mixed_tokens), default=0)  # graphs have memory of their own
    score_bytes = scored_tokens * limits.score_bytes_per_token * (1 if num_ranks == 1 else 2)
    table_bytes = 4 * limits.num_tables * -(-limits.max_model_tokens // limits.block_size_tokens)
    captured_rows = sum(decode_rows) + sum(min(each, limits.max_num_seqs) for each in (*mixed_tokens, *adapted_tokens))
    by_token = [each for each in mixed_tokens if max_drafts and each <= BY_TOKEN_TOKENS]
    captured_rows += sum(by_token)
    num_graphs = graphs_per_size * (len(decode_rows) + len(mixed_tokens) + len(by_token)) + len(adapted_tokens)
    graph_bytes = num_graphs * _GRAPH_BYTES + captured_rows * table_bytes
    shared = {"communicator": _COMMUNICATOR_BYTES + gathered_bytes} if num_ranks > 1 else {}
    return {
        **shared,
        "context": _CONTEXT_BYTES + limits.max_model_tokens * _ROPE_BYTES_PER_POSITION,
        "activations": max_step_tokens * _ACTIVATION_BYTES_PER_TOKEN,
        **({"gathered_rows": gathered_tokens * _ACTIVATION_BYTES_PER_TOKEN} if gathered_tokens else {}),
        **({"low_bit_activations": max_step_tokens * _LOW_BIT_BYTES_PER_TOKEN} if low_bit_activations else {}),
        **({} if limits.tokens_per_score is None else {"scores": score_bytes}),
        "logits": rows * limits.vocab_size * _LOGIT_BYTES,
        "slots": slot_state_bytes,
        "graphs": graph_bytes,
        **({"drafts": _drafts_bytes(limits, max_drafts)} if max_drafts else {}),
    }


def _drafts_bytes(limits: WorkerLimits, max_drafts: int) -> int:
    """Of slots that have drafts, and of a copy of their recurrent states.

    Where states are replayed there are no copies, but kept inputs, which take less: few tokens are kept.
    """
    sizes = slot_sizes(limits)
    slots_bytes = drafted_state_bytes(sizes, max_drafts=max_drafts) - state_bytes(sizes)
    return slots_bytes + limits.max_num_seqs * limits.slot_bytes


def kv_cache_share(
    gpu: str, *, memory_bytes: int, used_bytes: int, fraction: float, weights_bytes: int, workspace_bytes: int
) -> int:
    """What is left for the KV cache of the share of a GPU's memory that was granted.

    Args:
        gpu: its name.
        memory_bytes: all of its memory.
        used_bytes: what is in use before anything is loaded, by everyone; our own context is part of it.
        fraction: of its memory, granted.
        weights_bytes: of the model.
        workspace_bytes: the sum of `workspaces`.

    Raises:
        Refused: other processes hold what was granted, or the model does not fit.
    """
    granted = int(memory_bytes * fraction)
    held = max(0, used_bytes - _CONTEXT_BYTES)
    if held > memory_bytes - granted:
        raise Refused(
            f"other processes hold {_gib(held)} of the {_gib(memory_bytes)} of {gpu}, and {_gib(granted)} were granted "
            f"(gpu_memory_fraction {fraction}); stop them, or lower it below {1 - held / memory_bytes:.2f}"
        )
    rest = granted - weights_bytes - workspace_bytes
    if rest <= 0:
        raise Refused(
            f"the model does not fit into {gpu}: weights take {_gib(weights_bytes)} and workspaces "
            f"{_gib(workspace_bytes)} of the {_gib(granted)} that were granted (gpu_memory_fraction {fraction} of "
            f"{_gib(memory_bytes)}), and nothing is left for the KV cache; a larger GPU or a smaller model is needed, "
            "or lower max_num_seqs and max_step_tokens for smaller workspaces"
        )
    return rest


def slot_sizes(limits: WorkerLimits) -> SlotSizes:
    return SlotSizes(
        max_num_seqs=limits.max_num_seqs,
        max_blocks=-(-limits.max_model_tokens // limits.block_size_tokens),
        block_tokens=limits.block_size_tokens,
        num_tables=limits.num_tables,
        num_columns=limits.vocab_size,
        max_biased=MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS,
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
