"""`FakeMatcher`: a grammar of the fake model, which allows tokens by a hash of all that came before.

So a mask that is missing, of another request or of a token ago lets another token through than the grammar does, and
what a request must say is known in advance (`fake_model.outcome`).
"""

from openinfer_core.grammars import MaskWords
from openinfer_core.request import GenerateRequest

_MARK = "fake "
_NAME_BYTES = 64  # that tell grammars apart; what comes after them makes a text long
_WORD = (1 << 32) - 1
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def fake_grammar(name: str) -> str:
    """The text of a grammar that the fake model knows; it ignores any other."""
    return f"{_MARK}{name}"


def matcher_of(request: GenerateRequest) -> "FakeMatcher | None":
    """The matcher of a request, if the fake model knows its grammar."""
    grammar = request.sampling.grammar
    return FakeMatcher(grammar.text) if grammar is not None and grammar.text.startswith(_MARK) else None


class FakeMatcher:
    """Implements `openinfer_core.grammars.TokenMatcher` for vocabularies of at least 64 tokens.

    Args:
        text: of `fake_grammar`.
    """

    def __init__(self, text: str) -> None:
        state = 0
        for byte in text.encode()[:_NAME_BYTES]:
            state = _mixed(state ^ byte)
        self._states = [state]

    @property
    def allowed(self) -> int:
        """Bit i: whether token i may come next; about half of the first 64 may."""
        return self._states[-1]

    def fill(self, words: MaskWords) -> None:
        words[:] = 0
        words[0], words[1] = self.allowed & _WORD, self.allowed >> 32

    def accept(self, token_id: int) -> None:
        self._states.append(_mixed(self._states[-1] ^ token_id))

    def rollback(self, num_tokens: int) -> None:
        del self._states[len(self._states) - num_tokens :]


def allowed_by(words: MaskWords) -> int:
    """The first 64 bits of a mask, as `FakeMatcher.allowed` has them."""
    return int(words[0]) | int(words[1]) << 32


def _mixed(state: int) -> int:
    mixed = (state + 1) * _MULTIPLIER & _MASK
    mixed = (mixed ^ mixed >> 29) * _MULTIPLIER & _MASK
    return mixed ^ mixed >> 32
