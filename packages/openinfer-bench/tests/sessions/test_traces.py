"""Recorded sessions: both formats, what they become, and what is refused."""

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from openinfer_bench.sessions.session import Blocks, Grow, Session, Turn, within
from openinfer_bench.sessions.traces import read_sessions
from openinfer_core import InvalidRequest

WEKA = {
    "id": "trace_0001",
    "models": ["opus"],
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 12,
    "system_tokens": 3,
    "requests": [
        {"t": 0.0, "type": "n", "model": "opus", "in": 130, "out": 20, "hash_ids": [1, 2, 3], "api_time": 2.0},
        {
            "t": 3.0,
            "type": "subagent",
            "agent_id": "a1",
            "subagent_type": "Explore",
            "status": "completed",
            "models": ["haiku"],
            "requests": [
                {"t": 3.0, "type": "s", "model": "haiku", "in": 64, "out": 5, "hash_ids": [9], "ttft": 0.2},
                {"t": 9.0, "type": "s", "model": "haiku", "in": 128, "out": 5, "hash_ids": [9, 10], "think_time": 1.5},
            ],
        },
        {
            "t": 3.5,
            "type": "subagent",
            "agent_id": "a2",
            "subagent_type": "Plan",
            "status": "async_launched",
            "models": ["haiku"],
            "requests": [{"t": 4.0, "type": "n", "model": "haiku", "in": 10, "out": 0, "hash_ids": []}],
        },
        {"t": 20.0, "type": "s", "model": "opus", "in": 192, "out": 9, "hash_ids": [1, 2, 4]},
        {"t": 31.0, "type": "s", "model": "opus", "in": 200, "out": 9, "hash_ids": [1, 2, 4, 5], "api_time": 1.0},
    ],
    "totals": {"anything": 1},
}

ROUND = {
    "provider": "claude",
    "model": "opus",
    "tools": [],
    "newly_append_tokens": 7,
    "reasoning_output_tokens": 0,
}


def rounds() -> list[dict[str, object]]:
    def events(begin: str, end: str) -> list[dict[str, str]]:
        kinds = [("tool_result", begin), ("text", end), ("tool_call", end)]
        return [{"event_type": kind, "timestamp": f"2026-05-01T10:00:{when}Z"} for kind, when in kinds]

    sizes = {"input_tokens_total": 1000, "prefix_tokens": 400, "output_tokens": 50}
    return [
        {**ROUND, **sizes, "session_id": "claude:b", "round_index": 0, "timing_events": events("01", "04")},
        {**ROUND, "session_id": "claude:a", "round_index": 1, "input_tokens_total": 500, "prefix_tokens": 500}
        | {"output_tokens": 0, "timing_events": [{"event_type": "text", "timestamp": None}]},
        {**ROUND, "session_id": "claude:b", "round_index": 1, "input_tokens_total": 1300, "prefix_tokens": 1050}
        | {"output_tokens": 60, "timing_events": events("06.5", "09")},
        {**ROUND, **sizes, "session_id": "claude:a", "round_index": 0},
    ]


def test_weka(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(WEKA))
    (session,) = read_sessions(tmp_path)
    assert (session.name, session.scope, session.num_turns) == ("trace_0001", "trace_0001", 6)
    assert [turn.wait_s for turn in session.turns] == [0.0, 0.0, 11.0]
    assert session.turns[0].prompt == Blocks(names=(1, 2, 3), block_tokens=64, num_tokens=130)
    one, two = session.turns[0].agents
    assert [turn.wait_s for turn in one.turns] == [0.0, 1.5]
    assert (one.is_background, two.is_background) == (False, True)
    assert two.turns[0].output_tokens == 1  # a server generates something
    assert one.scope == session.scope


