"""Structured output: which grammar a request asks for, and the plan that has it.

The grammar goes to the engine as text; whether it can be used, its compiler says before the first token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from openinfer_core.errors import InvalidRequest
from openinfer_core.request import with_fields
from openinfer_core.sampling import MAX_GRAMMAR_LENGTH, Grammar, GrammarKind, Preamble
from openinfer_server.http.api_errors import from_invalid_request, invalid, refused
from openinfer_server.limits.conversation import check_depth
from openinfer_server.parsers.syntax.call_syntax import JsonSchema
from openinfer_server.request.generation_fields import GenerationFields, SamplingFields
from openinfer_server.request.plan import Plan, Prompt
from openinfer_server.request.structured_types import ANY_OBJECT, JsonObjectFormat, JsonSchemaFormat, ResponseFormat
from openinfer_server.service import Service
from openinfer_server.tools.available import AvailableTools
from openinfer_server.tools.grammar import calls_or_json, required_calls, strict_calls

MAX_CHOICES = 4096  # strings of a `choice`


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """What the text of an answer must be; at most one of the two is there."""

    grammar: Grammar | None = None
    schema: JsonSchema | None = None  # of an answer in JSON, which may call tools instead
    field: str = ""  # which field asks for it
    is_format: bool = False  # whether it is about text alone, beside which there may be calls


def output_constraint(
    fields: SamplingFields, *, schema: JsonSchema | None = None, schema_field: str = "response_format"
) -> OutputConstraint:
    """What a request asks for.

    Raises:
        ApiError: 400; it is malformed, or asked for twice.
    """
    constraint = list(_constraints(fields))
    if schema is not None:
        constraint.append(OutputConstraint(schema=schema, field=schema_field, is_format=True))
    if len(constraint) > 1:
        names = " and ".join(each.field for each in constraint)
        raise invalid(constraint[1].field, f"{names} both say what the answer must be; give one")
    if not constraint:
        return OutputConstraint()
    if constraint[0].schema is not None:
        check_depth(constraint[0].schema, constraint[0].field)
    return constraint[0]


def schema_of(answer_format: ResponseFormat | None) -> JsonSchema | None:
    """The schema that OpenAI's `response_format` stands for; None for text."""
    match answer_format:
        case JsonObjectFormat():
            return ANY_OBJECT
        case JsonSchemaFormat():
            return answer_format.json_schema.schema
        case _:
            return None


def text_grammar(constraint: OutputConstraint) -> Grammar | None:
    return constraint.grammar if constraint.schema is None else _schema_grammar(constraint.schema, constraint.field)


def chat_grammar(
    service: Service, prompt: Prompt, available: AvailableTools, constraint: OutputConstraint
) -> Grammar | None:
    """The grammar of an answer that may begin with reasoning and may have tool calls.

    Raises:
        ApiError: 400; the parsers do not say, or what is asked goes without tools.
        ParserFault: a parser cannot be made.
    """
    grammar = _answer_grammar(service, available, constraint)
    if grammar is None:
        return None
    if prompt.begun and constraint.field and not _is_inside_reasoning(service, prompt):
        raise refused(constraint.field, "it says what the whole answer is, and the last message is its beginning")
    preamble = _preamble(service, prompt, constraint.field or "tools")
    if preamble is not None and available.functions:
        # a call inside the reasoning would end it, and the grammar would ask for another one
        preamble = msgspec.structs.replace(preamble, without=tuple(sorted(service.parsers.begin_tokens)))
    return msgspec.structs.replace(grammar, preamble=preamble)


def constrained(plan: Plan, grammar: Grammar | None) -> Plan:
    """The plan with a grammar for each of its requests."""
    if grammar is None:
        return plan
    total = len(grammar.text) * len(plan.requests)
    if total > 4 * MAX_GRAMMAR_LENGTH:
        message = f"the grammar has {len(grammar.text)} characters for each of {len(plan.requests)} choices; "
        raise invalid("n", message + f"at most {4 * MAX_GRAMMAR_LENGTH} are possible")
    requests = [
        with_fields(request, sampling=msgspec.structs.replace(request.sampling, grammar=grammar))
        for request in plan.requests
    ]
    return replace(plan, requests=requests)


