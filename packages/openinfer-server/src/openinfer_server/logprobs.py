"""Log-probabilities in the two formats of the API."""

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from openinfer_core.events import TokenLogprobs
from openinfer_server.api_responses import ChatLogprobs, LegacyLogprobs, TokenLogprob, TopLogprob
from openinfer_server.requests import Prompt
from openinfer_server.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""OpenAI's number for "very unlikely"; JSON has no infinity."""


class ScoredToken(NamedTuple):
    """A token that is shown with its log-probability."""

    token_id: int
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt, which nothing predicts."""
    offset: int
    """Characters of the text before it."""


LogprobFormat: TypeAlias = Callable[[Sequence[ScoredToken]], msgspec.Struct]
"""Makes what stands under `logprobs`."""


def legacy_format(tokenizer: Tokenizer) -> Callable[[Sequence[ScoredToken]], LegacyLogprobs]:
    """The format of `/v1/completions`: the token itself is among its alternatives, however unlikely."""

    def top(token: ScoredToken) -> dict[str, float] | None:
        if token.logprobs is None:
            return None
        shown = {_name(tokenizer, token.token_id): _finite(token.logprobs.logprob)}
        for token_id, logprob in _alternatives(token.logprobs):
            shown.setdefault(_name(tokenizer, token_id), logprob)
        return shown

    def build(tokens: Sequence[ScoredToken]) -> LegacyLogprobs:
        return LegacyLogprobs(
            text_offset=[token.offset for token in tokens],
            token_logprobs=[None if t.logprobs is None else _finite(t.logprobs.logprob) for t in tokens],
            tokens=[_name(tokenizer, token.token_id) for token in tokens],
            top_logprobs=[top(token) for token in tokens],
        )

    return build


def chat_format(tokenizer: Tokenizer) -> Callable[[Sequence[ScoredToken]], ChatLogprobs]:
    """The format of `/v1/chat/completions`, with the bytes of each token."""

    def entry(token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
        data = tokenizer.token_bytes(token_id)
        top = [
            TopLogprob(_replaced(other), logprob, list(other))
            for other, logprob in ((tokenizer.token_bytes(i), logprob) for i, logprob in _alternatives(logprobs))
        ]
        return TokenLogprob(_replaced(data), _finite(logprobs.logprob), list(data), top)

    def build(tokens: Sequence[ScoredToken]) -> ChatLogprobs:
        return ChatLogprobs([entry(token.token_id, token.logprobs) for token in tokens if token.logprobs is not None])

    return build


def _alternatives(logprobs: TokenLogprobs) -> list[tuple[int, float]]:
    return [(i, _finite(logprob)) for i, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)]


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _replaced(data: bytes) -> str:
    return data.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def score_prompt(tokenizer: Tokenizer, prompt: Prompt, logprobs: Sequence[TokenLogprobs]) -> list[ScoredToken]:
    """The tokens of an echoed prompt; nothing predicts the first.

    Offsets are exact where the tokens' bytes make up the prompt's text; a normaliser, or a BOS the text does not show,
    shifts them, and they never point beyond the text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    scored: list[ScoredToken] = []
    offset = 0
    for token_id, token_logprobs in zip(prompt.token_ids, (None, *logprobs), strict=True):
        scored.append(ScoredToken(token_id, token_logprobs, min(offset, len(prompt.text))))
        offset += len(decoder.decode(tokenizer.token_bytes(token_id)))
    return scored
