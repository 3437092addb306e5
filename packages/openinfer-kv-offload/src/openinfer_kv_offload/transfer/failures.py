"""Which `TierFailure` an exception of a moving thread is."""

import errno

from openinfer_kv_cache import TierFailure


class BlockFault(Exception):
    """One block cannot be moved, for a reason that the tier knows.

    Args:
        failure: what the transfer ends with.
    """

    def __init__(self, failure: TierFailure) -> None:
        super().__init__(failure.value)
        self.failure = failure


NOT_THE_MEDIUM = frozenset({TierFailure.BUSY, TierFailure.CLOSED, TierFailure.BREAKER_OPEN, TierFailure.MISSING})
"""Ends that say nothing about the health of a tier, and leave its breaker as it is."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_GONE = frozenset({errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN})


def classify(error: Exception) -> TierFailure:
    """The reason to count; `ERROR` is for what no medium does: a bug."""
    if isinstance(error, BlockFault):
        return error.failure
    if isinstance(error, ConnectionError):
        return TierFailure.GONE
    if isinstance(error, OSError):
        if error.errno in _FULL:
            return TierFailure.FULL
        return TierFailure.GONE if error.errno in _GONE else TierFailure.IO_ERROR
    return TierFailure.ERROR
