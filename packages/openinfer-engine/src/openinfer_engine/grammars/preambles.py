"""Lark for what comes before the constrained part of an output."""

import re

from llguidance import LLTokenizer

from openinfer_core import Preamble

_SPACES = r"SPACES: /[ \n]*/"


def head_of(preamble: Preamble | None, tokenizer: LLTokenizer) -> str | None:
    """Lark that begins with a preamble and goes on with `@body`; None if there is no preamble.

    An end that is one token of the vocabulary is that token: its text in other tokens is not the model's way to write
    it. White space after the preamble belongs to it.
    """
    if preamble is None:
        return None
    rules = [_SPACES]
    free = _free_up_to(preamble.closing, tokenizer, rules)
    if preamble.opening is None:
        start = f"start: {free} SPACES @body"
    else:
        start = f"start: ({_literal(preamble.opening, tokenizer)} {free} SPACES)? @body"
    return "\n".join([start, *rules])


def _free_up_to(closing: str, tokenizer: LLTokenizer, rules: list[str]) -> str:
    token_id = _token_id(closing, tokenizer)
    if token_id is None:
        text = re.escape(closing).replace("/", r"\/")
        rules.append(f"free[lazy]: /(.|\\n)*{text}/")
        return "free"
    rules.append(r"FREE: /(.|\n)*/")
    return f"FREE <[{token_id}]>"


def _literal(text: str, tokenizer: LLTokenizer) -> str:
    token_id = _token_id(text, tokenizer)
    if token_id is not None:
        return f"<[{token_id}]>"
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _token_id(text: str, tokenizer: LLTokenizer) -> int | None:
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return token_ids[0] if len(token_ids) == 1 else None
