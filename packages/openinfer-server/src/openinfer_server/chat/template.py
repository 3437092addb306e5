"""`ChatTemplate`: the model folder's Jinja template, rendered in a sandbox, with transformers' conventions.

What bounds a rendering: the immutable sandbox (no private attributes, no mutation, `range` up to 100,000), a clock
that is read at every turn of every loop, and the length of every text and list that an expression makes, which is told
before it is made (`bounds.py`). What nothing bounds is the time of a single expression. The template comes from the
model folder, which its owner trusts as they trust the weights; requests cannot bring one.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
import msgspec
from jinja2.defaults import DEFAULT_NAMESPACE

from openinfer_server.chat.bounds import RenderingRefused
from openinfer_server.chat.sandbox import TICK, Sandbox, Tick
from openinfer_server.chat.turns import REASONING_NAMES
from openinfer_server.errors import UnusableTemplate
from openinfer_server.text.marked_text import MarkedText, Origin, joined

_ROLES = ("system", "developer", "user", "assistant", "tool")  # which the server writes, not its clients
_TOKEN_SUFFIX = "_token"  # noqa: S105 - how variables end that name a special token
_ARGUMENTS: Sequence[object] = ({}, "{}")  # of a call, in both forms
_ASK: Mapping[str, object] = {"role": "user", "content": "?"}
_CHATS: Sequence[Sequence[Mapping[str, object]]] = (
    [{"role": "system", "content": "."}, _ASK],
    [_ASK, {"role": "assistant", "content": "!"}, _ASK],
)
_OWN = frozenset(  # variables that have a meaning of their own here
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now", *DEFAULT_NAMESPACE),
    )
)


class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, timeout_s: float, max_characters: int
    ) -> None:
        functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._template, read, literals = Sandbox(max_characters).compile_template(source, functions)
        self._special_tokens = {name: MarkedText.of(token, Origin.TEMPLATE) for name, token in special_tokens.items()}
        self._timeout_s = timeout_s
        self._max_characters = max_characters
        self.source = source
        self.reads = read  # names of variables, globals too
        self.knows_tools = "tools" in source  # whether the template tells the model what it may call
        # Whether the template tells developers' turns apart; otherwise they are system turns.
        self.knows_developer_role = "developer" in source
        # Whether it writes the arguments of earlier calls as they stand (DeepSeek's); others take objects.
        as_object, as_text = (self._with_call("", arguments) for arguments in _ARGUMENTS)
        # Whether it leaves calls out of turns whose content is text, be it empty (DeepSeek-V3's).
        self.wants_no_content_beside_calls = (
            "tool_calls" in source
            and self._with_call("", None) in (as_object, as_text)
            and self._with_call(None, None) != self._with_call(None, "{}") is not None
        )
        if self.wants_no_content_beside_calls:
            as_object, as_text = (self._with_call(None, arguments) for arguments in _ARGUMENTS)
        self.wants_text_arguments = "tool_calls" in source and as_object is None and as_text is not None
        # What the template writes itself, also put together of several texts (`<|` and a role and `|>`).
        written = (as_object, as_text, *map(self._tried, _CHATS))
        self.own_texts = literals.union(special_tokens.values(), *map(_own_parts, written))

    @classmethod
    def load(cls, model_dir: Path, *, timeout_s: float, max_characters: int) -> "ChatTemplate | None":
        """Reads `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`; None if there is neither.

        Raises:
            UnusableTemplate: it does not compile, or several are there and none is named `default`.
        """
        config = _read_config(model_dir)
        source = _source(model_dir, config)
        if source is None:
            return None
        return cls(source, _special_tokens(config), timeout_s=timeout_s, max_characters=max_characters)

    @property
    def settable(self) -> frozenset[str]:
        """Variables that a request may set: those it reads and no part of the server writes."""
        return frozenset(name for name in self.reads - _OWN if not name.endswith(_TOKEN_SUFFIX))

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        options: Mapping[str, object],
        *,
        add_generation_prompt: bool = True,
    ) -> MarkedText:
        """The prompt of a chat, up to where the assistant's answer begins, or to the end of the last message.

        Its characters carry their origins: template, assistant, or client.

        Raises:
            RenderingRefused: see there.
        """
        variables: dict[str, object] = {
            **self._special_tokens,
            **options,
            "messages": list(map(_marked, messages)),
            "add_generation_prompt": add_generation_prompt,
            TICK: Tick(self._timeout_s),
        }
        try:
            return self._collect(variables)
        except jinja2.TemplateError as error:
            raise RenderingRefused(f"the chat template refused the messages: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RenderingRefused("the chat template failed on these messages") from error

    def _with_call(self, content: str | None, arguments: object) -> MarkedText | None:
        """A chat with a call, or without where there are no arguments; None if the template fails on it.

        What a template takes is known by trying it alone.
        """
        call = {"id": "call_0", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        turns: list[Mapping[str, object]] = [
            _ASK,
            {"role": "assistant", "content": content, "tool_calls": [] if arguments is None else [call]},
            {"role": "tool", "content": "!", "tool_call_id": "call_0"},
        ]
        return self._tried(turns)

    def _tried(self, turns: Sequence[Mapping[str, object]]) -> MarkedText | None:
        try:
            return self.render(turns, {})
        except RenderingRefused:
            return None

    def _collect(self, variables: dict[str, object]) -> MarkedText:
        parts: list[str] = []
        length = 0
        for part in self._template.generate(variables):
            length += len(part)
            if length > self._max_characters:
                raise RenderingRefused(f"the rendered chat exceeds {self._max_characters} characters")
            parts.append(part)
        return joined(parts)


def template_source(model_dir: Path) -> str | None:
    """Source of a model folder's template, not compiled; None if there is none.

    Raises:
        UnusableTemplate: several are there and none is named `default`, or a file cannot be read.
    """
    return _source(model_dir, _read_config(model_dir))


def _marked(message: Mapping[str, object]) -> Mapping[str, object]:
    """A message whose role, and the assistant's texts, say where they come from."""
    role = message.get("role")
    if role not in _ROLES:
        return message
    marked = {**message, "role": MarkedText.of(cast("str", role), Origin.TEMPLATE)}
    if role == "assistant":
        marked |= {name: _of_assistant(message[name]) for name in ("content", *REASONING_NAMES) if name in message}
    return marked


