"""`Completion`, and how it is put together from an engine's events."""

from collections.abc import Sequence
from dataclasses import dataclass

from openinfer_core import Finished, FinishReason, GenerateRequest, TokenLogprobs, Tokens
from openinfer_server.text.stop_strings import StopScanner
from openinfer_server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a model said."""

    text: str
    token_ids: tuple[int, ...]
    """Without the stop token."""
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    """Sampled tokens, the stop token included."""
    cached_tokens: int
    """Prompt tokens whose KV was found in the cache."""
    logprobs: tuple[TokenLogprobs, ...]
    """One per token id, if they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """Of the prompt tokens from the second on, if they were asked for."""


class Assembler:
    """Collects one request's tokens and turns them into text as they come."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = tokenizer.detokenizer(request.prompt_token_ids)
        self._scanner = StopScanner(stop) if stop else None
        self._parts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []

    @property
    def stopped(self) -> bool:
        return self._scanner is not None and self._scanner.found

    def feed(self, event: Tokens) -> str:
        """Takes new tokens; returns the text that became certain."""
        self._prompt_logprobs += event.prompt_logprobs or ()
        if self.stopped:
            return ""
        self._token_ids += event.token_ids
        self._logprobs += event.logprobs or ()
        return self._show("".join(map(self._detokenizer.feed, event.token_ids)))

    def finish(self) -> str:
        """The request has ended: returns the text that was held."""
        if self.stopped:
            return ""
        shown = self._show(self._detokenizer.finish())
        if self._scanner is not None and not self._scanner.found:
            held = self._scanner.finish()
            self._parts.append(held)
            shown += held
        return shown

    def completion(self, event: Finished, reason: FinishReason) -> Completion:
        return Completion(
            text="".join(self._parts),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            cached_tokens=event.cached_tokens,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )

    def _show(self, text: str) -> str:
        if self._scanner is not None:
            text = self._scanner.feed(text)
        self._parts.append(text)
        return text
