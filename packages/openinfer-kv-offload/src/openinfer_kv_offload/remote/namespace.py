"""`Namespace`: one layout's blocks under a prefix of an object store.

PREFIX/layout         format and layout (`format/manifest.py`)
PREFIX/block/DIGEST   a record (`format/record.py`), its digest in hexadecimal
"""

from collections.abc import Sequence

from openinfer_kv_cache import Digest, KvLayout
from openinfer_kv_cache.tiers.traits import Medium
from openinfer_kv_offload.errors import StoreError
from openinfer_kv_offload.format.manifest import check_manifest, encode_manifest
from openinfer_kv_offload.remote.object_store import AsksForKeys, KeepsKeys, ObjectMedium, ObjectStore
from openinfer_kv_offload.transfer.memory import WrapMedium

_DIGEST_CHARACTERS = 32


class Namespace:
    """Names of objects, and what is done by name; a writer writes the manifest where there is none.

    Raises:
        LayoutMismatchError: the prefix holds blocks of another layout.
        StoreError: the server cannot be reached or refuses, or there is nothing to read.
    """

    def __init__(
        self, store: ObjectStore, prefix: str, layout: KvLayout, *, is_writer: bool, wrap_medium: WrapMedium
    ) -> None:
        self._store = store
        self._layout_key = f"{prefix}/layout"
        self._manifest = encode_manifest(layout)
        self._blocks = f"{prefix}/block/"
        self._is_writer = is_writer
        self._wrap_medium = wrap_medium
        try:
            self._check_layout(layout)
        except OSError as error:
            raise StoreError(f"{store.address} cannot be used: {error}") from error

    def list_digests(self) -> set[Digest]:
        names = (key.removeprefix(self._blocks) for key in self._store.list(self._blocks))
        return {digest for name in names if (digest := _parse(name)) is not None}

    @property
    def asks_for_blocks(self) -> bool:
        """Whether `has` can be called."""
        return isinstance(self._store, AsksForKeys)

    def has(self, digest: Digest) -> bool:
        return isinstance(self._store, AsksForKeys) and self._store.has(self._key(digest))

    def medium(self, digest: Digest) -> Medium:
        return self._wrap_medium(ObjectMedium(self._store, self._key(digest)))

    def delete(self, digests: Sequence[Digest]) -> None:
        if digests and self._is_writer:  # a process that only reads leaves that to others
            self._store.delete([self._key(digest) for digest in digests])

    def restore_layout(self) -> None:
        """Writes the manifest again if the server has lost it: it is read so seldom that a cache evicts it first."""
        if self._is_writer and self._store.get(self._layout_key) is None:
            self._put_manifest()

    def close(self) -> None:
        self._store.close()

    def _key(self, digest: Digest) -> str:
        return self._blocks + digest.hex()

    def _check_layout(self, layout: KvLayout) -> None:
        where = f"{self._store.address}, {self._layout_key}"
        manifest = self._store.get(self._layout_key)
        if manifest is None and self._is_writer:
            self._put_manifest()
            # Read back: of two processes that began at the same moment, one has written last. A server that has
            # evicted it already has nothing that could differ.
            manifest = self._store.get(self._layout_key) or self._manifest
        if manifest is None:
            raise StoreError(f"{where} is not there; start a process that writes to this prefix first")
        check_manifest(bytes(manifest), layout, where=where)

    def _put_manifest(self) -> None:
        # Not for the time to live of blocks: readers may begin while a writer has had nothing to save for longer.
        put = self._store.put_lasting if isinstance(self._store, KeepsKeys) else self._store.put
        put(self._layout_key, self._manifest)


def _parse(name: str) -> Digest | None:
    """The digest that a key ends with; None for what is not ours."""
    try:
        return Digest(bytes.fromhex(name)) if len(name) == _DIGEST_CHARACTERS else None
    except ValueError:
        return None
