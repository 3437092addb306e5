"""`Trace`: what a run did and when, as a file that Perfetto and chrome://tracing open (Trace Event Format, JSON).

    process "engine"     loop      plan, wait, apply    the thread that drives steps
                         rank 0    launch               the thread that queues them, or computes them on a CPU
                         device    step                 on a GPU between two of its events, on a CPU the computing
                         tiers     load, save           blocks on their way from KV tiers, and to them
    process "requests"   queue, prefill, decode of each request, one line each; with the frontend's `trace_parent`

The last `MAX_SPANS` of both kinds are kept in memory; the file is written when the engine closes.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from openinfer_core import GenerateRequest, Refused, RequestId, Scheduled, TokenEvent, Tokens

logger = logging.getLogger("openinfer.engine")

MAX_SPANS = 200_000  # a step has five: at 200 steps a second, more than three minutes
LOOP, DEVICE, TIERS = "loop", "device", "tiers"
_ENGINE, _REQUESTS = 1, 2  # process ids in the file


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time."""

    track: str
    name: str
    begin_s: float
    end_s: float
    details: Mapping[str, int | str]


class Tracer(Protocol):
    """What the engine tells of a run; called from several threads."""

    @property
    def is_on(self) -> bool:
        """Whether spans are kept, for what is dear to find out."""
        ...

    def clock(self) -> float:
        """Monotonic seconds: the clock of all spans."""
        ...

    def span(self, track: str, name: str, **details: int) -> AbstractContextManager[None]:
        """Takes the time of a block of code."""
        ...

    def add(self, span: Span) -> None:
        """Notes a span that was timed elsewhere."""
        ...

    def submitted(self, request: GenerateRequest) -> None:
        """A request has come."""
        ...

    def told(self, events: Iterable[TokenEvent]) -> None:
        """Events that are delivered now."""
        ...

    def close(self) -> None:
        """Writes what there is to write. Idempotent."""
        ...


class NoTrace:
    """Keeps nothing."""

    is_on = False
    _nothing = nullcontext()

    def clock(self) -> float:
        return time.monotonic()

    def span(self, track: str, name: str, **details: int) -> AbstractContextManager[None]:
        del track, name, details
        return self._nothing

    def add(self, span: Span) -> None:
        pass

    def submitted(self, request: GenerateRequest) -> None:
        pass

    def told(self, events: Iterable[TokenEvent]) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _Open:
    """A request on its way; times at which it began its present and its past phases."""

    prompt_tokens: int
    phase: str
    since_s: float
    trace_parent: str | None = None
    output_tokens: int = 0


class Trace:
    """Keeps spans and writes them to a file.

    Args:
        path: of the file; it must be writable, which is found out at once.
        clock: monotonic seconds.
        max_spans: the last so many are kept, of the engine and of requests each.

    Raises:
        OSError: the file cannot be written.
    """

    is_on = True

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic, max_spans: int = MAX_SPANS) -> None:
        path.write_text("")
        self._clock = clock
        self._path = path
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._phases: deque[tuple[RequestId, Span]] = deque(maxlen=max_spans)
        self._open: dict[RequestId, _Open] = {}
        self._is_closed = False

    def clock(self) -> float:
        return self._clock()

    @contextmanager
    def span(self, track: str, name: str, **details: int) -> Generator[None]:
        begin_s = self.clock()
        try:
            yield
        finally:
            self._spans.append(Span(track, name, begin_s, self.clock(), details))

    def add(self, span: Span) -> None:
        self._spans.append(span)

    def submitted(self, request: GenerateRequest) -> None:
        num_tokens, parent = len(request.prompt_token_ids), request.trace_parent
        self._open[request.request_id] = _Open(num_tokens, "queue", self.clock(), parent)

    def told(self, events: Iterable[TokenEvent]) -> None:
        now_s = self.clock()
        for event in events:
            request = self._open.get(event.request_id)
            if request is None:
                continue
            if isinstance(event, Scheduled):
                self._move(event.request_id, request, "prefill", request.since_s + event.queued_s)
            elif isinstance(event, Tokens):
                if event.token_ids and request.phase == "prefill":
                    self._move(event.request_id, request, "decode", now_s)
                request.output_tokens += len(event.token_ids)
            else:
                self._move(event.request_id, request, "", now_s)
                del self._open[event.request_id]

    def _move(self, request_id: RequestId, request: _Open, phase: str, now_s: float) -> None:
        details: dict[str, int | str] = {"prompt_tokens": request.prompt_tokens, "output_tokens": request.output_tokens}
        if request.trace_parent is not None:
            details["trace_parent"] = request.trace_parent
        self._phases.append((request_id, Span("request", request.phase, request.since_s, now_s, details)))
        request.phase, request.since_s = phase, now_s

    def events(self) -> list[dict[str, Any]]:
        """All that is kept, as trace events; times in microseconds."""
        tracks = sorted({span.track for span in self._spans}, key=_order)
        found = [_named("process_name", _ENGINE, 0, "engine"), _named("process_name", _REQUESTS, 0, "requests")]
        found += [_named("thread_name", _ENGINE, index, track) for index, track in enumerate(tracks)]
        for span in self._spans:
            times = {"ts": span.begin_s * 1e6, "dur": (span.end_s - span.begin_s) * 1e6}
            place = {"ph": "X", "pid": _ENGINE, "tid": tracks.index(span.track)}
            found.append({"name": span.name, **place, **times, "args": dict(span.details)})
        for request_id, span in self._phases:
            place = {"cat": "request", "id": str(request_id), "pid": _REQUESTS, "tid": 0, "name": span.name}
            found.append({**place, "ph": "b", "ts": span.begin_s * 1e6, "args": dict(span.details)})
            found.append({**place, "ph": "e", "ts": span.end_s * 1e6})
        return found

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": self.events()}))
            logger.info("%d spans of the run are in %s", len(self._spans) + len(self._phases), self._path)


def open_trace(path: Path) -> Trace:
    """Raises `Refused`: the file cannot be written."""
    try:
        return Trace(path)
    except OSError as error:
        raise Refused(f"--trace {path} cannot be written: {error.strerror}") from error


def _order(track: str) -> tuple[bool, str]:
    return track != LOOP, track


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
