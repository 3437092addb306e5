"""Fields that several routes take which generate text."""

from collections.abc import Mapping
from typing import ClassVar

from openinfer_server.request.fields import (
    AllowedTokenIds,
    BadWords,
    Count,
    Deadline,
    Hints,
    LogitBias,
    Logprobs,
    NonNegative,
    NumKept,
    Priority,
    RequestFields,
    Salt,
    Seed,
    Stop,
    Stops,
    StopTokenIds,
)
from openinfer_server.request.kv_transfer import KvTransferParams
from openinfer_server.request.neutral_fields import LABELS, METADATA, NO_OBFUSCATION, NO_TRANSFER, USER
from openinfer_server.request.retention import CacheRetention
from openinfer_server.request.rules import Neutral, Rule
from openinfer_server.request.sampling_fields import SamplingNumberFields
from openinfer_server.request.structured_types import GuidedFields, ResponseFormat


class StreamOptions(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream says beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # the tokens so far in every event; vLLM's
    include_obfuscation: bool | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {"include_obfuscation": NO_OBFUSCATION}


class SamplingFields(GuidedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every route takes that generates text."""

    seed: Seed | None = None
    stop: Stop | Stops | None = None
    logit_bias: LogitBias | None = None
    # ours and vLLM's
    min_tokens: NonNegative | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: AllowedTokenIds | None = None  # only these are sampled; stop tokens are not among them by itself
    bad_words: BadWords | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    deadline_s: Deadline | None = None
    hints: Hints | None = None
    add_generation_prompt: bool | None = None
    """Whether the prompt of a chat ends where the assistant's answer begins, or with the end of the last message."""
    continue_final_message: bool | None = None
    """Whether a chat's last message, which is the assistant's, is gone on with or followed by a turn of its own."""
    client_metadata: dict[str, str] | None = None
    kv_transfer_params: object = None
    prompt_cache_key: str | None = None
    """Names the conversation: its next turn supersedes what this one leaves in the cache."""
    prompt_cache_retention: CacheRetention | None = None
    """How long what it leaves goes after what others left: ten minutes, or a day."""
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        **GuidedFields.RULES,
        **LABELS,
        "kv_transfer_params": NO_TRANSFER,
        "safety_identifier": USER,
        "user": USER,
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
    metadata: dict[str, str] | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {**SamplingFields.RULES, "metadata": METADATA}


class TokenDetailFields(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What OpenAI's two older routes take of vLLM's about tokens, and about where they are computed."""

    truncate_prompt_tokens: NumKept | None = None  # keeps so many of the prompt's end; -1: what fits beside the answer
    prompt_logprobs: Logprobs | None = None  # alternatives per prompt token; not streamed
    return_token_ids: bool | None = None
    kv_transfer_params: KvTransferParams | None = None  # what proxies of prefill and decode engines send
    add_special_tokens: object = None
    return_tokens_as_token_ids: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        **{name: rule for name, rule in GenerationFields.RULES.items() if name != "kv_transfer_params"},
        "return_tokens_as_token_ids": Neutral((False,), "their tokens are text; return_token_ids has ids"),
    }
