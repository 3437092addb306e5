"""What an engine is asked for a request of Dynamo."""

import struct
from typing import Any

import pytest
from recorded import CHAT, COMPLETION

from openinfer_core import GenerateRequest, Grammar, GrammarKind, InvalidRequest, RequestId
from openinfer_core.sampling_defaults import SamplingDefaults
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions
from openinfer_dynamo.request import RequestReader

INFO = SimulatedLoop(SimulatedOptions(max_model_tokens=64, eos_token_ids=(2,))).info
READER = RequestReader(INFO, SamplingDefaults(values={"temperature": 0.6, "top_k": 20}))


def read(request: dict[str, Any]) -> GenerateRequest:
    return READER.read(request, RequestId(5)).request


def with_part(name: str, **fields: Any) -> dict[str, Any]:
    return {**COMPLETION, name: {**COMPLETION[name], **fields}}


def test_a_recorded_completion_is_read() -> None:
    request = read(COMPLETION)
    assert (request.request_id, request.prompt_token_ids) == (5, (257, 75, 512))
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.stop_token_ids) == (2, 7, (2033, 2031, 2))
    assert (sampling.temperature, sampling.top_k) == (0.6, 20), "what is null comes from the model's defaults"
    assert (request.transfer, request.lora, request.cache_salt, request.priority) == (None, None, None, 0)


def test_a_recorded_chat_is_read() -> None:
    sampling = read(CHAT).sampling
    assert sampling.grammar == Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type":"object"}')
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, None)


def test_without_a_bound_the_answer_may_fill_the_context() -> None:
    assert read(with_part("stop_conditions", max_tokens=None)).sampling.max_tokens == 61
    assert read({"token_ids": [1]}).sampling.max_tokens == 63


def test_ends_of_text_are_ignored_when_that_is_asked() -> None:
    stops = {"ignore_eos": True, "stop_token_ids": [9], "stop_token_ids_visible": [8]}
    assert read(with_part("stop_conditions", **stops)).sampling.stop_token_ids == (9, 8)


def test_every_number_of_sampling_is_read() -> None:
    numbers = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
    }
    sampling = read(with_part("sampling_options", **numbers, seed=-3, allowed_token_ids=[4, 5])).sampling
    for name, value in numbers.items():
        assert getattr(sampling, name) == (0 if name == "top_k" else value), name
    assert sampling.seed == 2**64 - 3
    assert sampling.allowed_token_ids == (4, 5)


def test_words_that_are_not_wanted_and_biases_are_read() -> None:
    options = {"bad_words_token_ids": [[1, 2], [3]], "logit_bias": {5: 1.5}}
    sampling = read(with_part("sampling_options", **options)).sampling
    assert (sampling.bad_words, sampling.logit_bias) == (((1, 2), (3,)), {5: 1.5})


@pytest.mark.parametrize(
    ("guided", "expected"),
    [
        ({"regex": "a+"}, (GrammarKind.REGEX, "a+")),
        ({"choice": ["a", "b"]}, (GrammarKind.CHOICE, '["a","b"]')),
        ({"grammar": "start: /a/"}, (GrammarKind.LARK, "start: /a/")),
        ({"json": '{"type":"object"}', "backend": "xgrammar"}, (GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
    ],
)
def test_a_constraint_becomes_a_grammar(guided: dict[str, Any], expected: tuple[GrammarKind, str]) -> None:
    grammar = read(with_part("sampling_options", guided_decoding=guided)).sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == expected


def test_routing_says_adapter_salt_and_priority() -> None:
    request = read({**COMPLETION, "routing": {"lora_name": "a", "cache_salt": "s", "priority": 3, "dp_rank": 0}})
    assert (request.lora, request.cache_salt, request.priority) == ("a", "s", -3), "Dynamo's larger one is earlier"


def test_packed_token_ids_are_numbers_of_32_bits() -> None:
    packed = struct.pack("<3i", 7, 70_000, 0)
    for value in (packed, bytearray(packed), memoryview(packed)):
        assert read({**COMPLETION, "token_ids": value}).prompt_token_ids == (7, 70_000, 0)


def test_a_probe_is_known() -> None:
    assert READER.read({**COMPLETION, "_HEALTH_CHECK": True}, RequestId(1)).is_probe
    assert not READER.read(COMPLETION, RequestId(1)).is_probe


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (with_part("sampling_options", n=2), "n and best_of must be 1"),
        (with_part("sampling_options", best_of=3), "n and best_of must be 1"),
        (with_part("sampling_options", use_beam_search=True), "beam search"),
        (with_part("sampling_options", length_penalty=0.5), "beam search"),
        (with_part("sampling_options", top_n_sigma=1.0), "sampling_options: .*top_n_sigma"),
        (with_part("sampling_options", temperature="hot"), "sampling_options: .*temperature"),
        (with_part("sampling_options", temperature=-1.0), "temperature is -1.0"),
        (with_part("sampling_options", guided_decoding={"structural_tag": {}}), "structural_tag is not possible"),
        (with_part("sampling_options", guided_decoding={"json": {}, "regex": "a"}), "2 constraints"),
        (with_part("sampling_options", guided_decoding={"ebnf": "a"}), "ebnf"),
        ({**CHAT, "require_reasoning": True}, "guided_decoding after reasoning"),
        (with_part("stop_conditions", max_thinking_tokens=5), "max_thinking_tokens"),
        (with_part("stop_conditions", max_tokens=-1), "max_tokens is -1"),
        (with_part("stop_conditions", max_tokens=0), "nothing to do"),
        (with_part("output_options", logprobs=50), "logprobs is 50"),
        ({**COMPLETION, "token_ids": []}, "the prompt has 0 tokens"),
        ({**COMPLETION, "token_ids": None}, "token_ids"),
        ({**COMPLETION, "token_ids": ["a"]}, "token_ids"),
        ({**COMPLETION, "token_ids": [-1]}, "prompt_token_ids"),
        ({**COMPLETION, "token_ids": b"abc"}, "3 bytes"),
        ({**COMPLETION, "sampling_options": [1]}, "sampling_options is of type list"),
        ({**COMPLETION, "routing": {"priority": "x"}}, "priority is 'x'"),
        ({**COMPLETION, "prompt_embeds": "QUJD"}, "prompt_embeds is not possible"),
        ({**COMPLETION, "multi_modal_data": {"image_url": []}}, "multi_modal_data is not possible"),
        ({**COMPLETION, "encoder_result": {"a": 1}}, "encoder_result is not possible"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(request_)