def test_blocks_of_a_global_scope_are_shared_by_sessions(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl.gz"
    lines = [json.dumps(WEKA | {"id": name, "hash_id_scope": "global"}) for name in ("one", "two")]
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert [session.scope for session in read_sessions(file)] == ["", ""]


def test_tracelab(tmp_path: Path) -> None:
    file = tmp_path / "slice.jsonl"
    file.write_text("\n".join(map(json.dumps, rounds())))
    b, a = read_sessions(file)
    assert (b.name, a.name) == ("claude:b", "claude:a")
    assert [turn.prompt for turn in b.turns] == [
        Grow(keep_tokens=0, new_tokens=1000),  # what the provider had cached was never said here
        Grow(keep_tokens=1050, new_tokens=250),
    ]
    assert [turn.wait_s for turn in b.turns] == [0.0, 2.5]
    assert a.turns[1].prompt == Grow(keep_tokens=499, new_tokens=1)  # the last token is always computed


def test_what_a_server_cannot_take_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(WEKA))
    (session,) = read_sessions(tmp_path)
    cut = within(session, max_tokens=150, max_wait_s=0.5)
    assert [len(turn.agents) for turn in cut.turns] == [2]
    assert [turn.wait_s for turn in cut.turns[0].agents[0].turns] == [0.0, 0.5]
    assert not within(session, max_tokens=149, max_wait_s=1).turns
    assert len(within(session, max_tokens=1000, max_wait_s=1, max_turns=1).turns[0].agents[0].turns) == 1
    grown = Session(name="s", turns=(Turn(prompt=Grow(keep_tokens=90, new_tokens=10), output_tokens=1),))
    assert within(grown, max_tokens=101, max_wait_s=1).turns
    assert not within(grown, max_tokens=100, max_wait_s=1).turns


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not a session"),
        (json.dumps(WEKA | {"hash_id_scope": "other"}), "not a session"),
        (json.dumps(WEKA | {"block_size": 0}), "not a session"),
        (json.dumps(WEKA | {"requests": WEKA["requests"][1:]}), "begins before a request"),
        (json.dumps(WEKA).replace('"in": 130', '"in": -1'), "not a session"),
        (json.dumps(WEKA).replace('"in": 130', '"in": 1e99'), "not a session"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace.json"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        read_sessions(file)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "slice.jsonl"
    file.write_text("\n".join([json.dumps(rounds()[0]), "", '{"round_index": 1}']))
    with pytest.raises(InvalidRequest, match="line 3 is no round"):
        read_sessions(file)
    with pytest.raises(InvalidRequest, match="there is no trace"):
        read_sessions(tmp_path / "other.jsonl")
    file.write_text("\n".join(["", json.dumps(WEKA), json.dumps(WEKA | {"id": 1})]))
    with pytest.raises(InvalidRequest, match=r"slice.jsonl: line 3: not a session"):
        read_sessions(tmp_path)


WHOLE = gzip.compress(json.dumps(WEKA).encode())


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("trace.json.gz", json.dumps(WEKA).encode(), "cannot be read: Not a gzipped file"),
        ("trace.json.gz", WHOLE[:-20], "cannot be read: Compressed file ended"),
        ("trace.json.gz", WHOLE[:-8] + bytes(8), "cannot be read: CRC check failed"),
        ("trace.json.gz", WHOLE[:60] + b"\xff" * 60 + WHOLE[120:], "cannot be read"),
        ("trace.json", json.dumps(WEKA).encode().replace(b"trace_0001", b"\xff"), "not a session"),
        ("trace.json", b'{"other":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not a session"),
        ("trace.jsonl", json.dumps(rounds()[0]).encode().replace(b"claude:b", b"\xff"), "line 1 is no round"),
        ("trace.jsonl", b"\n\n", "there is no session in"),
        ("other.txt", b"", "there is no session in"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InvalidRequest, match=message) as raised:
        read_sessions(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_sessions_of_one_name_are_told_apart(tmp_path: Path) -> None:
    again = [WEKA["requests"][0], WEKA["requests"][1], WEKA["requests"][1]]  # a sub-agent that is asked twice
    (tmp_path / "a.json").write_text(json.dumps(WEKA))
    (tmp_path / "b.json").write_text(json.dumps(WEKA | {"requests": again}))
    one, two = read_sessions(tmp_path)
    assert (one.name, one.scope, two.name, two.scope) == ("trace_0001",) * 2 + ("trace_0001#2",) * 2
    agents = two.turns[0].agents
    assert [agent.name for agent in agents] == ["trace_0001#2/a1", "trace_0001#2/a1#2"]
    assert {agent.scope for agent in agents} == {two.scope}
    for name in ("c.jsonl", "d.jsonl"):
        (tmp_path / name).write_text(json.dumps(rounds()[0]))
    assert [session.name for session in read_sessions(tmp_path)][2:] == ["claude:b", "claude:b#2"]


def test_times_with_and_without_a_zone_are_compared_as_utc(tmp_path: Path) -> None:
    file = tmp_path / "slice.jsonl"
    first, second = (each for each in rounds() if each["session_id"] == "claude:b")
    file.write_text("\n".join([json.dumps(first).replace("Z", ""), json.dumps(second)]))
    (session,) = read_sessions(file)
    assert [turn.wait_s for turn in session.turns] == [0.0, 2.5]


def test_nested_agents_have_a_bound(tmp_path: Path) -> None:
    inner = WEKA["requests"][:1]
    for _ in range(20):
        inner = [WEKA["requests"][0], {"t": 0, "type": "subagent", "agent_id": "x", "requests": inner}]
    file = tmp_path / "trace.json"
    file.write_bytes(msgspec.json.encode(WEKA | {"requests": inner}))
    with pytest.raises(InvalidRequest, match="levels"):
        read_sessions(file)
