"""llguidance behind the contract: what is allowed, what it costs, what is refused; outputs that always fit."""

import json
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from openinfer_core import GenerateRequest, InvalidRequest, Refused, RequestId, SamplingParams, Unavailable, find_plugin
from openinfer_core.grammars import MaskWords, TokenMatcher, Vocabulary, mask_words
from openinfer_core.sampling import Grammar, GrammarKind, Preamble
from openinfer_engine.grammars import guard_process
from openinfer_engine.grammars.choice import choose_grammar_compiler, make_grammar_compiler, no_grammars_because
from openinfer_engine.grammars.compiled import CompiledGrammar
from openinfer_engine.grammars.compiler import LlguidanceCompiler
from openinfer_engine.grammars.guard import GrammarGuard
from openinfer_engine.grammars.matcher import LlguidanceMatcher
from openinfer_engine.vocabulary import read_num_token_ids

MODEL_DIR = find_plugin("openinfer.checkpoints", "tiny").load()()
NUM_IDS = read_num_token_ids(MODEL_DIR, vocab_size=2**20)
TOKENIZER = LLTokenizer(str(MODEL_DIR / "tokenizer.json"))
END, OTHER_END = (TOKENIZER.tokenize_str(name, parse_special=True)[0] for name in ("<|im_end|>", "<|endoftext|>"))
THINK, UNTHINK = (TOKENIZER.tokenize_str(name, parse_special=True)[0] for name in ("<think>", "</think>"))
VOCABULARY = Vocabulary(model_dir=MODEL_DIR, num_token_ids=NUM_IDS, eos_token_ids=(END, OTHER_END))
DEEP_RULES = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(20_000)) + '\nr20000: "x"'


@pytest.fixture(scope="module")
def compiler() -> Iterator[LlguidanceCompiler]:
    made = LlguidanceCompiler(VOCABULARY)
    yield made
    made.close()


def ask(grammar: Grammar, **fields: Any) -> GenerateRequest:
    fields = {"max_tokens": 100, "stop_token_ids": (END,), **fields}
    sampling = SamplingParams(**fields, grammar=grammar)
    return GenerateRequest(request_id=RequestId(1), prompt_token_ids=(1,), sampling=sampling)


def regex(text: str, **fields: Any) -> GenerateRequest:
    return ask(Grammar(kind=GrammarKind.REGEX, text=text), **fields)


def make(compiler: LlguidanceCompiler, request: GenerateRequest) -> TokenMatcher:
    return compiler.compile(request).result(60)


def allowed(matcher: TokenMatcher) -> list[int]:
    words: MaskWords = np.full(mask_words(NUM_IDS), 0xAAAAAAAA, np.uint32)  # what was there before must not show
    matcher.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def say(matcher: TokenMatcher, text: str) -> None:
    for token_id in TOKENIZER.tokenize_str(text, parse_special=True):
        assert token_id in allowed(matcher)
        matcher.accept(token_id)


def walk(matcher: TokenMatcher, rng: random.Random, max_tokens: int) -> str | None:
    """Text of uniformly random allowed tokens up to a stop token; None if `max_tokens` came first."""
    token_ids: list[int] = []
    for _ in range(max_tokens):
        token_id = rng.choice(allowed(matcher))
        if token_id == END:
            return TOKENIZER.decode_str(token_ids)
        matcher.accept(token_id)
        token_ids.append(token_id)
    return None


# --- drafts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["(ab|cd)*x?", "[a-f]{1,9}", '\\{"a": ("[a-z]{0,5}"|[0-9]+)\\}'])
def test_a_matcher_rolled_back_stands_where_it_stood(compiler: LlguidanceCompiler, text: str) -> None:
    rng = random.Random(3)
    for _ in range(12):
        matcher = make(compiler, regex(text))
        for _ in range(rng.randrange(4)):
            choices = [token_id for token_id in allowed(matcher) if token_id != END]
            if choices:
                matcher.accept(rng.choice(choices))
        before, masks = allowed(matcher), list[list[int]]()
        drafts: list[int] = []
        for _ in range(4):
            choices = [token_id for token_id in allowed(matcher) if token_id != END]
            if not choices:
                break
            drafts.append(rng.choice(choices))
            matcher.accept(drafts[-1])
            masks.append(allowed(matcher))
        if drafts:
            matcher.rollback(len(drafts))
        assert allowed(matcher) == before
        for draft, mask in zip(drafts, masks, strict=True):
            matcher.accept(draft)
            assert allowed(matcher) == mask


