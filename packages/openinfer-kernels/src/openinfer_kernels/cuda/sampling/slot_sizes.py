"""`SlotSizes`: what the device's state of all slots takes; known without a device, for plans."""

from dataclasses import dataclass

from openinfer_kernels.cuda.sampling.slot_record import PARAMS_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSizes:
    """Sizes of the state."""

    max_num_seqs: int
    max_blocks: int
    """KV blocks of the longest context."""
    block_tokens: int
    num_tables: int
    """Block tables of a sequence."""
    num_columns: int
    """Of the logits."""
    max_biased: int
    """Tokens of one sequence whose logits are changed by a bias."""


def state_bytes(sizes: SlotSizes) -> int:
    per_slot = (
        4 * sizes.num_tables * sizes.max_blocks + 5 * sizes.num_columns + 8 * sizes.max_biased + PARAMS_BYTES + 32
    )
    return sizes.max_num_seqs * per_slot


def drafted_state_bytes(sizes: SlotSizes, *, max_drafts: int) -> int:
    """What `DraftedSlotState` takes: a second list of changed logits, and drafts."""
    return state_bytes(sizes) + sizes.max_num_seqs * (8 * sizes.max_biased + 4 * max_drafts + 32)
