"""The guard process: translates grammars for llguidance and tries them, within bounds of processor time and memory.

Run by its path, so that it loads nothing but llguidance: one JSON request per line in, one JSON answer per line out. A
grammar that exhausts a bound, or the stack, ends the process; `guard.py` says so to its client and starts another.
"""

import contextlib
import json
import math
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeGuard, cast

from llguidance import LLMatcher, LLParserLimits, grammar_from

MAX_MEMORY_BYTES = 2 * 2**30  # address space, of which Python and llguidance take about 0.3 GB
STACK_BYTES = 2**20  # an eighth of what threads of the engine have: what fits here cannot overflow there
NICENESS = 5  # a third of the time of what it competes with: a grammar that is checked delays no token of another's
# between the parts of JSON, unless the schema's `x-guidance` speaks of it: a model cannot go on with it forever
WHITESPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
_INT64 = (-(2**63), 2**63 - 1)  # llguidance reads a number as float64 and keeps integers within these
# Whether a bound that is read as `read` lets through what `bound` does not.
_ROOMIER: dict[str, Callable[[float, float], bool]] = {
    "minimum": lambda bound, read: _kept(read) < bound,
    "maximum": lambda bound, read: _kept(read) > bound,
    "exclusiveMinimum": lambda bound, read: _kept(read + 1) <= bound,
    "exclusiveMaximum": lambda bound, read: _kept(read - 1) >= bound,
}
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


def translate(request: dict[str, Any]) -> str:
    """A grammar in llguidance's own notation.

    Args:
        request: `kind` and `text` as of `openinfer_core.Grammar`, and `head`, Lark that refers to `@body`, or None.

    Raises:
        ValueError: it is not what its kind says.
        RecursionError: it is nested too deeply.
    """
    body = _body(request["kind"], request["text"])
    head = request["head"]
    parts = [body] if head is None else [{"name": "head", "lark_grammar": head}, body]
    return json.dumps({"grammars": parts})


def _body(kind: str, text: str) -> dict[str, Any]:
    if kind == "json_schema":
        schema: object = json.loads(text)
        check_numbers(schema)
        if isinstance(schema, dict):
            _bound_white_space(cast("dict[str, Any]", schema))
        return {"name": "body", "json_schema": schema}
    if kind == "regex":
        return {**json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0], "name": "body"}
    if kind == "choice":
        return {"name": "body", "lark_grammar": _choice(json.loads(text))}
    for place in re.finditer(r"%json\s*(?=\{)", text):
        with contextlib.suppress(json.JSONDecodeError):  # it stands in a string or a comment; else llguidance says so
            check_numbers(json.JSONDecoder().raw_decode(text, place.end())[0])
    return {"name": "body", "lark_grammar": grammar_from("grammar", text)}


def check_numbers(schema: object) -> None:
    """Refuses numbers of a schema that llguidance would take for others: answers would not fit what was asked.

    A schema that is `lenient`, as those of functions without `strict` are, is followed as far as it is known.

    Raises:
        ValueError: naming the keyword and the number.
    """
    whole: dict[str, Any] = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    options: object = whole.get("x-guidance")
    if not (isinstance(options, dict) and cast("dict[str, Any]", options).get("lenient") is True):
        _check_schema(cast("object", schema))


def _check_schema(schema: object) -> None:
    if isinstance(schema, list):
        for part in cast("list[object]", schema):
            _check_schema(part)
    if not isinstance(schema, dict):
        return
    for keyword, value in cast("dict[str, object]", schema).items():
        if keyword in ("const", "enum"):
            _check_value(keyword, value)
        elif keyword in _ROOMIER and _is_number(value):
            if _ROOMIER[keyword](value, _read(value)):
                raise ValueError(_too_large(keyword, value))
        elif keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            _check_schema(list(cast("dict[str, object]", value).values()))
        elif keyword not in ("default", "examples"):
            _check_schema(value)


def _check_value(keyword: str, value: object) -> None:
    if isinstance(value, dict):
        value = list(cast("dict[str, object]", value).values())
    if isinstance(value, list):
        for part in cast("list[object]", value):
            _check_value(keyword, part)
    elif _is_number(value) and abs(value) >= 2**53 and _kept(_read(value)) != value:
        raise ValueError(_too_large(keyword, value))


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _kept(number: float) -> float:
    low, high = _INT64
    return low if number < low else high if number > high else int(number) if number == number // 1 else number


def _too_large(keyword: str, number: float) -> str:
    return f"{keyword} {str(number)[:40]}: numbers beyond 2^53 are only exact here where float64 and int64 have them"


def _bound_white_space(schema: dict[str, Any]) -> None:
    options: object = schema.get("x-guidance", {})
    if isinstance(options, dict) and not any(str(name).startswith("whitespace") for name in cast("Any", options)):
        schema["x-guidance"] = {**WHITESPACE, **options}


def _choice(given: object) -> str:
    choices = cast("list[object]", given if isinstance(given, list) else [])
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("a choice is a list of strings")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """`grammar`, or `error` with a message for the client."""
    try:
        grammar = translate(request)
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except MemoryError:
        os.abort()  # as llguidance does where it has no memory: what this process has left says nothing any more
    except (ValueError, TypeError, KeyError) as error:
        return {"error": str(error)}
    failed, messages = LLMatcher.validate_grammar_with_warnings(
        grammar, limits=LLParserLimits(**request["limits"], verbose_errors=False)
    )
    return {"error": messages[0]} if failed else {"grammar": grammar}


def serve() -> None:
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])  # its signal ends the process: the default action
        reply = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's; the end of its pipe ends this process
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
