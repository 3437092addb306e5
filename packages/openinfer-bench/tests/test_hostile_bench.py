"""Victims' figures and the verdict on them; one attack from start to end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from openinfer_bench import hostile
from openinfer_bench.hostile.arms import FULL, Row, ServerLog, Size, failures, wait_until_quiet
from openinfer_bench.hostile.attacks import ATTACKS, HONEST, run_attack
from openinfer_bench.hostile.connection import Connection
from openinfer_bench.hostile.framing import forged_turn
from openinfer_bench.hostile.guard_killer import GuardKiller, is_guard, works
from openinfer_bench.hostile.lanes import in_lanes
from openinfer_bench.hostile.victims import Seen
from openinfer_bench.http_client import HANG, Address, Answer

ROW = Row(
    attack="flood",
    about="",
    admitted=3.0,
    requests=1000,
    gaps=21_000,
    requests_honest=2000,
    gaps_honest=42_000,
    ttft_p50_ms=10.0,
    ttft_p50_honest_ms=10.0,
    ttft_p99_ms=100.0,
    ttft_p99_honest_ms=50.0,
    itl_p99_ms=24.0,
    itl_p99_honest_ms=4.0,
    statuses={"200": 999, "cut": 1},
    statuses_honest={"200": 2000},
    health_s=1.0,
    health_honest_s=0.1,
    idle_mib=200.0,
    peak_mib=1024.0,
    allowed_mib=1024.0,
    log_kib=1024.0,
    outcomes={"200": 5, "429": 90},
    failures=[],
)


def test_row_at_its_bounds_passes():
    assert failures(ROW, FULL, has_ended=False) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"ttft_p99_ms": 101.0}, "TTFT"),
        ({"itl_p99_ms": 24.1}, "ITL"),
        ({"statuses": {"200": 999, "503": 1}}, "victims got"),
        ({"statuses": {"200": 999, "lost": 1}}, "victims got"),
        ({"requests": 999}, "999 requests, 21000 gaps"),
        ({"gaps": 19_999}, "1000 requests, 19999 gaps"),
        ({"requests_honest": 1999}, "1999 requests, 42000 gaps in two arms"),
        ({"gaps_honest": 39_999}, "2000 requests, 39999 gaps in two arms"),
        ({"health_s": 1.1}, "health"),
        ({"peak_mib": 1025.0}, "memory"),
        ({"log_kib": 1025.0}, "1025 KiB of log"),
        ({"outcomes": {"500": 1}}, "attackers got {'500': 1}"),
    ],
)
def test_row_beyond_a_bound_says_which(change, told):
    (failure,) = failures(replace(ROW, **change), FULL, has_ended=False)
    assert failure.startswith(told)


def test_end_of_the_server_fails():
    assert failures(ROW, FULL, has_ended=True) == ["the server ended"]


def test_what_never_came_counts_with_the_time_that_it_was_waited_for():
    seen = Seen()
    seen.add(Answer(begin_s=10.0, status=200, event_s=[11.0, 13.0], end_s=99.0))
    seen.add(Answer(begin_s=10.0, status=HANG, end_s=40.0))
    seen.add(Answer(begin_s=10.0, status=HANG, event_s=[12.0], end_s=40.0))
    seen.add(Answer(begin_s=10.0, status=429, end_s=10.5))
    assert seen.ttft_s == [1.0, 30.0, 2.0, 0.5]
    assert seen.gaps_s == [2.0, 28.0]
    assert seen.statuses == {"200": 1, "cut": 2, "429": 1}


def test_requests_under_way_at_the_end_are_admitted_and_silent_connections_are_none():
    """Of a server that takes everything and answers nothing."""

    async def attack(name: str):
        read = asyncio.Semaphore(0)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            read.release()
            await reader.read()
            writer.close()

        async def until() -> None:
            for _ in range(3):
                await read.acquire()
            await asyncio.sleep(0.05)  # in which those that send something have sent it

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await run_attack(name, Address(*server.sockets[0].getsockname()), until(), count=3, concurrency=3)

    honest, idle = asyncio.run(attack(HONEST)), asyncio.run(attack("idle"))
    assert 0 < honest.admitted <= 3
    assert (idle.admitted, idle.outcomes) == (0, {})


def outcome_of_half_closed(answer: bytes) -> dict[str, int]:
    """Of a server that answers so when the client has ended its side."""

    async def attack():
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            address = Address(*server.sockets[0].getsockname())
            return await run_attack("half-closed", address, asyncio.sleep(60), count=1, concurrency=1)

    return dict(asyncio.run(attack()).outcomes)


def outcome_of_forged_turn(ids: list[int]) -> str:
    """Of a server that encodes chats so."""

    async def attack() -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
            writer.write(json.dumps({"tokens": ids}).encode())
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            connection = Connection(reader, writer)
            try:
                return await forged_turn(connection)
            finally:
                await connection.close()

    return asyncio.run(attack())


def test_text_that_becomes_turns_is_not_foreseen():
    assert outcome_of_forged_turn([2032, 5, 2033, 2032]) == "200"
    assert outcome_of_forged_turn([2032, 5] * 51) == "forged"
    assert "forged" not in ATTACKS["control-texts"].outcomes


@pytest.mark.parametrize("name", ["two-lengths", "regexes", "many-choices"])
def test_server_that_takes_what_12aa384_refused_fails(name: str):
    """A planted fault, since that server withstood these three: one that answers whatever comes with 200."""

    async def attack() -> dict[str, int]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            address = Address(*server.sockets[0].getsockname())
            return dict((await run_attack(name, address, asyncio.sleep(60), count=1, concurrency=1)).outcomes)

    outcomes = asyncio.run(attack())
    assert outcomes == {"200": 1}
    row = replace(ROW, attack=name, outcomes=outcomes)
    assert failures(row, FULL, has_ended=False) == ["attackers got {'200': 1}"]


def test_log_of_a_server_is_measured_and_its_beginning_shown(tmp_path, capsys):
    with ServerLog(tmp_path / "log") as log:
        assert log.num_bytes == 0
        log.file.write(b"a line\n" * 5000)
        log.file.flush()
        assert log.num_bytes == 35_000
    told = capsys.readouterr().err
    assert told.startswith("a line\n")
    assert told.endswith("... 35000 bytes of log in all\n")
    assert len(told) < 20_000


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\ndata: [DONE]\n\n", "200"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\ndata: {}\n\ndata: [DONE]\n\n", "200"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n", "cut"),
        (b"", "closed"),
    ],
)
def test_half_closed_connection_without_its_whole_answer_is_not_foreseen(answer: bytes, outcome: str):
    assert outcome_of_half_closed(answer) == {outcome: 1}
    assert (outcome in ATTACKS["half-closed"].outcomes) == (outcome == "200")


def test_an_arm_begins_when_nothing_is_left_of_the_one_before():
    read: list[float] = []

    def processor_s() -> float:  # works for ten looks, then rests
        read.append(0.01 * min(len(read), 10))
        return read[-1]

    asyncio.run(wait_until_quiet(processor_s, period_s=0.01, most_s=60))
    assert len(read) == 12


def test_a_server_that_never_rests_is_measured_all_the_same():
    read: list[float] = []

    def processor_s() -> float:
        read.append(float(len(read)))
        return read[-1]

    asyncio.run(wait_until_quiet(processor_s, period_s=0.01, most_s=0.2))
    assert len(read) == 20


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which process works")
def test_the_guard_is_killed_while_it_works_and_no_other_process_is(tmp_path):
    program = tmp_path / "guard_process.py"
    program.write_text("while True: pass")
    other = tmp_path / "other.py"
    other.write_text("while True: pass")
    (tmp_path / "spare").mkdir()
    spare_program = tmp_path / "spare" / "guard_process.py"
    spare_program.write_text("import sys; print('ready', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, str(spare_program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as spare:
        assert spare.stdout is not None
        spare.stdout.readline()
        while works(spare.pid):
            pass  # it has said so, and is about to wait
        with (
            subprocess.Popen([sys.executable, str(program)]) as guard,
            subprocess.Popen([sys.executable, str(other)]) as bystander,
            GuardKiller(os.getpid()) as killer,
        ):
            assert guard.wait(60) == -signal.SIGKILL
            assert not is_guard(bystander.pid)
            assert (bystander.poll(), spare.poll()) == (None, None)
            bystander.kill()
        assert killer.num_killed == 1
        spare.communicate()


def test_every_attack_says_what_it_is():
    assert all(attack.about and attack.outcomes for attack in ATTACKS.values())


def test_attack_is_measured_from_start_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hostile, "QUICK", Size(about="a test", requests=6, gaps=6, trial_s=0.2, deadline_s=60.0))
    file = tmp_path / "rows.json"
    hostile.run(["--quick", "--attack", "many-choices", "--json", str(file)])
    (row,) = json.loads(file.read_text())["rows"]
    assert row["statuses"] == {"200": 6}
    assert row["requests_honest"] == 12
    assert set(row["outcomes"]) <= {"400", "429", "503"}
    assert row["gaps"] >= 6
    assert row["peak_mib"] > 0
    assert 0 <= row["log_kib"] < 1024
    assert row["idle_mib"] < row["allowed_mib"] <= 1024
    assert "1 attacks" in capsys.readouterr().out


def test_each_lane_has_processors_of_its_own():
    usable = os.sched_getaffinity(0)
    kept = [result() for _, result in in_lanes(os.sched_getaffinity, [0, 0, 0], processors=1)]
    assert [len(each) for each in kept] == [1, 1, 1]
    assert set().union(*kept) <= usable
    (untouched,) = [result() for _, result in in_lanes(os.sched_getaffinity, [0], processors=0)]
    assert untouched == usable


def test_what_a_lane_raises_is_raised_where_its_result_is_asked_for():
    results = dict(in_lanes(os.sched_getaffinity, [0, 2**30], processors=1))
    assert results[0]()
    with pytest.raises(ProcessLookupError):
        results[2**30]()
