"""The head that drafts are read from: as it is, or in E4M3, where the option `head=fp8` of a drafter asks for it.

The likeliest token of a draft is looked for among all rows of a head, which is most of what a draft reads. Rounded
to E4M3, with a scale a row, it is half as much. No token of an answer depends on it, only how many drafts are accepted.
"""

from collections.abc import Mapping

from openinfer_core import Refused
from openinfer_engine.options import EngineOptions
from openinfer_kernels import Array, KernelsError, LinearWeight, Ops, QuantisedWeight

HEAD = "head"
"""The option."""
_FP8 = "fp8"


def asks_for_fp8(options: Mapping[str, str], *, num_ranks: int) -> bool:
    """Whether the option asks for a head in E4M3.

    Raises:
        Refused: it asks for anything else, or on several ranks.
    """
    found = options.get(HEAD)
    if found is None:
        return False
    if found != _FP8:
        raise Refused(f"--speculative: {HEAD} is {_FP8}, or left out, not {found!r}")
    if num_ranks > 1:
        raise Refused(f"--speculative {HEAD}={_FP8}: the head is cut by ranks; leave the option out")
    return True


def made_bytes(options: EngineOptions, num_ids: int, hidden_size: int) -> int:
    """Of what `fp8_head` makes, at most, as `DrafterRequirements.made_bytes`: none without the option."""
    speculation = options.speculation
    return 0 if speculation is None or HEAD not in speculation.options else num_ids * (hidden_size + 4)


def fp8_head(head: LinearWeight, *, ops: Ops) -> QuantisedWeight:
    """`head [V, h]` in E4M3.

    Raises:
        Refused: it is quantised already, or the device has no such products.
    """
    if isinstance(head, QuantisedWeight):
        raise Refused(f"--speculative {HEAD}={_FP8}: the head is quantised already; leave the option out")
    try:
        return ops.draft_head(head)
    except KernelsError as error:
        raise Refused(f"--speculative {HEAD}={_FP8}: {error}; leave the option out") from error


def draft_logits(normed: Array, head: LinearWeight, *, ops: Ops) -> Array:
    """`[n, V]` float32 of a head as it is, or of one that `fp8_head` made."""
    return ops.draft_logits(normed, head) if isinstance(head, QuantisedWeight) else ops.logits(normed, head)