def _of_assistant(content: object) -> object:
    if isinstance(content, list):  # parts, which calls from Python may have
        return [_of_assistant(part) for part in cast("list[object]", content)]
    if isinstance(content, MarkedText):
        return content.of_origin(Origin.ASSISTANT)
    if isinstance(content, str):
        return MarkedText.of(content, Origin.ASSISTANT)
    part = cast("dict[str, object]", content)
    if isinstance(content, dict) and "text" in part:
        return {**part, "text": _of_assistant(part["text"])}
    return part


def _own_parts(text: MarkedText | None) -> list[str]:
    """Stretches of a rendered chat that the template wrote."""
    if text is None:
        return []
    return [text.plain[begin:end] for begin, end, origin in text.runs() if origin is Origin.TEMPLATE]


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.fromtimestamp(time.time()).astimezone().strftime(pattern)


def _read_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableTemplate(f"{path} is not a JSON object: {error}") from error


def _source(model_dir: Path, config: dict[str, Any]) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    declared = config.get("chat_template")
    if isinstance(declared, list):
        named = msgspec.convert(declared, list[_NamedTemplate])
        declared = next((entry.template for entry in named if entry.name == "default"), None)
        if declared is None:
            names = ", ".join(entry.name for entry in named)
            raise UnusableTemplate(f"{model_dir} has the chat templates {names}; one must be named default")
    if declared is not None and not isinstance(declared, str):
        raise UnusableTemplate(f"chat_template of {model_dir} is neither a string nor a list of named templates")
    return declared


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; each is a string or an object with `content`."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if name.endswith(_TOKEN_SUFFIX):
            content = cast("dict[str, object]", value).get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens
