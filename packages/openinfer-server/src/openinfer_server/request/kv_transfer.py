"""`kv_transfer_params`: what proxies of prefill and decode engines send, and what the engine is asked for it.

    to prefill   {"do_remote_decode": true, ...}      leave the prompt's KV for another engine; the answer says how much
    to decode    {"do_remote_prefill": true, ...}     begin on what another engine has left

The object is vLLM's, and proxies take the one of an answer to the next engine unread. Blocks are found by their
content, in the tiers of the engine's own configuration: fields that say where another engine's memory is are ignored,
and nothing that a client writes is ever connected to.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

import msgspec

from openinfer_core.engine import EngineCapability, EngineInfo
from openinfer_server.http.api_errors import invalid, refused
from openinfer_server.request.fields import RequestFields, between, check_rules
from openinfer_server.request.rules import ANY, Neutral, Rule

_FIELD: Final = "kv_transfer_params"
_MAX_TOKENS: Final = 1 << 24
_MAX_CHARACTERS: Final = 128
_ELSEWHERE: Final = Neutral(ANY, "blocks are found by their content, in this server's own KV tiers")
_Text = Annotated[str, msgspec.Meta(extra_json_schema={"maxLength": _MAX_CHARACTERS})]


class StoredPrompt(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a prompt an engine has left, as its answer said."""

    layout: _Text
    tier: _Text
    tokens: Annotated[int, between(0, _MAX_TOKENS)]
    digest: _Text | None = None


class KvTransferParams(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object under `kv_transfer_params`, of a request or an answer."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    openinfer: StoredPrompt | None = None
    dcp_size: object = None
    pp_size: object = None
    remote_block_ids: object = None
    remote_blocks_expiry_time: object = None
    remote_bootstrap_addr: object = None
    remote_engine_id: object = None
    remote_host: object = None
    remote_num_tokens: object = None
    remote_port: object = None
    remote_registration_generation: object = None
    remote_request_id: object = None
    tp_size: object = None
    transfer_id: object = None
    transfer_mode: object = None

    RULES: ClassVar[Mapping[str, Rule]] = dict.fromkeys(
        (
            "dcp_size",
            "pp_size",
            "remote_block_ids",
            "remote_blocks_expiry_time",
            "remote_bootstrap_addr",
            "remote_engine_id",
            "remote_host",
            "remote_num_tokens",
            "remote_port",
            "remote_registration_generation",
            "remote_request_id",
            "tp_size",
            "transfer_id",
            "transfer_mode",
        ),
        _ELSEWHERE,
    )

    @property
    def leaves_kv(self) -> bool:
        """Whether another engine is to decode."""
        return bool(self.do_remote_decode)


def asked_transfer(params: KvTransferParams | None, info: EngineInfo, *, stream: bool) -> dict[str, Any] | None:
    """`GenerateRequest.transfer` of a request's parameters.

    Raises:
        ApiError: 400; they contradict each other, or the engine hands no KV to others.
    """
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return None
    check_rules(params, f"{_FIELD}.")
    if params.do_remote_decode and params.do_remote_prefill:
        raise invalid(_FIELD, "do_remote_decode and do_remote_prefill exclude each other")
    if params.do_remote_decode and stream:
        raise invalid(
            "stream", "kv_transfer_params.do_remote_decode goes with stream=false: its answer says what is left"
        )
    if EngineCapability.KV_TRANSFER not in info.capabilities:
        raise refused(_FIELD, "this engine hands no KV to others; start it with --kv-transfer")
    if params.do_remote_decode:
        return {"do_remote_decode": True}
    stored = params.openinfer
    if stored is None:
        return {"do_remote_prefill": True}
    _check_stored(stored)
    return {"do_remote_prefill": True, "openinfer": msgspec.to_builtins(stored)}


def _check_stored(stored: StoredPrompt) -> None:
    where = f"{_FIELD}.openinfer"
    if not 0 <= stored.tokens <= _MAX_TOKENS:
        raise invalid(f"{where}.tokens", f"tokens is {stored.tokens}; it must be between 0 and {_MAX_TOKENS}")
    for name in ("layout", "tier", "digest"):
        text: str = getattr(stored, name) or ""
        if len(text) > _MAX_CHARACTERS:
            raise invalid(
                f"{where}.{name}", f"{name} has {len(text)} characters; at most {_MAX_CHARACTERS} are possible"
            )
    if set(stored.digest or "") - set("0123456789abcdef"):
        raise invalid(f"{where}.digest", "digest is a number in hexadecimal, as the answer of a prefill has it")
