"""Bodies of requests as msgspec types: honoured, neutral, or refused by name.

`README.md` has the table of options; a test holds it to these types.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from openinfer_ollama.options import Options
from openinfer_server import ANY, FunctionDefinition, Int64, Neutral, Refused, RequestFields, Rule

KEPT = "the model stays loaded as long as the server runs"
TEXT_ONLY = "this server serves text only"
NOT_TEXT = Refused(TEXT_ONLY)
NO_IMAGES = Neutral(([],), TEXT_ONLY)
UNSCORED = "/v1/chat/completions has log-probabilities"
WHOLE_CONTEXT = Neutral((False,), "a prompt beyond the context is refused, and nothing of it is cut away")
_NO_TIME = re.compile(r"0+(\.0+)?(ns|us|µs|ms|s|m|h)?")

Effort = Literal["low", "medium", "high", "max"]


class Request(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both routes take that generate text."""

    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Effort | None = None
    keep_alive: str | float | None = None
    logprobs: object = None
    shift: object = None
    top_logprobs: object = None
    truncate: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "keep_alive": Neutral(ANY, KEPT),
        "logprobs": Neutral((False,), UNSCORED),
        "shift": WHOLE_CONTEXT,
        "top_logprobs": Refused(UNSCORED),
        "truncate": WHOLE_CONTEXT,
    }

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def unloads(self) -> bool:
        """Whether the model is to be unloaded at once."""
        given = self.keep_alive
        return given == 0 or (isinstance(given, str) and _NO_TIME.fullmatch(given) is not None)

    @property
    def thinking(self) -> bool | None:
        """Whether to think. Models here think or do not: each effort turns it on."""
        return self.think if isinstance(self.think, bool | None) else True


class ToolCallFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an earlier call called."""

    name: str
    arguments: dict[str, Any] | None = None
    index: Int64 | None = None


class MessageToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call the model made earlier."""

    function: ToolCallFunction
    id: str | None = None
    type: Literal["function"] | None = None


class Message(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A turn of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    images: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {"images": NO_IMAGES}


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function on offer."""

    function: FunctionDefinition
    type: Literal["function"] | None = None


class ChatRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /api/chat`."""

    messages: list[Message] | None = None
    tools: list[Tool] | None = None


class GenerateRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: object = None
    height: object = None
    images: object = None
    steps: object = None
    suffix: object = None
    template: object = None
    width: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        **Request.RULES,
        "context": Neutral(([],), "token ids of earlier answers are not given out; send messages to /api/chat"),
        "height": NOT_TEXT,
        "images": NO_IMAGES,
        "steps": NOT_TEXT,
        "suffix": Neutral(("",), "the model does not fill in the middle"),
        "template": Neutral(("",), "a model's template is its folder's; send messages to /api/chat"),
        "width": NOT_TEXT,
    }


class ShowRequest(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /api/show`."""

    model: str
    verbose: bool | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {"verbose": Neutral(ANY, "there is no more to say")}