def test_a_matcher_can_be_rolled_back_from_its_end(compiler: LlguidanceCompiler) -> None:
    matcher = make(compiler, regex("ab", min_tokens=1))
    first, second = TOKENIZER.tokenize_str("a")[0], TOKENIZER.tokenize_str("b")[0]
    matcher.accept(first)
    before = allowed(matcher)
    matcher.accept(second)
    assert allowed(matcher) == [END]
    matcher.rollback(1)
    assert allowed(matcher) == before
    matcher.rollback(1)
    assert END not in allowed(matcher)
    matcher.accept(first)
    assert allowed(matcher) == before


# --- ends -----------------------------------------------------------------------------------------------


def test_stop_tokens_are_allowed_where_the_output_may_end(compiler: LlguidanceCompiler) -> None:
    matcher = make(compiler, regex("ab*"))
    assert END not in allowed(matcher)
    say(matcher, "a")
    assert END in allowed(matcher)
    assert OTHER_END not in allowed(matcher)


def test_any_token_can_be_the_stop_token(compiler: LlguidanceCompiler) -> None:
    matcher = make(compiler, regex("a", stop_token_ids=(7, 300)))
    say(matcher, "a")
    assert allowed(matcher) == [7, 300]


def test_stop_tokens_wait_for_min_tokens(compiler: LlguidanceCompiler) -> None:
    matcher = make(compiler, regex("a+", min_tokens=3))
    for _ in range(3):
        assert END not in allowed(matcher)
        matcher.accept(TOKENIZER.tokenize_str("a")[0])
    assert END in allowed(matcher)


def test_a_grammar_that_ends_before_min_tokens_is_a_clear_error(compiler: LlguidanceCompiler) -> None:
    matcher = make(compiler, regex("a", min_tokens=3))
    say(matcher, "a")
    with pytest.raises(InvalidRequest, match="ended after 1 tokens and min_tokens is 3"):
        allowed(matcher)


def test_banned_tokens_leave_the_mask(compiler: LlguidanceCompiler) -> None:
    (yes,) = TOKENIZER.tokenize_str("y")
    assert allowed(make(compiler, regex("y|n", logit_bias={yes: -np.inf}))) == TOKENIZER.tokenize_str("n")
    assert allowed(make(compiler, regex("y", logit_bias={yes: -np.inf}))) == []


def test_without_a_stop_token_a_grammar_is_refused(compiler: LlguidanceCompiler) -> None:
    with pytest.raises(InvalidRequest, match="no stop token can end its output"):
        make(compiler, regex("a", stop_token_ids=()))


# --- notations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "begin", "then"),
    [
        (GrammarKind.CHOICE, json.dumps(["yes", 'n"o\n', "\U0001f600"]), 'n"', {"o"}),
        (GrammarKind.LARK, 'start: "a" B\nB: /x|y/', "a", {"x", "y"}),
        (GrammarKind.LARK, 'root ::= "a" [xy]', "a", {"x", "y"}),
        (GrammarKind.REGEX, 'a/"(x|y)', 'a/"', {"x", "y"}),
        (GrammarKind.JSON_SCHEMA, '{"enum": [1, 2]}', "", {"1", "2"}),
        (GrammarKind.JSON_SCHEMA, '{"enum": [[1, 2]], "x-guidance": {"whitespace_flexible": false}}', "[1,", {"2"}),
    ],
)
def test_each_notation_is_understood(
    compiler: LlguidanceCompiler, kind: GrammarKind, text: str, begin: str, then: set[str]
) -> None:
    matcher = make(compiler, ask(Grammar(kind=kind, text=text)))
    say(matcher, begin)
    found = {TOKENIZER.decode_str([token_id]) for token_id in allowed(matcher)}
    assert {piece[:1] for piece in found} == then


