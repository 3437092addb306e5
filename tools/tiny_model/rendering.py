"""Render chats with the checkpoint's own template, as `transformers` and the openinfer server do."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")

Message = dict[str, Any]
Tool = dict[str, Any]


@cache
def template() -> Template:
    """Compile the chat template; `tojson` is plain JSON, without HTML escapes."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE_FILE.read_text())


def prompt(messages: list[Message], *, tools: list[Tool] | None = None, thinking: bool) -> str:
    """Return the text of `messages` up to and with the generation prompt."""
    return template().render(messages=messages, tools=tools, add_generation_prompt=True, enable_thinking=thinking)
