"""What a store says of itself next to its blocks, wherever it is: format and layout."""

from enum import StrEnum

import msgspec

from openinfer_kv_cache import KvLayout, check_same_layout
from openinfer_kv_offload.errors import StoreError

FORMAT_VERSION = 1


class StoreAccess(StrEnum):
    """What a process does with a store."""

    WRITE = "write"
    """Reads and writes; one process at a time."""
    READ = "read"
    """Reads what another writes; any number."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a store says of itself."""

    version: int
    layout: KvLayout


def encode_manifest(layout: KvLayout) -> bytes:
    return msgspec.json.encode(Manifest(version=FORMAT_VERSION, layout=layout))


def check_manifest(encoded: bytes, layout: KvLayout, *, where: str) -> None:
    """Compares a store's manifest with the layout that it is opened with; `where` is for messages.

    Raises:
        LayoutMismatchError: the store holds another layout.
        StoreError: these bytes are no manifest, or one of another release.
    """
    try:
        manifest = msgspec.json.decode(encoded, type=Manifest)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{where} cannot be read: {error}; remove the store to begin anew") from error
    if manifest.version != FORMAT_VERSION:
        raise StoreError(f"{where} has format {manifest.version}; this release reads {FORMAT_VERSION}")
    check_same_layout(layout, manifest.layout)
