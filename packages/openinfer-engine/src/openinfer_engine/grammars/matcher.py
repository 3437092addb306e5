"""`LlguidanceMatcher`: one request's output, followed by llguidance."""

import time
from collections.abc import Callable, Iterable
from functools import cached_property
from hashlib import blake2b

import msgspec
import numpy as np
from llguidance import LLMatcher

from openinfer_core import Grammar, InvalidRequest, SamplingParams
from openinfer_core.grammars import MaskWords
from openinfer_engine.grammars.guard import refused
from openinfer_engine.grammars.token_bits import TokenBits

BURST_S = 0.25  # processor time that a request's masks may take at once
# what each of its tokens adds to that. Masks of common grammars take 0.05 ms on average, cold ones up to 5 ms
PER_TOKEN_S = 0.004


class LlguidanceMatcher:
    """Implements `openinfer_core.grammars.TokenMatcher`.

    The grammar says where the output may end; which tokens end it is the request's. What the sampler forbids by itself
    (stop tokens before `min_tokens`, a bias of minus infinity) is forbidden here too, so that a mask without a bit is
    noticed.

    Args:
        known: at the beginning of the output; it is copied when the first mask or token is asked for, and not changed.
        identity: of what it was compiled from.
        grammar: for messages.
        sampling: the request's.
        eos_token_ids: of the model; llguidance allows them where the output may end.
        clock: seconds of processor time of this thread.
    """

    def __init__(
        self,
        known: LLMatcher,
        identity: bytes,
        grammar: Grammar,
        sampling: SamplingParams,
        *,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._known = known
        self._grammar = grammar
        self._clock = clock
        self._credit_s = BURST_S
        self._ends = TokenBits(eos_token_ids)
        self._min_tokens = sampling.min_tokens
        self._num_accepted = 0
        self._stops = TokenBits(sampling.stop_token_ids)
        banned = sorted(token_id for token_id, bias in sampling.logit_bias.items() if bias == -np.inf)
        self._banned = TokenBits(banned) if banned else None
        fields = (sampling.stop_token_ids, sampling.min_tokens, banned)
        self.mask_identity = blake2b(identity + msgspec.json.encode(fields), digest_size=16).digest()

    @cached_property
    def _matcher(self) -> LLMatcher:
        """This request's own; those of large grammars take a millisecond to copy, and megabytes."""
        return self._known.deep_copy()

    def fill(self, words: MaskWords) -> None:
        """Raises `InvalidRequest`: the grammar is too expensive to follow, or has ended before `min_tokens`."""
        begin_s = self._clock()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        may_end = self._matcher.is_accepting()
        self._spend(begin_s)
        self._ends.forbid(words)
        if self._num_accepted < self._min_tokens:
            self._stops.forbid(words)
            if may_end and not words.any():
                raise InvalidRequest(
                    f"what the grammar allows has ended after {self._num_accepted} tokens and min_tokens is "
                    f"{self._min_tokens}; ask for fewer",
                    field="min_tokens",
                )
        elif may_end:
            self._stops.allow(words)
        if self._banned is not None:
            self._banned.forbid(words)

    def accept(self, token_id: int) -> None:
        begin_s = self._clock()
        self._matcher.consume_token(token_id)
        self._num_accepted += 1
        self._credit_s = min(BURST_S, self._credit_s + PER_TOKEN_S)
        self._spend(begin_s)

    def rollback(self, num_tokens: int) -> None:
        begin_s = self._clock()
        self._matcher.rollback(num_tokens)
        self._num_accepted -= num_tokens
        self._spend(begin_s)

    def _spend(self, begin_s: float) -> None:
        """Ends the request if llguidance gave up, or takes so long that other requests would feel it."""
        if self._matcher.is_error():
            raise refused(self._grammar, self._matcher.get_error())
        self._credit_s -= self._clock() - begin_s
        if self._credit_s < 0:
            raise refused(self._grammar, "finding what it allows next takes too long")
