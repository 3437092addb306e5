"""FIELDS.md says of every field what becomes of it; it is written from the types.

python packages/openinfer-server/tests/test_field_lists.py
"""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from openinfer_server.anthropic import blocks
from openinfer_server.anthropic import types as messages
from openinfer_server.openai import types as api_types
from openinfer_server.openai.models import ModelQuery
from openinfer_server.request import structured_types
from openinfer_server.request.fields import RequestFields
from openinfer_server.request.generation_fields import (
    GenerationFields,
    SamplingFields,
    StreamOptions,
    TokenDetailFields,
)
from openinfer_server.request.kv_transfer import KvTransferParams, StoredPrompt
from openinfer_server.request.neutral_fields import NeutralSamplingFields
from openinfer_server.request.rules import ANY, Label, Neutral, Refused, Rule
from openinfer_server.request.structured_types import GuidedFields
from openinfer_server.responses import items
from openinfer_server.responses import types as responses
from openinfer_server.tokens import types as generate_types
from openinfer_server.tokens.tokenize import DetokenizeRequest, TokenizeRequest
from openinfer_server.tools import types as tool_types

FILE = Path(__file__).parents[1] / "FIELDS.md"
SECTIONS: Sequence[tuple[str, Sequence[tuple[str, type]]]] = (
    (
        "POST /v1/completions",
        [
            ("", api_types.CompletionRequest),
            ("stream_options", StreamOptions),
            ("kv_transfer_params", KvTransferParams),
            ("kv_transfer_params.openinfer", StoredPrompt),
        ],
    ),
    (
        "POST /v1/chat/completions",
        [
            ("", api_types.ChatRequest),
            ("stream_options", StreamOptions),
            ("messages[] of the assistant", api_types.AssistantTurn),
            ("messages[].tool_calls[]", api_types.ToolCall),
            ("messages[].tool_calls[].function", api_types.FunctionCall),
            ("messages[].content[]", api_types.TextPart),
            ("prediction", api_types.Prediction),
            ("response_format.json_schema", structured_types.NamedSchema),
            ("structured_outputs", structured_types.StructuredOutputs),
            ("tools[]", tool_types.Tool),
            ("tools[].function", tool_types.FunctionDefinition),
            ("tool_choice", tool_types.ToolChoice),
        ],
    ),
    (
        "POST /v1/responses",
        [
            ("", responses.ResponseRequest),
            ("stream_options", responses.ResponseStreamOptions),
            ("reasoning", responses.ReasoningOptions),
            ("text", responses.TextOptions),
            ("text.format of type json_schema", responses.SchemaFormat),
            ("tools[] of type function", responses.FunctionTool),
            ("tools[] of type namespace", responses.NamespaceTool),
            ("tool_choice", responses.ToolChoice),
            ("input[] of type message", items.MessageItem),
            ("input[] of type function_call", items.FunctionCallItem),
            ("input[] of type function_call_output", items.FunctionOutputItem),
            ("input[] of type reasoning", items.ReasoningItem),
            ("input[].content[] of type input_text", items.InputText),
            ("input[].content[] of type output_text", items.OutputText),
        ],
    ),
    ("POST /v1/responses/input_tokens", [("", responses.InputTokensRequest)]),
    ("GET /v1/responses/{response_id}", [("", responses.RetrieveQuery)]),
    ("GET /v1/responses/{response_id}/input_items", [("", responses.ItemsQuery)]),
    (
        "POST /v1/messages",
        [
            ("", messages.MessagesRequest),
            ("thinking of type enabled", messages.ThinkingEnabled),
            ("thinking of type adaptive", messages.ThinkingAdaptive),
            ("output_config", messages.OutputConfig),
            ("metadata", messages.Metadata),
            ("tools[]", messages.ClientTool),
            ("tool_choice of type auto", messages.ToolChoiceAuto),
            ("messages[].content[] of type text", blocks.TextBlock),
            ("messages[].content[] of type thinking", blocks.ThinkingBlock),
            ("messages[].content[] of type tool_use", blocks.ToolUseBlock),
            ("messages[].content[] of type tool_result", blocks.ToolResultBlock),
        ],
    ),
    ("POST /v1/messages/count_tokens", [("", messages.CountTokensRequest)]),
    ("GET /v1/models", [("", ModelQuery)]),
    (
        "POST /inference/v1/generate",
        [("", generate_types.TokenRequest), ("sampling_params", generate_types.TokenSampling)],
    ),
    ("POST /tokenize", [("", TokenizeRequest)]),
    ("POST /detokenize", [("", DetokenizeRequest)]),
)
HEAD = """# Fields

Written from the types by `tests/test_field_lists.py`, which also fails when this file is behind. Bounds are in
`/openapi.json`. A field that is not named here is refused with 400 and its name; `null` means absent.

*Honoured* fields do what their names say. A field that *changes nothing* asks for what is always so, with the values
in brackets, where there are some; any other value is refused. A *label* names the request or its user, is bounded and
changes nothing. *Refused* fields are known and cannot be honoured.

*Dropped with notice* are tools that search the web, which clients offer with every request, where `tools` has them and
`tool_choice` does not name them:
DROPPED.
The response's header `openinfer-dropped` says so (`tools[2].type=web_search`), no object in it shows them,
`openinfer_dropped_fields_total` counts them, and a server with `--strict true` refuses them. The list is closed.
"""


def render() -> str:
    """The whole file."""
    dropped = textwrap.fill(", ".join(f"`{kind}`" for kind in sorted(tool_types.DROPPED_TOOLS)), width=118)
    lines = [HEAD.replace("DROPPED", dropped)]
    for title, parts in SECTIONS:
        lines.append(f"## `{title}`\n")
        for where, kind in parts:
            lines += _part(where, kind)
    return "\n".join(lines)


def _part(where: str, kind: type) -> Iterator[str]:
    rules: Mapping[str, Rule] = getattr(kind, "RULES", {})
    sent = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    honoured = [f"`{sent[name]}`" for name in sent if name not in rules]
    if where:
        yield f"**{where}**\n"
    points = [f"honoured: {', '.join(honoured) or 'its presence'}"]
    for of in (Neutral, Label, Refused):
        points += [_point(sent[name], rules[name]) for name in sorted(rules) if isinstance(rules[name], of)]
    yield from (textwrap.fill(f"- {point}", width=118, subsequent_indent="  ") for point in points)
    yield ""


def _point(field: str, rule: Rule) -> str:
    values = getattr(rule, "values", ANY)
    taken = f" ({', '.join(json.dumps(value) for value in values)})" if values else ""
    return f"{rule.word}: `{field}`{taken}: {rule.why}"


def test_file_is_what_the_types_say():
    is_written = FILE.read_text(encoding="utf-8") == render()
    assert is_written, "run python packages/openinfer-server/tests/test_field_lists.py"


def test_every_object_of_a_request_with_rules_is_in_the_file():
    listed = {kind for _, parts in SECTIONS for _, kind in parts}
    pending, named = [RequestFields], set()
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.RULES and kind.__module__.startswith("openinfer_server"):
            named.add(kind)
    assert named - listed <= {
        GenerationFields,
        GuidedFields,
        NeutralSamplingFields,
        SamplingFields,
        TokenDetailFields,
    }  # which are parts of some that are


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
