"""The exception tree of the package, next to what it raises of `openinfer_kv_cache.errors`.

    openinfer_core.errors.OpenInferError
    └── KvOffloadError
        ├── TierConfigError   an option or a setting is out of range (also a ValueError)
        └── StoreError        a folder cannot be opened as a store: in use, of another format, not one of ours

What goes wrong while bytes move is never raised to the caller: it ends the transfer (`TierFailure`).
"""

from openinfer_core.errors import OpenInferError


class KvOffloadError(OpenInferError):
    """Root of everything this package raises on purpose."""


class TierConfigError(KvOffloadError, ValueError):
    """An option or a setting is out of range; a `ValueError` too, so that msgspec reports it as a validation error."""


class StoreError(KvOffloadError):
    """A folder cannot be opened as a store."""
