"""Log-probabilities in the two formats of the API."""

import codecs
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

import msgspec

from openinfer_core.events import TokenLogprobs
from openinfer_server.openai.objects import ChatLogprobs, LegacyLogprobs, PromptLogprob, TokenLogprob, TopLogprob
from openinfer_server.request.plan import Prompt
from openinfer_server.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # OpenAI's number for "very unlikely"; JSON has no infinity
_KEPT_NAMES = 2**15  # tokens whose spelling is kept


class ScoredToken(NamedTuple):
    """A token that is shown with its log-probability."""

    token_id: int
    logprobs: TokenLogprobs | None  # None for the first token of a prompt, which nothing predicts
    offset: int  # characters of the text before it


PromptLogprobs: TypeAlias = dict[str, PromptLogprob]
# Makes them of the prompt's ids, what was told of all but the first, and how many alternatives are shown.
PromptFormat: TypeAlias = Callable[[Sequence[int], Sequence[TokenLogprobs], int], list[PromptLogprobs | None]]
LogprobFormat: TypeAlias = Callable[[Sequence[ScoredToken]], msgspec.Struct]  # makes what stands under `logprobs`


def legacy_format(tokenizer: Tokenizer) -> Callable[[Sequence[ScoredToken]], LegacyLogprobs]:
    """The format of `/v1/completions`: the token itself is among its alternatives, however unlikely."""
    name_of = lru_cache(_KEPT_NAMES)(partial(_name, tokenizer))

    def build(tokens: Sequence[ScoredToken]) -> LegacyLogprobs:
        shown = LegacyLogprobs([], [], [], [])
        for token_id, logprobs, offset in tokens:
            name = name_of(token_id)
            shown.text_offset.append(offset)
            shown.tokens.append(name)
            if logprobs is None:
                shown.token_logprobs.append(None)
                shown.top_logprobs.append(None)
                continue
            logprob = _finite(logprobs.logprob)
            top = {name: logprob}
            for other, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
                top.setdefault(name_of(other), _finite(value))
            shown.token_logprobs.append(logprob)
            shown.top_logprobs.append(top)
        return shown

    return build


def chat_format(tokenizer: Tokenizer) -> Callable[[Sequence[ScoredToken]], ChatLogprobs]:
    """The format of `/v1/chat/completions`, with the bytes of each token."""

    def spell(token_id: int) -> tuple[str, list[int]]:
        data = tokenizer.token_bytes(token_id)
        return data.decode(errors="replace"), list(data)

    spelled = lru_cache(_KEPT_NAMES)(spell)

    def entry(token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
        top: list[TopLogprob] = []
        for other, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
            text, data = spelled(other)
            top.append(TopLogprob(text, _finite(value), data))
        text, data = spelled(token_id)
        return TokenLogprob(text, _finite(logprobs.logprob), data, top)

    def build(tokens: Sequence[ScoredToken]) -> ChatLogprobs:
        return ChatLogprobs([entry(token.token_id, token.logprobs) for token in tokens if token.logprobs is not None])

    return build


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _with_alternatives(logprobs: TokenLogprobs, alternatives: int) -> TokenLogprobs:
    if len(logprobs.top_ids) <= alternatives:
        return logprobs
    return TokenLogprobs(
        logprobs.logprob, logprobs.rank, logprobs.top_ids[:alternatives], logprobs.top_logprobs[:alternatives]
    )


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def prompt_format(tokenizer: Tokenizer) -> PromptFormat:
    """The format of `prompt_logprobs`, which is vLLM's: one per token, by token id; nothing predicts the first."""
    name_of = lru_cache(_KEPT_NAMES)(partial(_name, tokenizer))

    def entry(token_id: int, logprobs: TokenLogprobs, alternatives: int) -> PromptLogprobs:
        shown = {str(token_id): PromptLogprob(_finite(logprobs.logprob), logprobs.rank, name_of(token_id))}
        likeliest = zip(logprobs.top_ids[:alternatives], logprobs.top_logprobs, strict=False)
        for rank, (other, value) in enumerate(likeliest, 1):
            shown.setdefault(str(other), PromptLogprob(_finite(value), rank, name_of(other)))
        return shown

    def build(
        token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], alternatives: int
    ) -> list[PromptLogprobs | None]:
        scored = zip(token_ids[1:], logprobs, strict=True)
        return [None, *(entry(token_id, each, alternatives) for token_id, each in scored)]

    return build


def score_prompt(
    tokenizer: Tokenizer, prompt: Prompt, logprobs: Sequence[TokenLogprobs], alternatives: int
) -> list[ScoredToken]:
    """The tokens of an echoed prompt, with so many alternatives of those that there are; nothing predicts the first.

    Offsets are exact where the tokens' bytes make up the prompt's text; a normaliser, or a BOS the text does not show,
    shifts them, and they never point beyond the text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    scored: list[ScoredToken] = []
    offset = 0
    for token_id, each in zip(prompt.token_ids, (None, *logprobs), strict=True):
        token_logprobs = None if each is None else _with_alternatives(each, alternatives)
        scored.append(ScoredToken(token_id, token_logprobs, min(offset, len(prompt.text))))
        offset += len(decoder.decode(tokenizer.token_bytes(token_id)))
    return scored
