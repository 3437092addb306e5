"""`GenerateRequest.transfer` and `Finished.transfer`: what a router of prefill and decode engines carries between them.

    to prefill   {"do_remote_decode": true}
    from it      {"do_remote_decode": false, "do_remote_prefill": true,
                  "openinfer": {"layout": "...", "tier": "valkey", "tokens": 4096, "digest": "..."}}
    to decode    the same

The two flags are vLLM's. `openinfer` says how much of the prompt is stored, and nothing where: an engine reads from
the tiers of its own configuration, under digests that it computes itself. So whatever is written there, the worst that
comes of it is that a prompt is computed.
"""

import re
from typing import Any

import msgspec

from openinfer_core.errors import InvalidRequest
from openinfer_kv_cache import Digest

_MAX_TOKENS = 1 << 24
_HEX = re.compile(r"[0-9a-f]{1,128}")


class StoredPrefix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a prompt can be read from a tier.

    Raises:
        ValueError: a value is out of range.
    """

    layout: str
    """Digest of the layout of its blocks (`KvLayout.digest`)."""
    tier: str
    """Name of the tier, for logs."""
    tokens: int
    """How many of the prompt's first tokens."""
    digest: str | None = None
    """Of the last of its blocks, in hexadecimal; None if there is none."""

    def __post_init__(self) -> None:
        if not 0 <= self.tokens <= _MAX_TOKENS:
            raise ValueError(f"tokens is {self.tokens}; it must be between 0 and {_MAX_TOKENS}")
        if len(self.layout) > 128 or len(self.tier) > 128:
            raise ValueError("layout and tier have at most 128 characters")
        if self.digest is not None and not _HEX.fullmatch(self.digest):
            raise ValueError("digest must be up to 128 hexadecimal digits")


class TransferAsked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request asks: to leave its KV for another engine, or to find what another one has left.

    Raises:
        ValueError: both are asked.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    openinfer: StoredPrefix | None = None

    def __post_init__(self) -> None:
        if self.do_remote_decode and self.do_remote_prefill:
            raise ValueError("do_remote_decode and do_remote_prefill exclude each other")


def read_transfer(transfer: dict[str, Any]) -> TransferAsked:
    """Raises `InvalidRequest`: a field is not known, or out of range."""
    try:
        return msgspec.convert(transfer, TransferAsked)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"transfer: {error}", field="transfer") from error


def handover_answer(*, layout: str, tier: str, tokens: int, digest: Digest | None) -> dict[str, Any]:
    stored = StoredPrefix(layout=layout, tier=tier, tokens=tokens, digest=None if digest is None else digest.hex())
    return {"do_remote_decode": False, "do_remote_prefill": True, "openinfer": msgspec.to_builtins(stored)}
