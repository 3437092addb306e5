"""Where a JSON value ends that comes in pieces: strings and brackets are all that is looked at."""

import re

IN_STRING = re.compile(r'["\\]')  # what matters inside a string
_OUTSIDE_STRING = re.compile(r'["{}\[\]<]')


def scan_json(text: str, end: str, depth: int, quoted: bool, *, final: bool) -> tuple[int, int, bool, bool]:  # noqa: FBT001
    """How far a text goes on with a JSON value.

    Args:
        text: begins where the last scan ended, or with the value's opening bracket.
        end: a tag that begins with `<` and ends the value outside a string; may be empty.
        depth: brackets that are open.
        quoted: whether a string is.
        final: whether nothing follows the text.

    Returns:
        Characters that belong to the value for certain, then depth, whether in a string, whether the value is closed.
    """
    at = 0
    while True:
        found = (IN_STRING if quoted else _OUTSIDE_STRING).search(text, at)
        if found is None:
            return len(text), depth, quoted, False
        mark, at = found.group(), found.start()
        if mark == "\\":
            if at + 1 == len(text):
                return at + final, depth, quoted, False
            at += 2
            continue
        if mark == "<" and end:
            rest = text[at : at + len(end)]
            if rest == end or (end.startswith(rest) and not final):
                return at, depth, quoted, False
        elif mark == '"':
            quoted = not quoted
        elif mark != "<":
            depth += 1 if mark in "{[" else -1
        at += 1
        if depth <= 0:
            return at, depth, quoted, True