def test_white_space_of_json_is_bounded(compiler: LlguidanceCompiler) -> None:
    matcher = make(compiler, ask(Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "object"}')))
    say(matcher, "{" + "\n" * 32)
    assert not any(TOKENIZER.decode_str([token_id]).startswith("\n") for token_id in allowed(matcher))


def test_special_tokens_are_no_text(compiler: LlguidanceCompiler) -> None:
    matcher = make(compiler, regex("(.|\n)*"))
    assert not {OTHER_END, THINK} & set(allowed(matcher))


# --- preambles ------------------------------------------------------------------------------------------


def test_an_optional_preamble_is_free_up_to_its_end(compiler: LlguidanceCompiler) -> None:
    preamble = Preamble(opening="<think>", closing="</think>")
    grammar = Grammar(kind=GrammarKind.REGEX, text="[0-9]", preamble=preamble)
    matcher = make(compiler, ask(grammar))
    assert set(allowed(matcher)) == {THINK, *(TOKENIZER.tokenize_str(digit)[0] for digit in "0123456789")}
    say(matcher, "<think>well,</think>\n\n7")
    assert allowed(matcher) == [END]


@pytest.mark.parametrize("closing", ["</think>", "END OF/THOUGHT"])
def test_a_preamble_that_the_prompt_began_must_end(compiler: LlguidanceCompiler, closing: str) -> None:
    matcher = make(compiler, ask(Grammar(kind=GrammarKind.REGEX, text="7", preamble=Preamble(closing=closing))))
    assert END not in allowed(matcher)
    say(matcher, f"7 {closing}7")
    assert allowed(matcher) == [END]


@pytest.mark.parametrize("closing", ["</think>", "END OF/THOUGHT"])
def test_white_space_after_a_preamble_ends(compiler: LlguidanceCompiler, closing: str) -> None:
    newline = TOKENIZER.tokenize_str("\n")[0]
    digit = TOKENIZER.tokenize_str("7")[0]
    matcher = make(compiler, ask(Grammar(kind=GrammarKind.REGEX, text="7", preamble=Preamble(closing=closing))))
    say(matcher, f"well{closing}")
    for _ in range(32):
        assert newline in allowed(matcher)
        matcher.accept(newline)
    assert allowed(matcher) == [digit]


@pytest.mark.parametrize("closing", ["</think>", "END OF/THOUGHT"])
def test_a_preamble_has_none_of_what_it_must_be_without(compiler: LlguidanceCompiler, closing: str) -> None:
    preamble = Preamble(closing=closing, without=("<call/>", "{7}"))
    matcher = make(compiler, ask(Grammar(kind=GrammarKind.REGEX, text="7", preamble=preamble)))
    say(matcher, "<call {7 <call/")
    assert not any(TOKENIZER.decode_str([token_id]).startswith(">") for token_id in allowed(matcher))
    say(matcher, f" > }} {closing}7")
    assert allowed(matcher) == [END]


# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.REGEX, "((", "unclosed group"),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "Unimplemented keys"),
        (GrammarKind.JSON_SCHEMA, "{", "Expecting property name"),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "items":' * 5000 + "{}" + "}" * 5000, "nested too deeply"),
        (GrammarKind.JSON_SCHEMA, "false", "schema is false"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "refer to itself without end"),
        (GrammarKind.CHOICE, "[]", "a choice is a list of strings"),
        (GrammarKind.LARK, "what is this", "Expected ::="),
        (GrammarKind.LARK, DEEP_RULES, "too large, too deep or too slow"),
    ],
    ids=["regex", "keyword", "json", "deep", "false", "loop", "choice", "lark", "stack"],
)
def test_a_grammar_that_cannot_be_used_says_why_and_the_next_one_works(
    compiler: LlguidanceCompiler, kind: GrammarKind, text: str, message: str
) -> None:
    request = ask(Grammar(kind=kind, text=text))
    for _ in range(2):  # the second refusal comes from memory
        with pytest.raises(InvalidRequest, match=re.escape(message)):
            make(compiler, request)
    assert allowed(make(compiler, regex("[a-b]")))


