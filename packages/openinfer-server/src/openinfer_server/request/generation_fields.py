"""Fields that several routes take which generate text."""

from collections.abc import Mapping
from typing import ClassVar

from openinfer_server.request.fields import (
    Count,
    Deadline,
    Hints,
    LogitBias,
    NonNegative,
    Priority,
    RequestFields,
    Salt,
    Seed,
    Stop,
    Stops,
    StopTokenIds,
)
from openinfer_server.request.structured_types import GuidedFields, ResponseFormat


class StreamOptions(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream says beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None

    IGNORED: ClassVar[Mapping[str, str]] = {"include_obfuscation": "false asks for what is always so; true is refused"}


class SamplingFields(GuidedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every route takes that generates text."""

    seed: Seed | None = None
    stop: Stop | Stops | None = None
    logit_bias: LogitBias | None = None
    # ours and vLLM's
    min_tokens: NonNegative | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    deadline_s: Deadline | None = None
    hints: Hints | None = None


class GenerationFields(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that OpenAI's two older routes take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    """OpenAI's for chats, vLLM's for completions, too."""
    user: str | None = None

    IGNORED: ClassVar[Mapping[str, str]] = {"user": "it says whom the request is for, and users are not counted"}
