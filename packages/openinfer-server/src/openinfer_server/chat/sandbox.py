"""The Jinja sandbox that templates run in: bounded, and carrying the origin of every character to the output.

The template's own text (what stands between its tags, and its string constants) reaches expressions as `MarkedText`;
what a request says is plain `str`. Of what a template can do with texts, `+`, `~`, `*`, `%`, slices, loops, blocks,
macros, `format`, the methods of `MarkedText` and some filters (`filters.py`) carry origins. The result of every other
method and filter is marked as lost, if there were marks to lose: no text of the template becomes a client's in silence.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from openinfer_server.chat.bounds import (
    MAX_REPEATED_LENGTH,
    PADDING_METHODS,
    TEXTS,
    Bounds,
    RenderingRefused,
    check_numbers,
    check_power,
    length_of,
)
from openinfer_server.chat.filters import template_filters
from openinfer_server.chat.template_reads import names_read
from openinfer_server.errors import UnusableTemplate
from openinfer_server.text.marked_text import (
    CARRIED,
    MarkedText,
    Origin,
    formatted,
    joined,
    lost,
    percent_formatted,
)

TICK = "openinfer_loop_tick"  # context name of the function that every loop calls
_OF_TEXTS = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))
"""Methods of a text that are safe, and not replaced by others."""
_OF_DICTIONARIES = frozenset(dir(dict))
_CALLS_OWN = frozenset(("_loop_vars", "_block_vars"))  # which jinja2 hands to every call
_OF_LOOPS = frozenset(("depth", "depth0", "first", "index", "index0", "last", "length", "revindex", "revindex0"))
"""What a loop says of itself in numbers."""
_VALUES = (*TEXTS, bool, int)  # what a namespace mostly has, which is safe to hand on
_LITERAL = "openinfer_literal_"  # attributes of the environment


class Tick:
    """Raises once this thread has computed for so long: what others take of the processor is no fault of a chat."""

    __slots__ = ("_deadline_s", "_soonest_s", "_timeout_s")

    def __init__(self, timeout_s: float) -> None:
        # A thread computes no longer than passes by the wall, and its own clock is a system call of 5 µs: a
        # chat of 160 turns spent more on it than on its text.
        self._timeout_s = timeout_s
        self._deadline_s, self._soonest_s = time.thread_time() + timeout_s, time.monotonic() + timeout_s

    def __call__(self) -> str:
        if time.monotonic() >= self._soonest_s and time.thread_time() > self._deadline_s:
            raise RenderingRefused(f"the chat template ran for more than {self._timeout_s} s")
        return ""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template; what its expressions make is bounded (`bounds.py`)."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, max_characters: int) -> None:
        bounds = Bounds(max_characters)
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            finalize=bounds.text_of,
        )
        self.bounds = bounds
        self.filters.update(template_filters(self.filters, bounds))
        del self.globals["lipsum"]  # texts of any length

    def compile_template(
        self, source: str, variables: Mapping[str, object]
    ) -> tuple[jinja2.Template, frozenset[str], frozenset[str]]:
        """A template, the names that it looks up, and its own texts.

        Args:
            source: of the template.
            variables: that it may use next to Jinja's own.

        Raises:
            UnusableTemplate: it does not compile.
        """
        try:
            parsed = self.parse(source)
            if parsed.find(nodes.EvalContextModifier):
                raise UnusableTemplate("the chat template switches escaping on or off, which is for web pages")
            read = names_read(parsed)
            literals = _Literals()
            tree = literals.visit(parsed)
            for loop in list(tree.find_all(nodes.For)):
                loop.body.insert(0, nodes.ExprStmt(nodes.Call(nodes.Name(TICK, "load"), [], [], None, None)))
            tree.set_environment(self)
            code = self.compile(tree)
        except jinja2.TemplateError as error:
            raise UnusableTemplate(f"the chat template does not compile: {error}") from error
        for text, name in literals.names.items():
            setattr(self, name, MarkedText.of(text, Origin.TEMPLATE))
        return jinja2.Template.from_code(self, code, self.make_globals({**variables})), read, frozenset(literals.names)

    def concat(self, parts: Iterable[str]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What macros, blocks and loops that call themselves put together."""
        several = list(parts)
        self.bounds.check_size(sum(map(len, several)))
        return several[0] if len(several) == 1 and type(several[0]) in TEXTS else joined(several)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # jinja2 asks a dictionary for an attribute first, and a chat of 160 turns has a thousand such questions.
        kind = type(cast("object", obj))
        if kind is dict and attribute not in _OF_DICTIONARIES:
            fields = cast("dict[str, Any]", obj)
            return fields[attribute] if attribute in fields else self.undefined(obj=fields, name=attribute)
        if attribute in _OF_TEXTS and kind in TEXTS:  # as in most other questions
            return getattr(cast("str", obj), attribute)
        if kind is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        if kind is Namespace and attribute[:1] != "_":
            value: object = getattr(obj, attribute, None)
            if type(value) in _VALUES:
                return value
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) in TEXTS and type(right) in TEXTS:  # as most are
            self.bounds.check_size(len(left) + len(right))
            return left + right
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(times, int) and length_of(repeated) * times > MAX_REPEATED_LENGTH:
                    raise RenderingRefused("the chat template repeats a text beyond all measure")
        elif operator == "**":
            check_power(left, right)
        elif operator == "+":
            self.bounds.check_size(length_of(left) + length_of(right))
        elif operator == "%" and isinstance(left, str):
            self.bounds.check_percent(left, right)
            if not isinstance(left, Markup):
                return percent_formatted(left, right)
        result = super().call_binop(context, operator, left, right)
        return lost(result, left, right) if isinstance(result, Markup) else result

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls what a template calls. Methods of texts carry origins, or lose them for all to see."""
        kind = type(cast("object", function))
        if kind is Tick:
            return function()
        if kind is Macro and len(args) == len(function.arguments) and kwargs.keys() <= _CALLS_OWN:
            return function(context.eval_ctx, *args)
        owner = getattr(function, "__self__", None)
        if owner is self:  # `added` or `concatenated`: jinja2 would ask whether they want its context
            return function(*args)
        if owner is not None and function.__name__ in PADDING_METHODS:
            check_numbers(args, kwargs)
        if not isinstance(owner, str):
            result = super().call(context, function, *args, **kwargs)
            if isinstance(owner, bytes) and isinstance(result, str):
                return MarkedText.of(result, Origin.LOST)  # what `encode` made the bytes of is not known
            return result
        name = function.__name__
        args = self.bounds.check_growth(owner, name, args, kwargs)
        if name in ("join", "replace") and not isinstance(owner, MarkedText | Markup):
            function = getattr(MarkedText(owner), name)
        if type(owner) in TEXTS:  # whose methods take no context, and are all safe
            result = function(*args, **{key: value for key, value in kwargs.items() if key not in _CALLS_OWN})
        else:
            result = super().call(context, function, *args, **kwargs)
        is_carried = name in CARRIED and not isinstance(owner, Markup)
        return result if is_carried else lost(result, owner, args, kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`format` and `format_map` of a text, kept from private attributes."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        owner, is_map = value.__self__, value.__name__ == "format_map"
        formatter = SandboxedFormatter(self)

        def carry(*args: Any, **kwargs: Any) -> str:
            fields = list(formatter.parse(owner))
            positional, named = ((), args[0]) if is_map else (args, kwargs)

            def value_of(name: str) -> object:
                return formatter.get_field(name, positional, named)[0]

            numbers = itertools.count()
            names = [name or str(next(numbers)) for _, name, _, _ in fields if name is not None]
            self.bounds.check_fields(owner, [spec for _, _, spec, _ in fields], map(value_of, names))
            whole = wrapped(*args, **kwargs)
            if isinstance(owner, Markup):
                return cast("str", lost(whole, owner, args, kwargs))
            return formatted(owner, str(whole), fields, value_of)

        return carry

    def added(self, *parts: Any) -> Any:
        """Several values one to the other, from the left: texts are copied once, not once for each."""
        if not all(type(part) in TEXTS for part in parts):
            return functools.reduce(lambda left, right: self.call_binop(None, "+", left, right), parts)
        self.bounds.check_size(sum(map(len, parts)))
        return "".join(parts) if all(type(part) is str for part in parts) else joined(parts)

    def concatenated(self, *parts: object) -> str:
        """What `~` makes."""
        texts = list(map(self.bounds.text_of, parts))
        self.bounds.check_size(sum(map(len, texts)))
        return joined(texts)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; for serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Literals(NodeTransformer):
    """The template's own texts become attributes of the environment, and `a ~ b` and `a + b + c` calls.

    The sandbox intercepts no `~`, and sums two at a time.

    Attributes:
        names: text -> name of its attribute.
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802 - jinja2's names
        return self._call(self.visit_all(node.nodes), "concatenated", node)

    def visit_Add(self, node: nodes.Add) -> nodes.Expr:  # noqa: N802
        if not isinstance(node.left, nodes.Add):
            return cast("nodes.Expr", self.generic_visit(node))
        parts: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            parts.append(left.right)
            left = left.left
        return self._call(self.visit_all((left, *reversed(parts))), "added", node)

    def visit_all(self, several: Iterable[nodes.Expr]) -> list[nodes.Expr]:
        return [self.visit(each) for each in several]

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Expr:  # noqa: N802
        return self._variable(node.data, node)

    def visit_Const(self, node: nodes.Const) -> nodes.Expr:  # noqa: N802
        return self._variable(node.value, node) if isinstance(node.value, str) else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        node.node = self.visit(node.node)
        if not isinstance(node.arg, nodes.Const):  # a key is looked up and never written
            node.arg = self.visit(node.arg)
        return node

    def _variable(self, text: str, node: nodes.Node) -> nodes.Expr:
        name = self.names.setdefault(text, f"{_LITERAL}{len(self.names)}")
        return nodes.EnvironmentAttribute(name, lineno=node.lineno)

    @staticmethod
    def _call(parts: list[nodes.Expr], name: str, node: nodes.Node) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), parts, [], None, None, lineno=node.lineno)