def _answer_grammar(service: Service, available: AvailableTools, constraint: OutputConstraint) -> Grammar | None:
    if not available.functions:
        return text_grammar(constraint)
    if constraint.grammar is not None:
        raise refused(constraint.field, "it goes with tool_choice none, or without tools")
    if available.required:
        if constraint.schema is not None and not constraint.is_format:
            raise refused(constraint.field, f"{available.choice_field} asks for a call; give one of the two")
        return required_calls(service, available, available.choice_field)
    if constraint.schema is not None:
        return calls_or_json(service, available, constraint.schema, constraint.field)
    return strict_calls(service, available) if any(function.strict for function in available.functions) else None


def _preamble(service: Service, prompt: Prompt, field: str) -> Preamble | None:
    # reasoning is not constrained: what the prompt shows of it, and what may come of it
    chosen = service.parsers.reasoning
    if chosen is None:
        return None
    is_inside = _is_inside_reasoning(service, prompt)
    tags = service.parsers.reasoning_tags
    if tags is None:
        if is_inside:
            why = f"the reasoning parser {chosen.plugin.name} does not say where reasoning ends"
            raise refused(field, why)
        return None
    opening, closing = tags
    if is_inside:
        return Preamble(closing=closing)
    return (
        None if prompt.begun or prompt.text.rstrip().endswith(closing) else Preamble(opening=opening, closing=closing)
    )


def _is_inside_reasoning(service: Service, prompt: Prompt) -> bool:
    return service.parsers.open(prompt.before_answer, {}, begun=prompt.begun).reasoning


def _constraints(fields: SamplingFields) -> Iterator[OutputConstraint]:
    given = fields.structured_outputs
    if given is not None and given.json_object:
        yield OutputConstraint(schema=ANY_OBJECT, field="structured_outputs.json_object")
    for name in ("json", "regex", "choice", "grammar"):
        for field, value in (
            (f"structured_outputs.{name}", None if given is None else getattr(given, name)),
            (f"guided_{name}", getattr(fields, f"guided_{name}")),
        ):
            if value is not None:
                yield _read(name, value, field)
    response_format = fields.response_format if isinstance(fields, GenerationFields) else None
    if response_format is not None:
        schema = schema_of(response_format)
        if schema is not None:
            yield OutputConstraint(schema=schema, field="response_format", is_format=True)


def _read(name: str, value: Any, field: str) -> OutputConstraint:
    match name:
        case "json":
            return OutputConstraint(schema=_decoded(value, field) if isinstance(value, str) else value, field=field)
        case "regex":
            return OutputConstraint(_grammar(GrammarKind.REGEX, value, field), field=field)
        case "grammar":
            return OutputConstraint(_grammar(GrammarKind.LARK, value, field), field=field)
        case _:
            if not 1 <= len(value) <= MAX_CHOICES:
                raise invalid(field, f"{field} has {len(value)} strings; 1 to {MAX_CHOICES} are possible")
            return OutputConstraint(
                _grammar(GrammarKind.CHOICE, msgspec.json.encode(value).decode(), field), field=field
            )


def _decoded(text: str, field: str) -> JsonSchema:
    try:
        schema: object = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(field, f"{field} is text that is not JSON") from error
    if not isinstance(schema, dict | bool):
        raise invalid(field, f"{field} is no JSON Schema; one is an object")
    return cast("JsonSchema", schema)


def _schema_grammar(schema: JsonSchema, field: str) -> Grammar:
    return _grammar(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode(), field)


def _grammar(kind: GrammarKind, text: str, field: str) -> Grammar:
    try:
        return Grammar(kind=kind, text=text)
    except InvalidRequest as error:
        raise from_invalid_request(error).with_names({"grammar": field}) from error
