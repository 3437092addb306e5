"""Grammars: which tokens a request may sample next, decided on the host from what it has generated.

    submit ─► GrammarCompiler.compile ─► TokenMatcher, one for each request
    each token, in threads for masks:  accept(token) ─► fill(words) ─► StepPlan.token_masks ─► the runner samples

A mask depends on the token before it, so a request with a grammar is not planned ahead (`Scheduler`), and its next mask
is begun when that token is known. Where its next row has drafts, the matcher is advanced along them, asked for a mask
after each, and rolled back: what it raises on a draft ends the drafts. What it raises otherwise fails its request
alone.

A compiler is found through the entry-point group `openinfer.grammar_compilers`; its object takes a `Vocabulary` and
returns a `GrammarCompiler`.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from openinfer_core.engine import GrammarStats
from openinfer_core.request import GenerateRequest

MaskWords: TypeAlias = NDArray[np.uint32]
"""`[mask_words(num_token_ids)]`: bit `i % 32` of word `i // 32` set: token i may be sampled."""


def mask_words(num_token_ids: int) -> int:
    """Words that a mask of so many token ids has."""
    return -(-num_token_ids // 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a compiler knows of a model."""

    model_dir: Path
    """With its tokenizer, as `openinfer_core.tokenizer_files.read_tokenizer` finds it."""
    num_token_ids: int
    """Token ids that a mask covers."""
    eos_token_ids: tuple[int, ...]


class TokenMatcher(Protocol):
    """Follows one request's output.

    Called from threads for masks, one call at a time for each matcher, and for all matchers of a compiler that is no
    `FillsInParallel`. A call that keeps the interpreter lock holds up every request. Tokens may be told late, several
    before the next `fill`, or never, where the masks of an equal matcher were taken (`HasMaskIdentity`).

    Each method may raise `InvalidRequest` with a message for the client, when the grammar turns out to be too
    expensive to follow; any other exception is a fault.
    """

    def fill(self, words: MaskWords) -> None:
        """Sets all of `words` to the tokens that may come next, stop tokens included where the output may end.

        Args:
            words: as of `mask_words`, contents undefined. A mask without any bit fails the request.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Takes a token that the last mask allows; a stop token ends the request and is not told."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Forgets the last so many tokens: at most those that were accepted since it was last told what was sampled.

        It must stand as before after that, also where `fill` or `accept` has raised on a draft (a token whose `accept`
        raised was not taken, and 0 is possible), and neither what a draft cost nor what it raised may end the request.
        """
        ...


@runtime_checkable
class HasMaskIdentity(Protocol):
    """A `TokenMatcher` whose masks others may have: a step computes one for all that stand in one place."""

    @property
    def mask_identity(self) -> bytes | None:
        """Matchers of equal identity have equal masks after equal tokens since they were made; None shares none."""
        ...


class GrammarCompiler(Protocol):
    """Makes matchers, without holding up the caller."""

    def compile(self, request: GenerateRequest) -> "Future[TokenMatcher]":
        """Begins to compile `request.sampling.grammar`.

        The future gives a matcher, or raises `InvalidRequest` with a message for the client (no such notation, too
        large, too slow: a deadline is the compiler's to keep), or `Unavailable` (a fault that passes, with a message,
        too). Any other exception is a fault: the request fails with `INTERNAL`. It may be cancelled, when the request
        is aborted.
        """
        ...

    def close(self) -> None:
        """Frees everything. Idempotent."""
        ...


@runtime_checkable
class FillsInParallel(GrammarCompiler, Protocol):
    """A compiler whose matchers may be called from several threads at a time, one for each matcher."""

    fills_in_parallel: bool


@runtime_checkable
class CountsGrammars(Protocol):
    """A compiler that says what it keeps and uses, for `/metrics`."""

    def stats(self) -> GrammarStats:
        """Its numbers at this moment; called from the engine's thread."""
        ...


MakeGrammarCompiler: TypeAlias = Callable[[Vocabulary], GrammarCompiler]
"""What an entry point of `openinfer.grammar_compilers` is. It may begin threads; the engine closes what it returns.

Raises:
    Refused: it cannot serve this model.
"""
