"""A soak of seconds from start to end, and what it makes of samples and of lost answers."""

import asyncio
import json
import random

from openinfer_bench import soak
from openinfer_bench.http_client import Address
from openinfer_bench.soak import mean_of_sixth
from openinfer_bench.soak.observation import Observation
from openinfer_bench.soak.traffic import Traffic


def observation(mib: float) -> Observation:
    return Observation(at_s=0.0, proportional_mib=mib, anonymous_mib={}, descriptors={}, segments=0)


def test_sixths_of_an_hour_are_minutes_10_to_20_and_the_last_ten():
    samples = [observation(float(minute)) for minute in range(60)]
    assert mean_of_sixth(samples, 1) == sum(range(10, 20)) / 10
    assert mean_of_sixth(samples, 5) == sum(range(50, 60)) / 10


def test_lost_answers_are_foreseen_while_a_worker_was_killed_and_at_no_other_time():
    async def lose() -> Traffic:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            traffic = Traffic(Address(*server.sockets[0].getsockname()), random.Random(0), {"plain": 1})
            await traffic.one("plain")
        return traffic

    traffic = asyncio.run(lose())
    assert traffic.counts["plain"] == {"lost": 1}
    (strange,) = traffic.strange
    assert traffic.unforeseen([strange.begin_s - 1.0]) == []
    assert traffic.unforeseen([strange.begin_s - 60.0]) == ["plain lost "]
    assert traffic.unforeseen([]) == ["plain lost "]


def test_soak_answers_everything_and_leaves_no_descriptor(tmp_path, capsys):
    file = tmp_path / "soak.json"
    soak.run(["--seconds", "4", "--rate", "8", "--kill-every-s", "1.5", "--json", str(file)])
    report = json.loads(file.read_text())
    assert report["unforeseen"] == []
    assert report["descriptors"]["after"] == report["descriptors"]["before"]
    assert report["kills"]["guards"] >= 1
    assert set(report["answers"]) == set(soak.KINDS)
    assert "memory" in capsys.readouterr().out
