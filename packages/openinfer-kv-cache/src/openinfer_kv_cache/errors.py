"""The exception tree of the package.

    openinfer_core.errors.OpenInferError
    └── KvCacheError
        ├── BlockStateError      a block or slot was asked for a move its state diagram does not have
        ├── SequenceStateError   a sequence was used out of order: matched twice, sealed too far
        ├── EvictionPolicyError  an eviction policy answered with blocks that it does not hold
        ├── KvConfigError        a spec, layout, option or key is out of range (also a ValueError)
        ├── LayoutMismatchError  two sides that would exchange KV disagree about its layout
        ├── KvTierError          a tier was given a spent hit, or memory that is not its blocks
        └── IntegrityError       the bookkeeping contradicts itself: a bug, never a user's doing

A pool that is short is not an error: `reserve` and `allocate` answer None and change nothing.
"""

from openinfer_core.errors import OpenInferError


class KvCacheError(OpenInferError):
    """Root of everything this package raises on purpose."""


class BlockStateError(KvCacheError):
    """A block or slot is not in the state that the move asked for starts from; nothing was changed."""


class SequenceStateError(KvCacheError):
    """A sequence was used in an order that cannot be right; nothing was changed."""


class EvictionPolicyError(KvCacheError):
    """An eviction policy broke its contract; no block was evicted."""


class KvConfigError(KvCacheError, ValueError):
    """A spec, a layout, an option or a digest key is out of range; a `ValueError` too, as msgspec then reports it."""


class LayoutMismatchError(KvCacheError):
    """Two sides that would exchange KV bytes describe them differently."""


class KvTierError(KvCacheError):
    """A tier was called in a way that cannot be right; nothing was begun."""


class IntegrityError(KvCacheError):
    """`check_integrity` found the books contradicting themselves."""
