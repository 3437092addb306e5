"""Routing by prefix keeps what one pool finds, and no replica has much more to do than the others."""

import json
from pathlib import Path

import pytest

from openinfer_bench.routing import Outcome, compare, run
from openinfer_bench.sessions.generate import Shape

SHAPE = Shape(sessions=24, turns=10, first_tokens=800, new_tokens=300, output_tokens=60)


def by_way(outcomes: list[Outcome], replicas: int) -> dict[str, Outcome]:
    return {each.way: each for each in outcomes if each.replicas == replicas}


@pytest.mark.parametrize("hot_tokens", [0, 640])
@pytest.mark.parametrize("seed", [0, 1])
def test_prefix_routing_finds_what_one_pool_finds_and_spreads_the_work(hot_tokens: int, seed: int) -> None:
    outcomes = compare(SHAPE, replicas=(2, 4), seed=seed, hot_tokens=hot_tokens, blocks_per_session=250)
    for replicas in (2, 4):
        found = by_way(outcomes, replicas)
        for way in ("prefix", "kv events"):
            assert found[way].of_one_pool >= 0.9
            assert found[way].busiest <= 1.5
        # What has no idea of prefixes fails the first, so the comparison says something.
        assert found["random"].of_one_pool < 0.9
        assert found["round robin"].of_one_pool < 0.9


@pytest.mark.parametrize("hot_tokens", [0, 640])
def test_several_servers_find_each_other_s_conversations_by_kv_events_alone(hot_tokens: int) -> None:
    outcomes = compare(SHAPE, replicas=(2, 4), seed=0, hot_tokens=hot_tokens, blocks_per_session=250, servers=3)
    for replicas in (2, 4):
        found = by_way(outcomes, replicas)
        assert found["kv events"].of_one_pool >= 0.9
        assert found["kv events"].busiest <= 1.5
        assert found["prefix"].of_one_pool < found["kv events"].of_one_pool
    assert by_way(outcomes, 4)["prefix"].of_one_pool < 0.9


def test_two_runs_agree() -> None:
    assert compare(SHAPE, replicas=(2,), seed=3) == compare(SHAPE, replicas=(2,), seed=3)


def test_command_writes_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "routing.json"
    assert run(["--sessions", "4", "--replicas", "2", "--json", str(path)]) == 0
    assert capsys.readouterr().out.count("2 replicas") == 16
    assert set(json.loads(path.read_text())["outcomes"]) == {"no common prefix", "hot prefix of 1600 tokens"}
