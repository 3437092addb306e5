"""Which `TierFailure` an exception of a moving thread is."""

import errno

from openinfer_kv_cache import TierFailure


class BlockFault(Exception):
    """One block cannot be moved; the transfer ends with `failure`."""

    def __init__(self, failure: TierFailure) -> None:
        super().__init__(failure.value)
        self.failure = failure


# Ends that say nothing about the health of a tier, and leave its breaker as it is.
NOT_THE_MEDIUM = frozenset({TierFailure.BUSY, TierFailure.CLOSED, TierFailure.BREAKER_OPEN, TierFailure.MISSING})

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_GONE = frozenset({errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN})


def is_full(error: OSError) -> bool:
    """Whether an error says that the medium has no space."""
    return error.errno in _FULL


def classify(error: Exception) -> TierFailure:
    """The reason to count; `ERROR` is for what no medium does: a bug."""
    if isinstance(error, BlockFault):
        return error.failure
    if isinstance(error, ConnectionError):
        return TierFailure.GONE
    if isinstance(error, OSError):
        if is_full(error):
            return TierFailure.FULL
        return TierFailure.GONE if error.errno in _GONE else TierFailure.IO_ERROR
    return TierFailure.ERROR
