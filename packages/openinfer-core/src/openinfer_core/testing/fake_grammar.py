"""`FakeMatcher`: a grammar of the fake model, which allows tokens by a hash of all that came before.

So a mask that is missing, of another request or of a token ago lets another token through than the grammar does, and
what a request must say is known in advance (`fake_model.outcome`). `ScriptedMatcher` lets the model say a text alone,
such as a call of a tool, which a hash would never say.
"""

from collections.abc import Sequence

from openinfer_core.grammars import MaskWords
from openinfer_core.request import GenerateRequest

_MARK = "fake "
_NAME_BYTES = 64  # that tell grammars apart; what comes after them makes a text long
_WORD = (1 << 32) - 1
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def fake_grammar(name: str) -> str:
    """The text of a grammar that the fake model knows; it ignores any other."""
    return f"{_MARK}{name}"


_scripts: dict[str, tuple[int, ...]] = {}


def add_script(words: str, token_ids: Sequence[int]) -> None:
    """From now on a grammar with `words` in its text allows these tokens alone, in this order, the last for ever."""
    _scripts[words] = tuple(token_ids)


def matcher_of(request: GenerateRequest) -> "FakeMatcher | ScriptedMatcher | None":
    """The matcher of a request, if the fake model knows its grammar."""
    grammar = request.sampling.grammar
    if grammar is None:
        return None
    if grammar.text.startswith(_MARK):
        return FakeMatcher(grammar.text)
    scripts = (token_ids for words, token_ids in _scripts.items() if words in grammar.text)
    return next((ScriptedMatcher(token_ids) for token_ids in scripts), None)


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


class ScriptedMatcher:
    """Implements `openinfer_core.grammars.TokenMatcher` for a text that is known.

    Args:
        token_ids: of the text; the last may come again and again.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._num_said = 0

    @property
    def allowed(self) -> int:
        """The bit of the next token."""
        return 1 << self._token_ids[min(self._num_said, len(self._token_ids) - 1)]

    def fill(self, words: MaskWords) -> None:
        token_id = self.allowed.bit_length() - 1
        words[:] = 0
        words[token_id // 32] = 1 << token_id % 32

    def accept(self, token_id: int) -> None:
        del token_id
        self._num_said += 1

    def rollback(self, num_tokens: int) -> None:
        self._num_said -= num_tokens


def allowed_by(words: MaskWords) -> int:
    """A mask as an integer, bit i for token i, as `FakeMatcher.allowed` has it."""
    return int.from_bytes(words.astype("<u4").tobytes(), "little")


def _mixed(state: int) -> int:
    mixed = (state + 1) * _MULTIPLIER & _MASK
    mixed = (mixed ^ mixed >> 29) * _MULTIPLIER & _MASK
    return mixed ^ mixed >> 32
