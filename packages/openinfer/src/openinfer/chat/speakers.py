"""Who answers: a model in this process, or a server that speaks OpenAI's protocol."""

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, cast
from urllib.parse import urlsplit

from openinfer.chat.session import Message
from openinfer.llm import LLM
from openinfer_core import InvalidRequest, Refused

_ANSWER_S = 600.0  # between two pieces of an answer: a long prompt may wait and be computed
_DATA = b"data:"
_END = b"[DONE]"
_MOST_LINE_BYTES = 1 << 24


class ModelSpeaker:
    """A model in this process; `sampling` as for `LLM.generate`."""

    def __init__(self, llm: LLM, sampling: Mapping[str, Any]) -> None:
        self._llm = llm
        self._sampling = sampling

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        return self._llm.stream_chat(messages, **self._sampling)


class ServerSpeaker:
    """A server's chat completions, streamed.

    Args:
        url: `http://HOST:PORT`, with `/v1` or without.
        model: what the server calls the model; None asks it.
        api_key: sent as a bearer token.
        sampling: fields of the request.

    Raises:
        InvalidRequest: the URL is none.
        Refused: the server cannot be reached, or has no model.
    """

    def __init__(self, url: str, *, model: str | None, api_key: str | None, sampling: Mapping[str, Any]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or parts.hostname is None:
            raise InvalidRequest(f"--url {url!r} is not of the form http://HOST:PORT", field="url")
        self._url = url
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._sampling = sampling
        self.model = self._first_model() if model is None else model

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        """Raises `Refused` with the server's own words if it refuses or ends early."""
        body = {**self._sampling, "model": self.model, "messages": list(messages), "stream": True}
        try:
            with closing(self._connection()) as connection:
                connection.request("POST", f"{self._path}/chat/completions", json.dumps(body), self._headers)
                response = connection.getresponse()
                if response.status != http.client.OK:
                    raise Refused(f"the server answered {response.status}: {_said(response.read(_MOST_LINE_BYTES))}")
                yield from _contents(response)
        except (OSError, http.client.HTTPException) as error:
            raise Refused(f"the server at {self._url} cannot be reached, or broke off: {error}") from error

    def _first_model(self) -> str:
        try:
            with closing(self._connection()) as connection:
                connection.request("GET", f"{self._path}/models", headers=self._headers)
                response = connection.getresponse()
                content = response.read(_MOST_LINE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise Refused(f"the server at {self._url} cannot be reached: {error}") from error
        if response.status != http.client.OK:
            raise Refused(f"the server at {self._url} answered {response.status}: {_said(content)}")
        try:
            return str(json.loads(content)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise Refused(f"the server at {self._url} lists no model: name one with --served-model") from error

    def _connection(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=_ANSWER_S, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=_ANSWER_S)


def _contents(response: http.client.HTTPResponse) -> Iterator[str]:
    """The texts of a stream of server-sent events; raises `Refused` for an error in it, or if it breaks off."""
    while line := response.readline(_MOST_LINE_BYTES):
        if not line.startswith(_DATA):
            continue
        data = line[len(_DATA) :].strip()
        if data == _END:
            return
        try:
            event: Any = json.loads(data)
        except ValueError as error:
            raise Refused(f"the server sent what is no event: {data[:80]!r}") from error
        if "error" in event:
            raise Refused(f"the server ended the answer: {_said(data)}")
        for choice in event.get("choices") or ():
            delta = cast("Mapping[str, Any]", choice.get("delta") or {})
            yield delta.get("reasoning_content") or ""
            yield delta.get("content") or ""
    raise Refused("the server's answer broke off")


def _said(content: bytes) -> str:
    """What an error's body says, on one line."""
    try:
        said = str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        said = content[:200].decode(errors="replace")
    return " ".join(said.split())
