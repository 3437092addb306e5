"""Hidden states at the ends of KV blocks, in the blocks themselves: a cached prefix has the one that a drafter needs.

    block of 16 tokens   [layers of the model, layers of the drafter, boundary layers]
                                                                      the first h numbers: hidden state of token 15

They lie there as if they were KV of further layers, so that whatever moves, shares or evicts a block takes them along.
`openinfer_kernels.HiddenMemory` says how they are read and written. For models without recurrent states; copies of
these keep hidden states of their own (`DrafterRequirements.slots`).
"""

import msgspec

from openinfer_kv_cache import PagedGroup


def boundary_group(like: PagedGroup, *, name: str, num_layers: int) -> PagedGroup:
    """Layers of the shape of a drafter's KV, as many as one hidden state takes in a block."""
    return msgspec.structs.replace(like, name=name, num_layers=num_layers, rope_tag="hidden state of the last token")
