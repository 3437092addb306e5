"""Grammars of the simulated engine: its own queue of compilations, and a compiler and matchers of the fake model's."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from openinfer_bench.simulate.cpu import CpuTimes
from openinfer_core import Grammar, InvalidRequest, Unavailable
from openinfer_core.fair_queue import FairQueue
from openinfer_core.grammars import MaskWords, TokenMatcher
from openinfer_core.request import GenerateRequest
from openinfer_core.testing.fake_grammar import fake_grammar, matcher_of
from openinfer_core.testing.simulation.world import World
from openinfer_engine.grammars.kept import KeptGrammars

REFUSED = fake_grammar("refused")
"""A text that begins so is the client's mistake."""
COSTLY = fake_grammar("costly")
"""The masks of one that begins so take as long as the engine bears."""


class SimulatedCompiler:
    """Implements `openinfer_core.grammars.GrammarCompiler`.

    What was compiled is kept as the engine's own compiler keeps it. Masks take a processor of their own: llguidance
    gives the interpreter lock up while it computes one.

    Attributes:
        is_guarded: whether the process that checks grammars answers; where not, the fault passes.
    """

    fills_in_parallel = True

    def __init__(self, world: World, cpu: CpuTimes) -> None:
        self.is_guarded = True
        self._world, self._cpu = world, cpu
        self._kept = KeptGrammars[_Compiled](clock=lambda: world.now_s)
        self._queue = FairQueue("openinfer-grammars")

    def compile(self, request: GenerateRequest) -> "Future[TokenMatcher]":
        grammar = request.sampling.grammar
        if grammar is None:
            raise ValueError("a request without a grammar was given to the compiler")
        key = hashlib.blake2b(msgspec.json.encode(grammar), digest_size=16).digest()
        known = self._kept.get(key, request.tenant)
        if known is None:
            return self._queue.submit(request.tenant, lambda: self._compile(key, grammar, request))
        future: Future[TokenMatcher] = Future()
        if isinstance(known, InvalidRequest):
            future.set_exception(known)
        else:
            future.set_result(self._matcher(known, request))
        return future

    def _compile(self, key: bytes, grammar: Grammar, request: GenerateRequest) -> TokenMatcher:
        known = self._kept.get(key, request.tenant)
        if known is None:
            known = self._first(grammar)
            self._kept.put(key, grammar, known, owner=request.tenant)
        if isinstance(known, InvalidRequest):
            raise known
        return self._matcher(known, request)

    def _first(self, grammar: Grammar) -> "_Compiled | InvalidRequest":
        # In the guard's process; what the engine's own does after it keeps no lock either.
        self._world.charge(self._cpu.compile_s + len(grammar.text) * self._cpu.compiled_character_s)
        if not self.is_guarded:
            raise Unavailable("the process that checks grammars was not there; try again")
        if grammar.text.startswith(REFUSED):
            return InvalidRequest("the grammar (regex) cannot be used: it is refused", field="grammar")
        return _Compiled(self._cpu.costly_mask_s if grammar.text.startswith(COSTLY) else self._cpu.mask_s)

    def _matcher(self, known: "_Compiled", request: GenerateRequest) -> TokenMatcher:
        matcher = matcher_of(request)
        if matcher is None:
            raise InvalidRequest("the fake model has no such grammar", field="grammar")
        return _ChargedMatcher(matcher, lambda: self._world.charge(known.mask_s))

    def close(self) -> None:
        self._queue.close()


class _Compiled(NamedTuple):
    """A grammar that has passed."""

    mask_s: float


class _ChargedMatcher:
    """A matcher whose masks take their time."""

    def __init__(self, matcher: TokenMatcher, charge: Callable[[], None]) -> None:
        self._matcher = matcher
        self._charge = charge

    def fill(self, words: MaskWords) -> None:
        self._charge()
        self._matcher.fill(words)

    def accept(self, token_id: int) -> None:
        self._matcher.accept(token_id)

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
