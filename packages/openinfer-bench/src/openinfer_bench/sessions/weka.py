"""Sessions in the JSON of Weka's KV-cache-tester, in which SemiAnalysis' AgentX corpus is published, too.

A file is one session: `block_size`, `hash_id_scope` and `requests`, in order. A request (`"type": "n"` or `"s"`) has
its time `t` in seconds, `in` and `out` in tokens, and `hash_ids`, one for each block of its prompt; a sub-agent
(`"type": "subagent"`) has requests of its own, and ends before the session's next request unless its status is
`async_launched`. Field by field: AIPerf's documentation of weka traces, read on 2026-11-24.

Requests that overlap in a recording are sent one after the other: which of them another agent sent is not recorded, and
not guessed.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from openinfer_bench.sessions.session import Blocks, Session, Turn, named_apart
from openinfer_core import InvalidRequest

_MAX_TOKENS = 2**24
_MAX_REQUESTS = 100_000
_MAX_DEPTH = 8
_ASYNC = "async_launched"

Tokens = Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class _Call(msgspec.Struct, kw_only=True, tag_field="type"):
    t: Seconds
    num_in: Tokens = msgspec.field(name="in")
    num_out: Tokens = msgspec.field(name="out")
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    api_time: Seconds | None = None
    think_time: Seconds | None = None


class _Whole(_Call, kw_only=True, tag="n"):
    """A request without a stream."""


class _Stream(_Call, kw_only=True, tag="s"):
    """A request with one."""


class _Agent(msgspec.Struct, kw_only=True, tag_field="type", tag="subagent"):
    t: Seconds
    agent_id: str
    status: str = ""
    requests: list["_Whole | _Stream | _Agent"]


class _Trace(msgspec.Struct, kw_only=True):
    id: str
    block_size: Annotated[int, msgspec.Meta(gt=0, le=_MAX_TOKENS)]
    hash_id_scope: Literal["local", "global"]
    requests: list[_Whole | _Stream | _Agent]


def read_weka(data: bytes, taken: set[str]) -> Session:
    """The session of one file.

    Args:
        data: the file.
        taken: names of other sessions; its own, and those of its sub-agents, are added.

    Raises:
        InvalidRequest: it does not have the format, or a sub-agent comes before the first request.
    """
    try:
        trace = msgspec.json.decode(data, type=_Trace)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"not a session of the Weka format: {error}", field="trace") from None
    trace.id = named_apart(trace.id, taken)
    return Session(name=trace.id, scope=_scope(trace), turns=_turns(trace.requests, trace, taken, depth=0))


def _scope(trace: _Trace) -> str:
    return "" if trace.hash_id_scope == "global" else trace.id


def _turns(
    requests: Sequence[_Whole | _Stream | _Agent], trace: _Trace, taken: set[str], *, depth: int
) -> tuple[Turn, ...]:
    if depth > _MAX_DEPTH or len(requests) > _MAX_REQUESTS:
        raise InvalidRequest(f"{trace.id}: more than {_MAX_REQUESTS:,} requests or {_MAX_DEPTH} levels", field="trace")
    turns: list[Turn] = []
    before: _Call | None = None
    for request in requests:
        if isinstance(request, _Agent):
            if not turns:
                raise InvalidRequest(f"{trace.id}: sub-agent {request.agent_id} begins before a request", field="trace")
            agent = Session(
                name=named_apart(f"{trace.id}/{request.agent_id}", taken),
                scope=_scope(trace),
                turns=_turns(request.requests, trace, taken, depth=depth + 1),
                is_background=request.status == _ASYNC,
            )
            turns[-1] = msgspec.structs.replace(turns[-1], agents=(*turns[-1].agents, agent))
            continue
        prompt = Blocks(names=tuple(request.hash_ids), block_tokens=trace.block_size, num_tokens=max(1, request.num_in))
        wait_s = _wait_s(before, request, joins=bool(turns and turns[-1].agents))
        turns.append(Turn(prompt=prompt, output_tokens=max(1, request.num_out), wait_s=wait_s))
        before = request
    return tuple(turns)


def _wait_s(before: _Call | None, request: _Call, *, joins: bool) -> float:
    """What the client waited, as recorded; else the time since the end of the request before.

    After sub-agents only a recorded wait counts: the rest of the gap was theirs, and is played.
    """
    if before is None:
        return 0.0
    if request.think_time is not None:
        return request.think_time
    return 0.0 if joins else max(0.0, request.t - before.t - (before.api_time or 0.0))
