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
from openinfer_server.request.sampling_fields import SamplingNumberFields
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
    length_penalty: object = None
    skip_special_tokens: object = None
    use_beam_search: object = None

    IGNORED: ClassVar[Mapping[str, str]] = {
        "length_penalty": "one asks for what is always so; other values are for beams, and tokens are sampled here",
        "skip_special_tokens": "true asks for what is always so; false is refused: /inference/v1/generate returns ids",
        "use_beam_search": "false asks for what is always so; true is refused: tokens are sampled here",
    }
    NEUTRAL: ClassVar[Mapping[str, object]] = {
        "length_penalty": 1,
        "skip_special_tokens": True,
        "use_beam_search": False,
    }

    @property
    def sampling_numbers(self) -> dict[str, float | None]:
        """Those of `SamplingNumberFields`."""
        return {name: getattr(self, name) for name in SamplingNumberFields.__struct_fields__}


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

    IGNORED: ClassVar[Mapping[str, str]] = {
        **SamplingFields.IGNORED,
        "user": "it says whom the request is for, and users are not counted",
    }
