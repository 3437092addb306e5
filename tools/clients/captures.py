"""What clients asked, as the server's replay tests have it: every kind of request once, without texts, paths and ids.

Texts of clients are theirs, and what counts here is the form: a text is replaced by "(text)". Identities are numbered
in the order in which they come, so that capturing again changes nothing where the client has not changed.
Lists of tools, which agents send with every request, are kept once: a request has the number of its list.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .proxy import Exchange
from .table import FOLDER, Client

CAPTURES = FOLDER.parents[1] / "packages" / "openinfer-server" / "tests" / "clients" / "captures"
KEPT_HEADERS = ("anthropic-beta", "anthropic-version")
MAX_TEXT = 80  # of what may be a name or a value
_MAX_PROSE = 24
_PROSE = ("description", "text", "content", "instructions", "output")
_OURS = re.compile(r"\[openinfer:\w+\]|is sunny")
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=_)[0-9a-f]{16,}|\b[0-9a-f]{32,}")
_PATH = re.compile(r"(?:/[\w.@+-]+){2,}/?")
_NAMED = ("type", "$ref", "$schema", "model")  # what these say is part of the form


class Scrubber:
    """Takes out of requests what is their client's or this machine's own."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def scrub(self, value: Any, name: str = "") -> Any:
        if isinstance(value, Mapping):
            return {self._text(key, ""): self.scrub(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [self.scrub(each, name) for each in value]
        return self._text(value, name) if isinstance(value, str) else value

    def _text(self, text: str, name: str) -> str:
        if name in _NAMED:
            return text
        text = _ID.sub(self._numbered, _PATH.sub("/a/path", text))
        limit = _MAX_PROSE if name in _PROSE and not _OURS.search(text) else MAX_TEXT
        return text if len(text) <= limit else "(text)"

    def _numbered(self, found: re.Match[str]) -> str:
        return self._ids.setdefault(found.group(0), f"{len(self._ids) + 1:032x}")


def form(value: Any) -> Any:
    """Return what two requests have in common whose values alone differ."""
    if isinstance(value, Mapping):
        return {key: form(each) if key not in _NAMED else each for key, each in value.items()}
    if isinstance(value, list):
        return [form(each) for each in value]
    return type(value).__name__


def captured(client: Client, exchanges: Iterable[Exchange]) -> dict[str, Any]:
    """Return one of each kind of request that was answered; those that go on with a stored response are left out."""
    scrubber = Scrubber()
    requests: dict[str, Any] = {}
    tools: dict[str, Any] = {}
    for each in exchanges:
        if each.status != 200 or not isinstance(each.body, Mapping) or each.body.get("previous_response_id"):
            continue
        path = each.path.partition("?")[0]
        body = scrubber.scrub(each.body)
        kind = json.dumps([path, form(body)])
        if "tools" in body:
            tools.setdefault(json.dumps(body["tools"]), body["tools"])
            body["tools"] = list(tools).index(json.dumps(body["tools"]))
        headers = {name: each.headers[name] for name in KEPT_HEADERS if name in each.headers}
        requests.setdefault(kind, {"path": path, "headers": headers, "body": body})
    return {
        "client": client.name,
        "version": client.version,
        "tools": list(tools.values()),
        "requests": list(requests.values()),
    }


def write(client: Client, exchanges: Iterable[Exchange], folder: Path = CAPTURES) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{client.name}.json").write_text(as_text(captured(client, exchanges)), encoding="utf-8")


def as_text(capture: Mapping[str, Any]) -> str:
    """Return JSON with one request and one tool a line."""
    tools = ",\n".join("[\n" + ",\n".join(map(_line, each)) + "\n]" for each in capture["tools"])
    requests = ",\n".join(map(_line, capture["requests"]))
    head = f'{{"client": {_line(capture["client"])}, "version": {_line(capture["version"])}'
    return f'{head},\n"tools": [{tools}],\n"requests": [\n{requests}\n]}}\n'


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
