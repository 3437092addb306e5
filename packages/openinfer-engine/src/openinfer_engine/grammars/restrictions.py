"""`RestrictedMatcher`: `allowed_token_ids` and `bad_words` as masks, alone or on top of a grammar's."""

from collections.abc import Iterator
from hashlib import blake2b

import msgspec
import numpy as np

from openinfer_core import InvalidRequest, SamplingParams
from openinfer_core.grammars import HasMaskIdentity, MaskWords, TokenMatcher, mask_words
from openinfer_core.sampling import BadWords
from openinfer_engine.grammars.token_bits import TokenBits


class RestrictedMatcher:
    """Implements `openinfer_core.grammars.TokenMatcher` for requests with restrictions.

    What the sampler forbids by itself is forbidden here too, so that a mask without a bit is noticed.

    Args:
        sampling: the request's.
        num_token_ids: of the model.
        grammar: what its grammar allows; None if it has none.
    """

    def __init__(self, sampling: SamplingParams, *, num_token_ids: int, grammar: TokenMatcher | None) -> None:
        self._sampling = sampling
        self._grammar = grammar
        self._words = BadWords(sampling.bad_words)
        self._said: list[int] = []
        banned = sorted(token_id for token_id, bias in sampling.logit_bias.items() if bias == -np.inf)
        self._always = _mask(sampling.allowed_token_ids, num_token_ids)
        TokenBits((*self._words.single, *banned)).forbid(self._always)
        self._stops = TokenBits(sampling.stop_token_ids)
        self.mask_identity = self._identity(banned)

    def fill(self, words: MaskWords) -> None:
        """Raises `InvalidRequest`: the restrictions leave no token, or the grammar's matcher cannot go on."""
        if self._grammar is None:
            words[:] = self._always
        else:
            self._grammar.fill(words)
            if not words.any():
                return  # whose dead end it is, the caller says
            words &= self._always
        completing = self._words.completing(self._said)
        if completing:
            TokenBits(completing).forbid(words)
        if len(self._said) < self._sampling.min_tokens:
            self._stops.forbid(words)
        if not words.any():
            fields = list(self._fields())
            raise InvalidRequest(
                f"{' and '.join(fields)} leave no token to sample after {len(self._said)} tokens", field=fields[0]
            )

    def accept(self, token_id: int) -> None:
        if self._grammar is not None:
            self._grammar.accept(token_id)
        self._said.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        if self._grammar is not None:
            self._grammar.rollback(num_tokens)
        del self._said[len(self._said) - num_tokens :]

    def _identity(self, banned: list[int]) -> bytes | None:
        of_grammar = self._grammar.mask_identity if isinstance(self._grammar, HasMaskIdentity) else None
        if self._grammar is not None and of_grammar is None:
            return None
        asked = self._sampling
        fields = (asked.allowed_token_ids, asked.bad_words, banned, asked.stop_token_ids, asked.min_tokens)
        return blake2b(msgspec.json.encode(fields) + (of_grammar or b""), digest_size=16).digest()

    def _fields(self) -> Iterator[str]:
        sampling = self._sampling
        if sampling.allowed_token_ids is not None:
            yield "allowed_token_ids"
        if sampling.bad_words:
            yield "bad_words"
        if sampling.grammar is not None:
            yield "the grammar"
        if len(self._said) < sampling.min_tokens:
            yield "min_tokens"


def _mask(token_ids: tuple[int, ...] | None, num_token_ids: int) -> MaskWords:
    """The mask of some token ids, or of all there are."""
    bits = np.zeros(32 * mask_words(num_token_ids), np.bool_)
    bits[slice(num_token_ids) if token_ids is None else np.array(token_ids, np.intp)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)
