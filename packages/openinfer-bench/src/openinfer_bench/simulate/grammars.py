"""Grammars of the simulated engine: its own queue of compilations, and a compiler and matchers of the fake model's."""

from collections.abc import Callable
from concurrent.futures import Future

from openinfer_bench.simulate.cpu import CpuTimes
from openinfer_core import InvalidRequest, Unavailable
from openinfer_core.fair_queue import FairQueue
from openinfer_core.grammars import MaskWords, TokenMatcher
from openinfer_core.request import GenerateRequest
from openinfer_core.testing.fake_grammar import fake_grammar, matcher_of
from openinfer_core.testing.simulation.world import World

REFUSED = fake_grammar("refused")
"""A text that begins so is the client's mistake."""
COSTLY = fake_grammar("costly")
"""The masks of one that begins so take as long as the engine bears."""


class SimulatedCompiler:
    """Implements `openinfer_core.grammars.GrammarCompiler`.

    Masks take a processor of their own: llguidance gives the interpreter lock up while it computes one.

    Attributes:
        is_guarded: whether the process that checks grammars answers; where not, the fault passes.
    """

    fills_in_parallel = True

    def __init__(self, world: World, cpu: CpuTimes) -> None:
        self.is_guarded = True
        self._world, self._cpu = world, cpu
        self._queue = FairQueue("openinfer-grammars")

    def compile(self, request: GenerateRequest) -> "Future[TokenMatcher]":
        return self._queue.submit(request.tenant, lambda: self._compile(request))

    def _compile(self, request: GenerateRequest) -> TokenMatcher:
        grammar = request.sampling.grammar
        if grammar is None:
            raise ValueError("a request without a grammar was given to the compiler")
        # In the guard's process; what the engine's own does after it keeps no lock either.
        self._world.charge(self._cpu.compile_s + len(grammar.text) * self._cpu.compiled_character_s)
        if not self.is_guarded:
            raise Unavailable("the process that checks grammars was not there; try again")
        if grammar.text.startswith(REFUSED):
            raise InvalidRequest("the grammar (regex) cannot be used: it is refused", field="grammar")
        matcher = matcher_of(request)
        if matcher is None:
            raise InvalidRequest("the fake model has no such grammar", field="grammar")
        mask_s = self._cpu.costly_mask_s if grammar.text.startswith(COSTLY) else self._cpu.mask_s
        return _ChargedMatcher(matcher, lambda: self._world.charge(mask_s))

    def close(self) -> None:
        self._queue.close()


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