@pytest.mark.parametrize(
    "schema",
    [
        '{"enum": [1234567890123456789]}',  # read as 1234567890123456768
        '{"const": {"ids": [12345678901234567890123]}}',
        '{"type": "integer", "const": -9223372036854775807}',
        '{"allOf": [{"type": "integer"}, {"enum": [1e25]}]}',
        '{"type": "integer", "minimum": 9007199254740993}',
        '{"type": "integer", "minimum": 1e40, "maximum": 1e41}',
        '{"type": "integer", "maximum": 9223372036854775806}',
        '{"type": "integer", "exclusiveMinimum": 9007199254740992}',
        '{"type": "integer", "exclusiveMaximum": 9223372036854775807}',
        '{"$defs": {"const": {"maximum": 9007199254740995}}, "$ref": "#/$defs/const"}',
    ],
)
def test_numbers_that_would_be_taken_for_others_are_refused(compiler: LlguidanceCompiler, schema: str) -> None:
    with pytest.raises(InvalidRequest, match="beyond 2\\^53"):
        make(compiler, ask(Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema)))
    with pytest.raises(InvalidRequest, match="beyond 2\\^53"):
        make(compiler, ask(Grammar(kind=GrammarKind.LARK, text=f'start: "x" call\ncall: %json {schema}')))
    lenient = json.dumps({"x-guidance": {"lenient": True}, **json.loads(schema)})
    guard_process.check_numbers(json.loads(lenient))


@pytest.mark.parametrize(
    ("schema", "largest"),
    [
        ('{"enum": [1152921504606846976]}', 2**60),
        ('{"enum": [9223372036854775807]}', 2**63 - 1),
        ('{"type": "integer", "minimum": 9223372036854774784, "maximum": 9223372036854775807}', None),
        ('{"type": "integer", "minimum": 0, "maximum": 18446744073709551615}', 2**63 - 1),
        ('{"type": "integer", "exclusiveMaximum": 18446744073709551616}', 2**63 - 1),
        ('{"properties": {"const": {"maximum": 18446744073709551615}}, "required": ["const"]}', None),
        ('{"const": 9007199254740992}', 2**53),
        ('{"type": "number", "exclusiveMinimum": -0.5, "maximum": 0.5}', 0),
        ('{"type": "integer", "maximum": 18446744073709551615, "default": 1234567890123456789}', 7),
    ],
)
def test_large_numbers_that_are_kept_are_taken(compiler: LlguidanceCompiler, schema: str, largest: int | None) -> None:
    if largest is None:
        guard_process.check_numbers(json.loads(schema))
        return
    matcher = make(compiler, ask(Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema)))
    say(matcher, str(largest))
    assert END in allowed(matcher)


def test_processor_time_of_a_check_is_bounded() -> None:
    guard = GrammarGuard(cpu_s=0.02)
    slow = Grammar(kind=GrammarKind.REGEX, text="|".join(f"x{i}.*y{i}" for i in range(50_000)))
    with pytest.raises(InvalidRequest, match="too slow"):
        guard.check(slow, None)
    guard.close()
    with pytest.raises(Unavailable, match="closing"):
        guard.check(slow, None)


def test_a_guard_that_died_is_started_again() -> None:
    guard = GrammarGuard()
    grammar = Grammar(kind=GrammarKind.REGEX, text="a")
    first = guard.check(grammar, None)
    with pytest.raises(InvalidRequest, match="too large"):
        guard.check(Grammar(kind=GrammarKind.LARK, text=DEEP_RULES), None)
    assert guard.check(grammar, None) == first
    guard.close()


