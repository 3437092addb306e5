"""Response bodies as msgspec types, in OpenAI's shape."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where prompt tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """What completion tokens were spent on."""

    reasoning_tokens: int
    # Of a request with a prediction: drafts from it that are in the answer, and those that were computed in vain.
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request, over all its choices; each prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class LegacyLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of `/v1/completions`: one entry per token in each list."""

    text_offset: list[int]  # characters of `text` before the token
    token_logprobs: list[float | None]
    tokens: list[str]  # a token that is not whole UTF-8 is shown as `bytes:\xe2\x82`
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(msgspec.Struct, frozen=True):
    """An alternative at one position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of `/v1/chat/completions`."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token at one position of a prompt; vLLM's shape."""

    logprob: float
    rank: int  # 1 + the number of likelier tokens in the vocabulary
    decoded_token: str  # a token that is not whole UTF-8 is shown as `bytes:\xe2\x82`


# One per token of the prompt, by token id: the token itself and its alternatives; nothing predicts the first.
PromptScores: TypeAlias = list[dict[str, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str
    stop_reason: str | int | None  # stop string or stop token of the request that ended it; vLLM's, as what follows
    prompt_logprobs: PromptScores | msgspec.UnsetType = msgspec.UNSET  # these three if they were asked for
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # the stop token that ended it included


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/v1/completions`."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # vLLM's, if KV was left for another engine


class MessageFunction(msgspec.Struct, frozen=True):
    """A function the model calls."""

    name: str
    arguments: str  # JSON, as the model wrote it: an answer that was cut short has half of it


class MessageToolCall(msgspec.Struct, frozen=True):
    """A call the model makes."""

    id: str
    function: MessageFunction
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's turn."""

    role: str = "assistant"
    content: str | None  # None if there are calls and nothing else
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[MessageToolCall] | msgspec.UnsetType = msgspec.UNSET
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None  # stop string or stop token of the request that ended it; vLLM's
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # if asked for; the stop token that ended it included


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptScores | msgspec.UnsetType = msgspec.UNSET  # vLLM's, if they were asked for
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # vLLM's, if KV was left for another engine


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as the engine would get it: response of `/v1/chat/completions/render`, one of `/v1/completions/render`.

    Fields have vLLM's names, and are those of a request to `/inference/v1/generate`.
    """

    request_id: str
    model: str
    token_ids: Sequence[int]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A name the server answers to."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "openinfer"
    root: str  # what the engine calls the model it runs; vLLM's name, as are those below
    parent: str | None = None  # of an adapter the model that it changes
    max_model_len: int  # tokens of its context
    sampling_defaults: dict[str, float]  # of parameters that a request does not give; those not here change nothing


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/v1/models`."""

    object: str = "list"
    data: list[Model]
