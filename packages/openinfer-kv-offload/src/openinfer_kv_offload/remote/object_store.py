"""`ObjectStore`: what a tier asks of a server that keeps bytes under keys."""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from openinfer_kv_cache import TierFailure
from openinfer_kv_offload.transfer.failures import BlockFault
from openinfer_kv_offload.transfer.memory import copy_bytes


class ObjectStore(Protocol):
    """Bytes under keys, on a server; used from several threads at once.

    Every call ends within a time that the store was given. Errors are those that `failures.classify` tells apart:
    `ConnectionError` where the server cannot be reached or does not answer, `OSError` with ENOSPC where it is full,
    other `OSError`s where it refuses.
    """

    @property
    def address(self) -> str:
        """Where it is, without secrets: for messages."""
        ...

    def put(self, key: str, content: memoryview | bytes) -> None:
        """Stores bytes under a key, instead of what was there; a reader sees the old ones or the new ones."""
        ...

    def get(self, key: str) -> "bytes | memoryview | None":
        """The bytes under a key; None if there are none."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Removes keys; those that are not there already are no error."""
        ...

    def list(self, prefix: str) -> Iterable[str]:
        """The keys that begin with `prefix`, in any order."""
        ...

    def close(self) -> None:
        """Gives its connections back."""
        ...


@runtime_checkable
class AsksForKeys(ObjectStore, Protocol):
    """A store that says whether it has a key, for less than reading its object or listing all."""

    def has(self, key: str) -> bool: ...


@runtime_checkable
class KeepsKeys(ObjectStore, Protocol):
    """A store that forgets what was put after a time, unless it is told to keep it."""

    def put_lasting(self, key: str, content: memoryview | bytes) -> None: ...


class ObjectMedium:
    """One object as a tier's medium; faults are injected around it."""

    __slots__ = ("_key", "_store")

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store = store
        self._key = key

    def write(self, offset_bytes: int, parts: Sequence[memoryview]) -> None:
        (whole,) = parts
        if offset_bytes:
            raise ValueError(f"an object is written as a whole, not from byte {offset_bytes} on")
        self._store.put(self._key, whole)

    def read(self, offset_bytes: int, into: memoryview) -> None:
        # Zeros after a shorter object: no checksum matches them.
        if offset_bytes:
            raise ValueError(f"an object is read as a whole, not from byte {offset_bytes} on")
        content = self._store.get(self._key)
        if content is None:
            raise BlockFault(TierFailure.MISSING)
        found = memoryview(content)[: len(into)]
        copy_bytes(into[: len(found)], found)
        into[len(found) :] = bytes(len(into) - len(found))
