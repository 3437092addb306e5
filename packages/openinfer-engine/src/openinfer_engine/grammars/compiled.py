"""`CompiledGrammar`: what llguidance made of a grammar, of which each request has a copy.

Copies share a lexer, which grows as outputs need it. llguidance bounds what it may grow by in a step and in all, and a
lexer that has met a bound serves none of its copies any more: one costly output would end all requests of its grammar,
and many cheap ones would in time. So a request whose copy fails goes on with a new lexer, unless it fails with that
one, too, alone: then it is the costly one.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

from llguidance import LLMatcher

_LEXER_ERROR = "lexer error"
_MOST_COSTLY = 1024  # calls of one grammar that are remembered, 16 bytes each


class CompiledGrammar:
    """A grammar that has been compiled once, for any thread.

    Args:
        first: at the beginning of the output; it is copied, and not changed.
        make: another one, with a lexer of its own; it takes what compiling took, without the guard.
        on_renewed: called when another one takes the place of a spoilt one.
    """

    def __init__(self, first: LLMatcher, make: Callable[[], LLMatcher], *, on_renewed: Callable[[], None]) -> None:
        self.new = make
        self._on_renewed = on_renewed
        self._lock = threading.Lock()
        self._current = first
        self._costly: OrderedDict[bytes, None] = OrderedDict()

    @property
    def current(self) -> LLMatcher:
        """Of which copies are to be made; not to be changed."""
        with self._lock:
            return self._current

    def is_costly(self, call: bytes) -> bool:
        """Whether a call, by a digest of all that was told and asked, has failed alone lately: then it would again."""
        with self._lock:
            return call in self._costly

    def note_costly(self, call: bytes) -> None:
        """A call has failed alone."""
        with self._lock:
            self._costly[call] = None
            while len(self._costly) > _MOST_COSTLY:
                self._costly.popitem(last=False)

    def renew(self, spoilt: LLMatcher, by: LLMatcher) -> None:
        """From now on copies are made of another one, unless they are already."""
        with self._lock:
            if self._current is not spoilt:
                return
            self._current = by
        self._on_renewed()


def lexer_failed(matcher: LLMatcher) -> bool:
    """Whether a matcher ended because of its lexer, and not of what it was told; llguidance says so in words alone."""
    return matcher.is_error() and matcher.get_error().startswith(_LEXER_ERROR)
