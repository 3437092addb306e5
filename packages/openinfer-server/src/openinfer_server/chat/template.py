"""`ChatTemplate`: the model folder's Jinja template, rendered in a sandbox, with transformers' conventions.

What bounds a rendering: the immutable sandbox (no private attributes, no mutation, `range` up to 100,000), a clock
that is read at every turn of every loop, bounds on every product of a string or list with a number, on what is put
together by `+` and `~`, on padding by `%`, and on the length of the output. What nothing bounds: a single expression
that runs long, or makes a large value by a method or filter (`replace`, `ljust`, `format`, `join`). The template comes
from the model folder, which its owner trusts as they trust the weights; requests cannot bring one.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import msgspec
from jinja2 import nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from openinfer_server.chat.template_reads import names_read
from openinfer_server.errors import UnusableTemplate

MAX_REPEATED_LENGTH = 2**20  # longest string or list that a product with a number may give
_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})")  # a width or precision of five digits, or one that is an argument
_TICK = "openinfer_loop_tick"  # context name of the function that every loop calls
_CONCATENATE = "openinfer_concatenate"
_TOKEN_SUFFIX = "_token"  # noqa: S105 - how variables end that name a special token
_ARGUMENTS: Sequence[object] = ({}, "{}")  # of a call, in both forms
_OWN = frozenset(  # variables that have a meaning of their own here
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now", *DEFAULT_NAMESPACE),
    )
)


class RenderingRefused(Exception):
    """The template refused these messages, failed on them or exceeded a bound; the message is for the client."""


class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, timeout_s: float, max_characters: int
    ) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.max_characters = max_characters
        self._template, read = _compile(environment, source)
        self._special_tokens = dict(special_tokens)
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
    ) -> str:
        """The prompt of a chat, up to where the assistant's answer begins, or to the end of the last message.

        Raises:
            RenderingRefused: see there.
        """
        variables: dict[str, object] = {
            **self._special_tokens,
            **options,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            _TICK: _clock(self._timeout_s),
        }
        try:
            return self._collect(variables)
        except jinja2.TemplateError as error:
            raise RenderingRefused(f"the chat template refused the messages: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RenderingRefused("the chat template failed on these messages") from error

    def _with_call(self, content: str | None, arguments: object) -> str | None:
        """A chat with a call, or without where there are no arguments; None if the template fails on it.

        What a template takes is known by trying it alone.
        """
        call = {"id": "call_0", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        turns: list[dict[str, object]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": content, "tool_calls": [] if arguments is None else [call]},
            {"role": "tool", "content": "!", "tool_call_id": "call_0"},
        ]
        try:
            return self.render(turns, {})
        except RenderingRefused:
            return None

    def _collect(self, variables: dict[str, object]) -> str:
        parts: list[str] = []
        length = 0
        for part in self._template.generate(variables):
            length += len(part)
            if length > self._max_characters:
                raise RenderingRefused(f"the rendered chat exceeds {self._max_characters} characters")
            parts.append(part)
        return "".join(parts)


def template_source(model_dir: Path) -> str | None:
    """Source of a model folder's template, not compiled; None if there is none.

    Raises:
        UnusableTemplate: several are there and none is named `default`, or a file cannot be read.
    """
    return _source(model_dir, _read_config(model_dir))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with products, sums and padding bounded."""

    max_characters = MAX_REPEATED_LENGTH

    intercepted_binops = frozenset({"*", "+", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(times, int) and _length(repeated) * times > MAX_REPEATED_LENGTH:
                    raise RenderingRefused("the chat template repeats a text beyond all measure")
        elif operator == "+" and _length(left) + _length(right) > self.max_characters:
            raise RenderingRefused(f"the chat template makes a text of more than {self.max_characters} characters")
        elif operator == "%" and isinstance(left, str) and _WIDTH.search(left):
            raise RenderingRefused("the chat template pads a text beyond all measure")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; for serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(environment: _Environment, source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """The template, and the names that it looks up."""
    try:
        parsed = environment.parse(source)
        read = names_read(parsed)
        tree = _BoundedConcatenation().visit(parsed)
        for loop in list(tree.find_all(nodes.For)):
            loop.body.insert(0, nodes.ExprStmt(nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)))
        tree.set_environment(environment)
        code = environment.compile(tree)
    except jinja2.TemplateError as error:
        raise UnusableTemplate(f"the chat template does not compile: {error}") from error
    known = environment.make_globals(_globals(environment.max_characters))
    return jinja2.Template.from_code(environment, code, known), read


class _BoundedConcatenation(NodeTransformer):
    """`a ~ b` becomes a call: the sandbox intercepts other operators, not this one."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802 - jinja2's name
        parts = [self.visit(part) for part in node.nodes]
        return nodes.Call(nodes.Name(_CONCATENATE, "load"), parts, [], None, None, lineno=node.lineno)


def _globals(max_characters: int) -> dict[str, object]:
    def concatenate(*parts: object) -> str:
        texts = [str(part) for part in parts]
        if sum(map(len, texts)) > max_characters:
            raise RenderingRefused(f"the chat template makes a text of more than {max_characters} characters")
        return "".join(texts)

    return {"raise_exception": _raise_exception, "strftime_now": _strftime_now, _CONCATENATE: concatenate}


def _length(value: object) -> int:
    return len(cast("Sequence[object]", value)) if isinstance(value, str | list | tuple) else 0


def _clock(timeout_s: float) -> Callable[[], str]:
    deadline_s = time.monotonic() + timeout_s

    def tick() -> str:
        if time.monotonic() > deadline_s:
            raise RenderingRefused(f"the chat template ran for more than {timeout_s} s")
        return ""

    return tick


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.fromtimestamp(time.time()).astimezone().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    # jinja2's own filter escapes for HTML, which models have never seen
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
