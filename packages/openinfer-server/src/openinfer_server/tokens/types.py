"""Bodies and answers of `/inference/v1/generate`: tokens in, tokens out. Names are vLLM's."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from openinfer_server.openai.objects import Usage
from openinfer_server.request.fields import (
    AllowedTokenIds,
    Count,
    Deadline,
    Hints,
    LogitBias,
    Logprobs,
    NonNegative,
    Priority,
    RequestFields,
    Salt,
    Seed,
    StopTokenIds,
    TokenId,
)
from openinfer_server.request.generation_fields import StreamOptions
from openinfer_server.request.kv_transfer import KvTransferParams
from openinfer_server.request.neutral_fields import LABELS, NeutralSamplingFields
from openinfer_server.request.rules import Neutral, Refused, Rule
from openinfer_server.request.structured_types import StructuredOutputs

_NO_TEXT = "no text is made here; /v1/completions makes some"
_NO_WORDS = Neutral(([],), _NO_TEXT)


class TokenSampling(NeutralSamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object under `sampling_params`."""

    max_tokens: NonNegative | None = None
    min_tokens: NonNegative | None = None
    n: Count | None = None
    seed: Seed | None = None
    logit_bias: LogitBias | None = None
    stop_token_ids: StopTokenIds | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    ignore_eos: bool | None = None
    logprobs: Logprobs | None = None  # alternatives per generated token
    prompt_logprobs: Logprobs | None = None  # alternatives per prompt token
    structured_outputs: StructuredOutputs | None = None
    detokenize: bool | None = None
    stop: list[str] | None = None
    bad_words: list[str] | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        **NeutralSamplingFields.RULES,
        "bad_words": _NO_WORDS,
        "detokenize": Neutral((False,), f"false asks for what is always so; {_NO_TEXT}"),
        "stop": _NO_WORDS,
    }


class TokenRequest(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /inference/v1/generate`."""

    token_ids: list[TokenId]
    sampling_params: TokenSampling = TokenSampling()
    model: str | None = None
    request_id: str | None = None  # comes back in the answer; made here if absent
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    deadline_s: Deadline | None = None
    hints: Hints | None = None
    client_metadata: dict[str, str] | None = None
    features: object = None
    kv_transfer_params: KvTransferParams | None = None
    service_tier: str | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {**LABELS, "features": Refused("this server serves text only")}


class TokenAlternative(msgspec.Struct, frozen=True):
    """A token and its log-probability."""

    token_id: int
    logprob: float


class ScoredTokenId(msgspec.Struct, frozen=True, kw_only=True):
    """A token that is there, its log-probability, and likelier or less likely ones."""

    token_id: int
    logprob: float
    rank: int  # 1 + the number of likelier tokens in the vocabulary
    top: list[TokenAlternative]


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation, or a piece of one in a stream."""

    index: int
    token_ids: list[int]  # without the stop token that ended it
    logprobs: list[ScoredTokenId] | None
    finish_reason: str | None
    stop_token_id: int | None = None  # the stop token that ended it


class TokenResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/inference/v1/generate`, or one event of its stream."""

    request_id: str
    model: str
    choices: list[TokenChoice]
    prompt_logprobs: list[ScoredTokenId | None] | None = None  # one per prompt token; nothing predicts the first
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # if KV was left for another engine
