"""Parameters between tags have the definitions that they refer to, and no others: text grows with the schema."""

import json
from typing import Any

import pytest

from openinfer_core.sampling import MAX_GRAMMAR_LENGTH
from openinfer_server.parsers.syntax.call_syntax import CallableFunction, LarkTexts, Unconstrainable
from openinfer_server.parsers.syntax.definitions import Definitions
from openinfer_server.parsers.syntax.tagged_syntax import ParameterTags, parameters

TAGS = ParameterTags(begin=lambda name, is_text: f"<{name}>", end="</>", free="FREE")


def lark_of(schema: dict[str, Any]) -> str:
    function = CallableFunction("f", schema, strict=True)
    return parameters(function, LarkTexts(lambda text: None, ()), TAGS)


def ref(name: str, word: str = "$defs") -> dict[str, Any]:
    return {"$ref": f"#/{word}/{name}"}


DEFINED = {
    "$defs": {"A": {"anyOf": [ref("B"), {"type": "integer"}]}, "B": {"items": ref("A")}, "C": {"const": 1}},
    "definitions": {"D": ref("C")},
}


@pytest.mark.parametrize(
    ("part", "used"),
    [
        ({"type": "integer"}, {}),
        (ref("C"), {"$defs": ["C"]}),
        (ref("A"), {"$defs": ["A", "B"]}),
        ({"items": [ref("D", "definitions")]}, {"$defs": ["C"], "definitions": ["D"]}),
        (ref("C/const"), {"$defs": ["C"]}),
        (ref("absent"), {}),
        ({"$ref": "#"}, {"$defs": ["A", "B", "C"], "definitions": ["D"]}),
        ({"$ref": "#c"}, {"$defs": ["A", "B", "C"], "definitions": ["D"]}),
        ({"$ref": "#/$defs/a~1b"}, {"$defs": ["A", "B", "C"], "definitions": ["D"]}),
        ({"items": {"$id": "x"}}, {"$defs": ["A", "B", "C"], "definitions": ["D"]}),
    ],
)
def test_a_part_has_the_definitions_that_it_reaches(part: dict[str, Any], used: dict[str, list[str]]) -> None:
    found = Definitions(DEFINED).used_by(part)
    assert {word: sorted(names) for word, names in found.items()} == used
    assert all(value is DEFINED[word][name] for word, names in found.items() for name, value in names.items())


def test_text_grows_with_the_schema_and_not_with_parameters_times_definitions() -> None:
    def schema(count: int) -> dict[str, Any]:
        return {
            "properties": {f"p{n}": ref(f"d{n}") for n in range(count)},
            "$defs": {f"d{n}": {"enum": [n, n + 1]} for n in range(count)},
        }

    few, many = len(lark_of(schema(50))), len(lark_of(schema(500)))
    assert many < 12 * few


def test_parameters_that_repeat_a_large_definition_are_refused_before_they_are_written() -> None:
    large = {"enum": ["x" * 40_000]}
    schema = {"properties": {f"p{n}": {"items": ref("large")} for n in range(5000)}, "$defs": {"large": large}}
    assert len(json.dumps(schema)) < MAX_GRAMMAR_LENGTH
    with pytest.raises(Unconstrainable, match=f"take more than {MAX_GRAMMAR_LENGTH} characters"):
        lark_of(schema)


def test_what_all_functions_have_together_is_bounded() -> None:
    lark = LarkTexts(lambda text: None, ())
    large = {"enum": ["x" * 300_000]}
    functions = [CallableFunction(f"f{n}", {"properties": {"p": large}}, strict=True) for n in range(5)]
    for function in functions[:3]:
        parameters(function, lark, TAGS)
    with pytest.raises(Unconstrainable, match=r"^f3: "):
        parameters(functions[3], lark, TAGS)
