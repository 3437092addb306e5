"""Constrained calls of every format: random tokens under the grammar are calls that the format's parser reads."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from openinfer.models import find_model_dir
from openinfer_server.parsers import CallableFunction, CallArguments, CallStart, ContentDelta, LarkTexts, ParserContext
from openinfer_server.parsers.deepseek_v3 import DeepSeekV3Parser
from openinfer_server.parsers.deepseek_v4 import DeepSeekV4Parser
from openinfer_server.parsers.hermes import HermesParser
from openinfer_server.parsers.kimi_k2 import KimiK2Parser
from openinfer_server.parsers.qwen3_coder import Qwen3CoderParser
from openinfer_server.tools.grammar import calls_grammar, strict_grammar

STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "mode": {"type": "string", "enum": ["a b", "c"]},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    },
    "required": ["city", "days", "mode"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {"forecast": STRICT, "look": {}}
FUNCTIONS = [CallableFunction(name, schema, strict=True) for name, schema in SCHEMAS.items()]
PARSERS = (HermesParser, DeepSeekV3Parser, DeepSeekV4Parser, KimiK2Parser, Qwen3CoderParser)
ENDS = (
    '"',
    "\n</parameter>\n",
    "</｜DSML｜parameter>\n",
    "<|tool_calls_section_end|>",
    "<｜tool▁calls▁end｜>",
)
"""What ends a value, or all calls; random tokens alone would hardly ever find it."""
MAX_TOKENS = 400


class Model:
    """Random tokens of a vocabulary, with a format's markers as tokens or as text."""

    def __init__(self, parser: Any, *, has_marker_tokens: bool) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(find_model_dir("tiny") / "tokenizer.json"))
        if has_marker_tokens:
            self.tokenizer.add_special_tokens([*parser.visible_tokens])
        self.end = self.tokenizer.token_to_id("<|im_end|>")
        self.lark = LarkTexts(self.tokenizer.token_to_id, parser.visible_tokens)
        self._tokenizer = LLTokenizer(self.tokenizer.to_str(), eos_token=[self.end])

    def matcher(self, text: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(text), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def say(self, matcher: LLMatcher, rng: random.Random) -> str | None:
        """A whole answer; None if it did not end."""
        said: list[int] = []
        wished: list[int] = []
        for _ in range(MAX_TOKENS):
            mask = matcher.compute_bitmask()
            allowed = [
                place * 8 + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1
            ]
            if self.end in allowed and rng.random() < 0.5:
                break
            if not wished and rng.random() < 0.4:
                wished = self.tokenizer.encode(rng.choice(ENDS)).ids
            token_id = wished.pop(0) if wished and wished[0] in allowed else rng.choice(allowed)
            if token_id == self.end:
                break
            assert matcher.consume_token(token_id), matcher.get_error()
            said.append(token_id)
        else:
            return None
        return self.tokenizer.decode(said, skip_special_tokens=False)


def calls_of(deltas: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for start in deltas:
        if isinstance(start, CallStart):
            pieces = [each.text for each in deltas if isinstance(each, CallArguments) and each.index == start.index]
            yield start.name, json.loads("".join(pieces))


@pytest.mark.parametrize("has_marker_tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.__name__)
def test_random_tokens_are_calls_that_follow_their_schema(parser: Any, has_marker_tokens: bool) -> None:
    model = Model(parser, has_marker_tokens=has_marker_tokens)
    matcher = model.matcher(calls_grammar(parser.call_syntax(FUNCTIONS, model.lark), parallel=True).text)
    num_ended = 0
    for seed in range(12):
        text = model.say(matcher.deep_copy(), random.Random(seed))
        if text is None:
            continue
        num_ended += 1
        reading = parser(ParserContext("", SCHEMAS, lambda: "id"))
        deltas = [*reading.feed(text), *reading.finish()]
        assert not any(isinstance(delta, ContentDelta) and delta.text.strip() for delta in deltas), text
        calls = list(calls_of(deltas))
        assert calls, text
        for name, arguments in calls:
            jsonschema.validate(arguments, STRICT if name == "forecast" else {"maxProperties": 0})
    assert num_ended >= 3


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.__name__)
def test_free_text_before_strict_calls_has_no_call_in_it(parser: Any) -> None:
    model = Model(parser, has_marker_tokens=False)
    syntax = parser.call_syntax(FUNCTIONS, model.lark)
    matcher = model.matcher(strict_grammar(syntax, parallel=True).text)
    (trigger, *_) = syntax.triggers
    said = model.tokenizer.encode(f"I say <, < and {trigger[:-1]}").ids
    assert matcher.consume_tokens(said), matcher.get_error()
    assert matcher.is_accepting()
    call = model.tokenizer.encode(f"{trigger}oh no").ids
    assert matcher.try_consume_tokens(call) < len(call)
