"""What an engine takes of a GPU beside weights and KV cache, by purpose: bounds, from sizes known before loading.

The bounds are checked against the device: `openinfer bench startup` prints memory in use beside the ledger, and
`benchmarks/results/h200/*-startup.json` has both after every phase.
"""

from collections.abc import Mapping

from openinfer_engine.rank import PROMPT_LOGPROB_ROWS, RunnerLimits

_MIB = 1 << 20
_CONTEXT_BYTES = 640 * _MIB
"""The CUDA context with our kernels, cuBLASLt's, its workspace, and tables of RoPE."""
_GRAPH_BYTES = 10 * _MIB
"""Of one captured forward pass and what samples behind it: nodes, and the places where their results stay."""
_ACTIVATION_BYTES_PER_TOKEN = 1 << 18
"""Of one token of a step, at most: a few vectors of the widest layer of any model served."""
_LOGIT_BYTES = 12
"""Of one logit of a sampled row: float32, float32 scratch of sampling, and what a copy of some rows takes."""


def workspaces(
    limits: RunnerLimits, *, max_step_tokens: int, slot_state_bytes: int, num_graphs: int
) -> Mapping[str, int]:
    """Purpose -> bytes on one GPU.

    Args:
        limits: sizes of the rank's state.
        max_step_tokens: tokens of the largest step.
        slot_state_bytes: of what the device keeps per slot.
        num_graphs: forward passes that are captured.
    """
    rows = limits.max_num_seqs + PROMPT_LOGPROB_ROWS
    return {
        "context": _CONTEXT_BYTES,
        "activations": max_step_tokens * _ACTIVATION_BYTES_PER_TOKEN,
        "logits": rows * limits.vocab_size * _LOGIT_BYTES,
        "slots": slot_state_bytes,
        "graphs": num_graphs * _GRAPH_BYTES,
    }