def test_the_guard_ends_when_its_engine_is_gone() -> None:
    command = [sys.executable, "-P", guard_process.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_memory_of_a_check_is_bounded() -> None:
    guard = GrammarGuard()
    guard.check(Grammar(kind=GrammarKind.REGEX, text="a"), None)
    limits = resource.prlimit(guard.pid or 0, resource.RLIMIT_AS)
    assert limits == (guard_process.MAX_MEMORY_BYTES, guard_process.MAX_MEMORY_BYTES)
    guard.close()
    assert guard.pid is None


def test_masks_that_take_too_long_end_the_request() -> None:
    ticks = iter(range(1000))
    matcher = _matcher_with_clock(lambda: next(ticks) * 0.1)
    for _ in range(2):
        allowed(matcher)
    with pytest.raises(InvalidRequest, match="takes too long"):
        allowed(matcher)


def test_time_that_refused_drafts_take_does_not_end_the_request() -> None:
    step_s, now_s = 0.0, 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += step_s
        return now_s

    matcher = _matcher_with_clock(clock)
    (a,) = TOKENIZER.tokenize_str("a")
    matcher.accept(a)
    before = allowed(matcher)
    for _ in range(5):
        step_s = 0.1  # two calls of that are too much
        matcher.accept(a)
        allowed(matcher)
        with pytest.raises(InvalidRequest, match="takes too long"):
            matcher.accept(a)
        step_s = 0.0
        matcher.rollback(1)
        assert allowed(matcher) == before


def test_a_matcher_goes_on_after_an_error_on_a_draft() -> None:
    matcher = _matcher_with_clock(lambda: 0.0)
    (a,), (digit,) = TOKENIZER.tokenize_str("a"), TOKENIZER.tokenize_str("1")
    matcher.accept(a)
    before = allowed(matcher)
    for drafts in ([], [a], [a, a]):
        for draft in drafts:
            matcher.accept(draft)
        with pytest.raises(InvalidRequest):
            matcher.accept(digit)  # llguidance gives up
        matcher.rollback(len(drafts))
        assert allowed(matcher) == before


def _matcher_with_clock(clock: Callable[[], float]) -> TokenMatcher:
    request = regex("a*")
    assert request.sampling.grammar is not None
    tokenizer = LLTokenizer(str(MODEL_DIR / "tokenizer.json"), n_vocab=NUM_IDS)

    def make() -> LLMatcher:
        return LLMatcher(tokenizer, LLMatcher.grammar_from_regex("a*"))

    own = CompiledGrammar(make(), make, on_renewed=lambda: None)
    return LlguidanceMatcher(own, b"", request.sampling.grammar, request.sampling, eos_token_ids=(END,), clock=clock)


class CountingGuard(GrammarGuard):
    num_checks = 0

    def check(self, grammar: Grammar, head: str | None) -> str:
        self.num_checks += 1
        return super().check(grammar, head)


def test_grammars_are_kept() -> None:
    guard = CountingGuard()
    compiler = LlguidanceCompiler(VOCABULARY, guard=guard)
    first = regex("first")
    for _ in range(3):
        make(compiler, first)
    assert guard.num_checks == 1
    assert compiler.compile(first).done()
    make(compiler, regex("second"))
    stats = compiler.stats()
    assert (guard.num_checks, stats.kept, stats.waiting, stats.guard_faults) == (2, 2, 0, 0)
    assert 0 < stats.kept_bytes < stats.max_kept_bytes
    assert stats.compile_s > 0
    compiler.close()


def test_requests_of_one_grammar_do_not_share_their_state(compiler: LlguidanceCompiler) -> None:
    one, other = (make(compiler, regex("[ab]x")) for _ in range(2))
    say(one, "a")
    assert [TOKENIZER.decode_str([token_id]) for token_id in allowed(one)] == ["x"]
    assert {TOKENIZER.decode_str([token_id])[:1] for token_id in allowed(other)} == {"a", "b"}


# --- which compiler -------------------------------------------------------------------------------------


def test_the_compiler_is_chosen_by_name() -> None:
    auto = choose_grammar_compiler("auto", MODEL_DIR)
    assert auto is not None
    assert auto.name == "llguidance"
    assert choose_grammar_compiler("none", MODEL_DIR) is None
    assert choose_grammar_compiler("auto", MODEL_DIR / "nowhere") is None
    assert choose_grammar_compiler("auto", MODEL_DIR, is_installed=lambda _: False) is None
    with pytest.raises(Refused, match=re.escape("`./run install` in a checkout")):
        choose_grammar_compiler("llguidance", MODEL_DIR, is_installed=lambda _: False)


def test_a_start_without_a_compiler_says_what_is_refused_and_what_to_install() -> None:
    said = no_grammars_because(is_installed=lambda _: False)
    assert 'tool_choice "required" are refused: llguidance is not installed; `./run install`' in said
    assert no_grammars_because(is_installed=lambda _: True).endswith("no tokenizer that is read here")


def test_a_model_without_a_tokenizer_is_refused() -> None:
    vocabulary = Vocabulary(model_dir=MODEL_DIR / "nowhere", num_token_ids=10, eos_token_ids=())
    with pytest.raises(Refused, match=re.escape("no tokenizer")):
        make_grammar_compiler(choose_grammar_compiler("llguidance", MODEL_DIR), vocabulary)


def test_an_unreadable_tokenizer_refuses_requests_and_not_the_engine(tmp_path: Any) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    made = LlguidanceCompiler(Vocabulary(model_dir=tmp_path, num_token_ids=10, eos_token_ids=(1,)))
    with pytest.raises(InvalidRequest, match="not possible with this model's tokenizer"):
        make(made, regex("a"))
    made.close()


# --- properties -----------------------------------------------------------------------------------------

_NAMES = st.sampled_from(("a", "b", "long name", "ünï", 'qu"ote'))
_LEAVES = st.one_of(
    st.sampled_from(
        (
            {"type": "null"},
            {"type": "boolean"},
            {"type": "string", "maxLength": 6},
            {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]$"},
            {"type": "string", "format": "date"},
            {"type": "integer", "minimum": -3, "maximum": 120},
            {"type": "number", "minimum": 0, "maximum": 1},
            {"enum": ["x", 1, None, {"k": [True]}]},
            {"const": "fixed"},
        )
    )
)


def _nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(_NAMES, inner, max_size=3)
    objects = properties.flatmap(
        lambda found: (
            st.lists(st.sampled_from(sorted(found)), unique=True).map(
                lambda required: {
                    "type": "object",
                    "properties": found,
                    "required": required,
                    "additionalProperties": False,
                }
            )
            if found
            else st.just({"type": "object", "additionalProperties": False})
        )
    )
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    return st.one_of(objects, arrays, st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}))


SCHEMAS = st.recursive(_LEAVES, _nested, max_leaves=6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_random_tokens_under_a_schema_are_json_of_that_schema(
    compiler: LlguidanceCompiler, schema: dict[str, Any], seed: int
) -> None:
    matcher = make(compiler, ask(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))))
    text = walk(matcher, random.Random(seed), max_tokens=1500)
    assert text is not None
    jsonschema.validate(json.loads(text), schema)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    pattern=st.from_regex(
        r"(\(([a-c]|\[x-z\]|\[0-9\]|\.)+(\|[a-c]+)?\)(\*|\+|\?|\{1,3\})?|[a-z]){1,5}", fullmatch=True
    ),
    seed=st.integers(0, 2**32),
)
def test_random_tokens_under_a_regex_match_it(compiler: LlguidanceCompiler, pattern: str, seed: int) -> None:
    text = walk(make(compiler, regex(pattern)), random.Random(seed), max_tokens=4000)
    if text is not None:  # a star over a whole vocabulary may go on for long
        assert re.fullmatch(pattern, text)
