"""`LlguidanceMatcher`: one request's output, followed by llguidance."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TypeVar

import msgspec
import numpy as np
from llguidance import LLMatcher

from openinfer_core import Grammar, InvalidRequest, SamplingParams
from openinfer_core.grammars import MaskWords
from openinfer_core.scheduling import MAX_DRAFTS
from openinfer_engine.grammars.compiled import CompiledGrammar, lexer_failed
from openinfer_engine.grammars.guard import refused
from openinfer_engine.grammars.token_bits import TokenBits

BURST_S = 0.25  # processor time that a request's masks may take at once
# what each of its tokens adds to that. Masks of common grammars take 0.05 ms on average, cold ones up to 5 ms
PER_TOKEN_S = 0.004

T = TypeVar("T")


class LlguidanceMatcher:
    """Implements `openinfer_core.grammars.TokenMatcher`.

    The grammar says where the output may end; which tokens end it is the request's. What the sampler forbids by itself
    (stop tokens before `min_tokens`, a bias of minus infinity) is forbidden here too, so that a mask without a bit is
    noticed.

    Args:
        known: the grammar; it is copied when the first mask or token is asked for.
        identity: of what it was compiled from.
        grammar: for messages.
        sampling: the request's.
        eos_token_ids: of the model; llguidance allows them where the output may end.
        clock: seconds of processor time of this thread.
    """

    def __init__(
        self,
        known: CompiledGrammar,
        identity: bytes,
        grammar: Grammar,
        sampling: SamplingParams,
        *,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._known = known
        self._source = known.current  # whose copy its own is
        self._grammar = grammar
        self._clock = clock
        self._credit_s: float = BURST_S
        self._ends = TokenBits(eos_token_ids)
        self._min_tokens = sampling.min_tokens
        self._own: LLMatcher | None = None
        self._accepted: list[int] = []
        # what was left before each of the last tokens, so that time spent on refused drafts is not counted
        self._credits_s = deque[float](maxlen=MAX_DRAFTS + 1)
        self._stops = TokenBits(sampling.stop_token_ids)
        banned = sorted(token_id for token_id, bias in sampling.logit_bias.items() if bias == -np.inf)
        self._banned = TokenBits(banned) if banned else None
        fields = (sampling.stop_token_ids, sampling.min_tokens, banned)
        self.mask_identity = blake2b(identity + msgspec.json.encode(fields), digest_size=16).digest()

    @property
    def _matcher(self) -> LLMatcher:
        """This request's own."""
        if self._own is None:
            self._own = self._copy(self._known.current)
        return self._own

    def _copy(self, source: LLMatcher) -> LLMatcher:
        """One that has been told what was sampled."""
        self._source, own = source, source.deep_copy()
        for token_id in self._accepted:
            own.consume_token(token_id)
        return own

    def fill(self, words: MaskWords) -> None:
        """Raises `InvalidRequest`: the grammar is too expensive to follow, or has ended before `min_tokens`."""

        def compute(own: LLMatcher) -> bool:
            own.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            return own.is_accepting()

        may_end = self._call(compute)
        self._ends.forbid(words)
        if len(self._accepted) < self._min_tokens:
            self._stops.forbid(words)
            if may_end and not words.any():
                raise InvalidRequest(
                    f"what the grammar allows has ended after {len(self._accepted)} tokens and min_tokens is "
                    f"{self._min_tokens}; ask for fewer",
                    field="min_tokens",
                )
        elif may_end:
            self._stops.allow(words)
        if self._banned is not None:
            self._banned.forbid(words)

    def accept(self, token_id: int) -> None:
        credit_s = self._credit_s
        self._credit_s = min(BURST_S, credit_s + PER_TOKEN_S)
        try:
            self._call(lambda own: own.consume_token(token_id), token_id=token_id)
        except InvalidRequest:
            self._own, self._credit_s = None, credit_s  # it may have been a draft, and was not taken
            raise
        self._accepted.append(token_id)
        self._credits_s.append(credit_s)

    def rollback(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._accepted.pop()
            self._credit_s = self._credits_s.pop()
        own = self._own
        if own is not None and num_tokens and not own.is_error():
            own.rollback(num_tokens)
        if own is None or own.is_error():
            self._begin_again()

    def _begin_again(self) -> None:
        """Llguidance does not go on after an error: what was sampled is told to another copy."""
        self._own = None
        if lexer_failed(self._matcher):
            self._call_again(lambda own: None, self._digest(-1))
        if self._matcher.is_error():
            raise refused(self._grammar, self._matcher.get_error())

    def _digest(self, token_id: int | None) -> bytes:
        """Of a call: what was told before, and the token that it tells; None: it asks for a mask."""
        return blake2b(msgspec.json.encode((self._accepted, token_id)), digest_size=16).digest()

    def _call(self, call: Callable[[LLMatcher], T], *, token_id: int | None = None) -> T:
        """A call of llguidance, made again with another lexer if the shared one failed; what it takes is spent."""
        own, begin_s = self._matcher, self._clock()
        result = call(own)
        used_s = self._clock() - begin_s
        digest = self._digest(token_id) if lexer_failed(own) else None
        if digest is not None and not self._known.is_costly(digest):
            result, used_s = self._call_again(call, digest)
        self._spend(used_s)
        return result

    def _call_again(self, call: Callable[[LLMatcher], T], digest: bytes) -> tuple[T, float]:
        """With the lexer that others have by now; if it fails, too, with a new one, alone. And what that took.

        To make the new one is not counted: the request whose lexer fails may not be the costly one.
        """
        current = self._known.current
        if current is not self._source:
            told = self._call_with(current, call)
            if not lexer_failed(self._matcher):
                return told
        alone = self._known.new()
        told = self._call_with(alone, call)
        if not self._matcher.is_error():
            self._known.renew(current, by=alone)
        else:
            self._known.note_costly(digest)
        return told

    def _call_with(self, source: LLMatcher, call: Callable[[LLMatcher], T]) -> tuple[T, float]:
        begin_s = self._clock()
        own = self._own = self._copy(source)
        return call(own), self._clock() - begin_s

    def _spend(self, used_s: float) -> None:
        """Ends the request if llguidance gave up, or takes so long that other requests would feel it."""
        if self._matcher.is_error():
            raise refused(self._grammar, self._matcher.get_error())
        left_s = self._credit_s - used_s
        if left_s < 0:
            raise refused(self._grammar, "finding what it allows next takes too long")
        self._credit_s = left_s
