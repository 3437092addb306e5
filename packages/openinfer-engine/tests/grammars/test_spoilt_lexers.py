"""Copies of one grammar share a lexer, which has a bound: what outputs make of it ends no other request.

The clock of all matchers stands still, so that no machine is too slow for what they compute here.
"""

import contextlib
import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from openinfer_core import GenerateRequest, InvalidRequest, RequestId, SamplingParams, find_plugin
from openinfer_core.grammars import MaskWords, TokenMatcher, Vocabulary, mask_words
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_engine.grammars.compiled import CompiledGrammar, lexer_failed
from openinfer_engine.grammars.compiler import LlguidanceCompiler
from openinfer_engine.grammars.guard import LIMITS
from openinfer_engine.grammars.matcher import LlguidanceMatcher
from openinfer_engine.vocabulary import read_num_token_ids

MODEL_DIR = find_plugin("openinfer.checkpoints", "tiny").load()()
NUM_IDS = read_num_token_ids(MODEL_DIR, vocab_size=2**20)
TOKENIZER = LLTokenizer(str(MODEL_DIR / "tokenizer.json"), n_vocab=NUM_IDS)
(END,) = TOKENIZER.tokenize_str("<|im_end|>", parse_special=True)
# An output that begins with "a" asks little of the lexer; of the others a step is beyond what one may ask of it.
COSTLY = "a[0-9]{1,20}|b0123456789(.*[a-m].{200}c)"
# Of these no step is, and a few outputs together are beyond what it may become.
ADDS_UP = "a[0-9]{1,20}|b0123456789(.*[ab].{12}c|.*[cd].{13}e|.*x.{14}a)"


class Compiled:
    """A grammar, and how often its lexer was made anew."""

    def __init__(self, text: str, kind: GrammarKind = GrammarKind.REGEX) -> None:
        self.grammar = Grammar(kind=kind, text=text)
        self.num_renewed = self.num_made = 0
        self.known = CompiledGrammar(self._make(), self._make, on_renewed=self._note)

    def begin(self) -> TokenMatcher:
        sampling = SamplingParams(max_tokens=400, stop_token_ids=(END,), grammar=self.grammar)
        return LlguidanceMatcher(self.known, b"", self.grammar, sampling, eos_token_ids=(END,), clock=lambda: 0.0)

    def _make(self) -> LLMatcher:
        self.num_made += 1
        is_regex = self.grammar.kind is GrammarKind.REGEX
        translate = LLMatcher.grammar_from_regex if is_regex else LLMatcher.grammar_from_json_schema
        return LLMatcher(TOKENIZER, translate(self.grammar.text), log_level=0, limits=LLParserLimits(**LIMITS))

    def _note(self) -> None:
        self.num_renewed += 1


def allowed(matcher: TokenMatcher) -> list[int]:
    words: MaskWords = np.empty(mask_words(NUM_IDS), np.uint32)
    matcher.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def say(matcher: TokenMatcher, text: str) -> None:
    for token_id in TOKENIZER.tokenize_str(text):
        assert token_id in allowed(matcher)
        matcher.accept(token_id)


def wander(matcher: TokenMatcher, seed: int, num_tokens: int = 120) -> None:
    """Goes on with tokens that need new states."""
    rng = random.Random(seed)
    for _ in range(num_tokens):
        matcher.accept(rng.choice([token_id for token_id in allowed(matcher) if token_id != END]))


def ends_after(matcher: TokenMatcher, seed: int, num_tokens: int = 100) -> int:
    """Tokens of an output that is too costly in the end."""
    rng = random.Random(seed)
    for number in range(num_tokens):
        try:
            matcher.accept(rng.choice(allowed(matcher)))
        except InvalidRequest:
            return number
    return num_tokens


def test_costly_output_ends_its_own_request_alone() -> None:
    compiled = Compiled(COSTLY)
    under_way, costly = compiled.begin(), compiled.begin()
    say(under_way, "a12")
    say(costly, "b0123456789")
    with pytest.raises(InvalidRequest, match="too many expressions"):
        wander(costly, 0)
    say(under_way, "34")
    assert END in allowed(under_way)
    say(compiled.begin(), "a1234")
    assert compiled.num_renewed == 1


