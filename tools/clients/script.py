"""What the scripted model says: an answer for each scenario, read off the prompt.

A scenario's question has its marker, `[openinfer:tools]`, so that whatever a client puts around the question, and
whatever else it asks for on the side (titles, summaries), the answer is certain. The tool loop calls `get_weather` for
one city after the other, as long as there are fewer results in the prompt than cities.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from openinfer_core.request import GenerateRequest

CITIES = ("Paris", "Rome", "Oslo")
TOOL = "get_weather"
REPORT_TOOL = "StructuredOutput"  # Claude Code's
PLAIN = "The capital of France is Paris."
REPORT = {"city": "Paris", "degrees": 21}
SIDE = "Fine."
ENDLESS = "and on "
_THOUGHT = "<think>\nI know what to say.\n</think>\n\n"
_MARKER = re.compile(r"\[openinfer:(\w+)\]")
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_OFFERED = re.compile(r'\{"type": "function", "function": \{"name": "([^"]+)"')


class Script:
    """Says the token ids of each request's answer; see `ScriptedLoop`."""

    def __init__(self, tokenizer: Tokenizer, stop_token_id: int) -> None:
        self._tokenizer = tokenizer
        self._stop_token_id = stop_token_id

    def __call__(self, request: GenerateRequest) -> Sequence[int]:
        prompt = self._tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)
        text, ends = answer(prompt, constrained=request.sampling.grammar is not None)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return (*ids, self._stop_token_id) if ends else ids


def answer(prompt: str, *, constrained: bool) -> tuple[str, bool]:
    """Return what follows a prompt, and whether it ends."""
    markers = list(_MARKER.finditer(prompt))
    since = prompt[markers[-1].end() :] if markers else ""
    thought = "" if prompt.endswith("</think>\n\n") else _THOUGHT
    match markers[-1].group(1) if markers else None:
        case "abort":
            return thought + ENDLESS, False
        case "plain" | "stream":
            return thought + PLAIN, True
        case "schema":
            return thought + (json.dumps(REPORT) if constrained else report_turn(prompt, since)), True
        case "tools":
            return thought + tool_turn(prompt, since), True
        case _:
            return thought + SIDE, True


def tool_turn(prompt: str, since: str) -> str:
    """Return the next call, or the sum of the results."""
    results = _RESULT.findall(since)
    if len(results) < len(CITIES):
        return call(tool_on_offer(prompt), {"city": CITIES[len(results)]})
    return f"The weather: {'; '.join(_first_text(result) for result in results)}."


def report_turn(prompt: str, since: str) -> str:
    """Return a call of the tool that some clients have instead of a schema, once."""
    is_offered = REPORT_TOOL in _OFFERED.findall(prompt)
    return call(REPORT_TOOL, REPORT) if is_offered and not _RESULT.search(since) else PLAIN


def tool_on_offer(prompt: str) -> str:
    """Return the name under which the client offers the tool: clients put a server's name before it."""
    names = _OFFERED.findall(prompt)
    return next((name for name in names if name.endswith(TOOL)), TOOL)


def call(name: str, arguments: Mapping[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def _first_text(result: str) -> str:
    found = re.search(r"\w+ is sunny", result)
    return found.group(0) if found else result.strip()
