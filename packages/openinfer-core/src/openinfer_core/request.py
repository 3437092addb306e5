"""`GenerateRequest`: what a frontend asks of an engine. Tokens in; text never reaches an engine."""

from typing import NewType

import msgspec

from openinfer_core.errors import InvalidRequest
from openinfer_core.sampling import MAX_TOKEN_ID, MAX_TOKENS, SamplingParams

RequestId = NewType("RequestId", int)
"""Chosen by the caller, 0 .. 2^63 - 1, unique among the requests of one handle that have not ended."""

MAX_NAME_LENGTH = 512
"""Bound of tenant, salt, LoRA name and trace parent, in characters."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt to continue.

    Raises:
        InvalidRequest: a value is out of range; `field` names it.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    lora: str | None = None
    """Name of a loaded adapter."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with equal salts."""
    tenant: str = ""
    """Whose fair share this request draws on."""
    priority: int = 0
    """Smaller is served earlier by the `priority` queue policy."""
    trace_parent: str | None = None
    """A W3C `traceparent`, handed on to spans."""

    def __post_init__(self) -> None:
        if not 0 <= self.request_id < 2**63:
            raise InvalidRequest(f"request_id is {self.request_id}; it must be in 0 .. 2^63 - 1", field="request_id")
        prompt = self.prompt_token_ids
        if not 1 <= len(prompt) <= MAX_TOKENS:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens; it must have between 1 and {MAX_TOKENS}",
                field="prompt_token_ids",
            )
        if min(prompt) < 0 or max(prompt) > MAX_TOKEN_ID:
            raise InvalidRequest("a prompt token id is negative or exceeds int32", field="prompt_token_ids")
        if not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest(f"priority is {self.priority}; it must fit in int32", field="priority")
        for name in ("lora", "cache_salt", "tenant", "trace_parent"):
            value = getattr(self, name)
            if value is not None and len(value) > MAX_NAME_LENGTH:
                raise InvalidRequest(f"{name} has {len(value)} characters; at most {MAX_NAME_LENGTH} fit", field=name)