def test_costly_outputs_that_follow_each_other_end_no_other() -> None:
    compiled = Compiled(COSTLY)
    under_way = compiled.begin()
    say(under_way, "a")
    for times in range(3):
        costly = compiled.begin()
        say(costly, "b0123456789")
        with pytest.raises(InvalidRequest):
            wander(costly, times)
        say(under_way, str(times))
    assert compiled.num_renewed == 3


def test_outputs_that_are_too_much_together_all_go_on() -> None:
    compiled = Compiled(ADDS_UP)
    matchers = [compiled.begin() for _ in range(10)]
    for seed, matcher in enumerate(matchers):
        say(matcher, "b0123456789")
        wander(matcher, seed)
    assert compiled.num_renewed > 0
    for seed, matcher in enumerate(matchers):
        wander(matcher, seed, 3)


def test_schema_that_costly_outputs_had_before_goes_as_far_as_a_new_one() -> None:
    """The next output's first mask is known, and what follows its first token is not."""
    patterns = [{"type": "string", "pattern": f"^[a-z ]{{{n % 40 + 1},200}}{n}$"} for n in range(300)]
    items = {"type": "array", "minItems": 200, "items": {"anyOf": patterns}}
    text = json.dumps({"type": "object", "properties": {"a": items}, "required": ["a"]})
    seeds = (3, 5, 7)
    alone = [ends_after(Compiled(text, GrammarKind.JSON_SCHEMA).begin(), seed) for seed in seeds]
    assert 3 < min(alone) <= max(alone) < 100
    compiled = Compiled(text, GrammarKind.JSON_SCHEMA)
    assert [ends_after(compiled.begin(), seed) for seed in seeds] == alone
    assert compiled.num_renewed == len(seeds) - 1


def test_output_that_was_too_costly_alone_is_not_tried_alone_again() -> None:
    compiled = Compiled(COSTLY)
    made: list[int] = []
    for _ in range(4):
        costly = compiled.begin()
        say(costly, "b0123456789")
        with pytest.raises(InvalidRequest):
            wander(costly, 0)
        made.append(compiled.num_made)
    # Each needs a new lexer that serves what is not costly, but for the first, and only the first tries it alone.
    assert made == [2, 3, 4, 5]


def test_request_goes_on_from_a_draft_whose_lexer_another_has_spoilt() -> None:
    compiled = Compiled(COSTLY)
    matcher, costly = compiled.begin(), compiled.begin()
    say(matcher, "a1")
    before = allowed(matcher)
    say(costly, "b0123456789")
    with pytest.raises(InvalidRequest):
        wander(costly, 0)
    (digit,) = TOKENIZER.tokenize_str("2")
    matcher.accept(digit)
    matcher.rollback(1)
    assert allowed(matcher) == before


def test_what_is_no_fault_of_the_lexer_is_told_apart() -> None:
    compiled = Compiled("a*")
    copy = compiled.known.current.deep_copy()
    copy.consume_token(TOKENIZER.tokenize_str("1")[0])
    assert copy.is_error()
    assert not lexer_failed(copy)
    assert not lexer_failed(compiled.known.current)


def test_grammar_is_renewed_once_by_those_that_found_it_spoilt() -> None:
    compiled = Compiled("a*")
    first, second, third = compiled.known.current, compiled.known.new(), compiled.known.new()
    compiled.known.renew(first, by=second)
    compiled.known.renew(first, by=third)
    assert compiled.known.current is second
    assert compiled.num_renewed == 1


def test_compiler_counts_what_was_made_anew() -> None:
    vocabulary = Vocabulary(model_dir=MODEL_DIR, num_token_ids=NUM_IDS, eos_token_ids=(END,))
    sampling = SamplingParams(
        max_tokens=400, stop_token_ids=(END,), grammar=Grammar(kind=GrammarKind.REGEX, text=COSTLY)
    )
    request = GenerateRequest(request_id=RequestId(1), prompt_token_ids=(1,), sampling=sampling)
    with contextlib.closing(LlguidanceCompiler(vocabulary)) as compiler:
        costly, good = (compiler.compile(request).result(60) for _ in range(2))
        say(costly, "b0123456789")
        with pytest.raises(InvalidRequest):
            wander(costly, 0)
        assert compiler.stats().renewed == 0
        say(good, "a1")
        assert compiler.stats().renewed == 1
