"""Structured output as requests ask for it: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from openinfer_server.request.fields import RequestFields
from openinfer_server.request.neutral_fields import NeutralSamplingFields
from openinfer_server.request.rules import ANY, Label, Neutral, Refused, Rule

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_WHITE_SPACE = "a schema's x-guidance has whitespace_flexible and whitespace_pattern"


class TextFormat(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """A JSON object."""


class NamedSchema(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON Schema; answers follow it to the letter, `strict` or not."""

    name: str | None = None
    schema: dict[str, Any] | bool
    description: str | None = None
    strict: bool | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "description": Neutral(ANY, "what the model is to know stands in the messages"),
        "name": Label("it names the schema for people"),
        "strict": Neutral(ANY, "schemas are followed to the letter, asked or not"),
    }


class JsonSchemaFormat(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """JSON that follows a schema."""

    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the answer must be; one of the fields that are not refused."""

    json: dict[str, Any] | str | bool | None = None  # a JSON Schema, as an object or as its text
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark, or GBNF
    structural_tag: object = None
    whitespace_pattern: object = None
    disable_any_whitespace: object = None
    disable_additional_properties: object = None
    disable_fallback: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "disable_additional_properties": Neutral((False,), "a schema's additionalProperties says so"),
        "disable_any_whitespace": Neutral((False,), _WHITE_SPACE),
        "disable_fallback": Neutral(ANY, "there is one backend and no fallback"),
        "structural_tag": Refused("tools with strict constrain calls inside text"),
        "whitespace_pattern": Refused(_WHITE_SPACE),
    }


class GuidedFields(NeutralSamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Structured output on routes that generate, under both names that vLLM has had for it."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
