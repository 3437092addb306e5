"""Digests of grammars: those of equal grammars are equal, of others not, and a long text is hashed once for many."""

import random
from itertools import combinations

from openinfer_core.sampling import MAX_GRAMMAR_LENGTH, Grammar, GrammarKind, Preamble
from openinfer_engine.grammars.digests import LEAST_CHARACTERS, MOST_CHARACTERS, GrammarDigests


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


def copy_of(text: str) -> str:
    """An equal text that is another object, as one that came over a link."""
    return text.encode().decode()


def test_long_grammar_of_many_choices_is_hashed_once() -> None:
    digests, text = GrammarDigests(), "a" * 200_000
    assert len({digests.of(regex(copy_of(text))) for _ in range(16)}) == 1
    assert digests.num_hashed == 1


def test_grammars_that_differ_anywhere_have_other_digests() -> None:
    text = "a" * (2 * LEAST_CHARACTERS)
    closing = Preamble(closing="x")
    grammars = [
        regex(text),
        regex(text[:LEAST_CHARACTERS] + "b" + text[LEAST_CHARACTERS + 1 :]),  # length and ends are equal
        regex(text + "a"),
        Grammar(kind=GrammarKind.LARK, text=text),
        Grammar(kind=GrammarKind.REGEX, text=text, preamble=closing),
        regex("a"),
        Grammar(kind=GrammarKind.REGEX, text="a", preamble=closing),
    ]
    digests = GrammarDigests()
    for _ in range(3):
        found = [digests.of(grammar) for grammar in grammars]
        assert all(one != other for one, other in combinations(found, 2))
        assert found == [GrammarDigests().of(grammar) for grammar in grammars]


def test_what_is_remembered_is_bounded() -> None:
    digests, rng = GrammarDigests(), random.Random(0)
    most = MOST_CHARACTERS // MAX_GRAMMAR_LENGTH
    texts = [rng.randbytes(8).hex() + "a" * (MAX_GRAMMAR_LENGTH - 16) for _ in range(most + 1)]
    for text in texts:
        digests.of(regex(text))
    for text in texts[1:]:
        digests.of(regex(copy_of(text)))
    assert digests.num_hashed == len(texts)
    digests.of(regex(texts[0]))
    assert digests.num_hashed == len(texts) + 1
