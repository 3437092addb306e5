"""The rank host `ray` without Ray: what it asks for, what it refuses, and the ends of its ranks."""

import contextlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openinfer_core import InvalidRequest, Refused, find_plugin
from openinfer_engine.ranks.contract import RankSpec
from openinfer_engine.ranks.placement import RankPlace
from openinfer_engine.testing import check_rank_host
from openinfer_ray.bundles import Bundle, replicas_on
from openinfer_ray.model_paths import VARIABLE, path_here
from openinfer_ray.ranks.host import RayRankHost, open_on_ray
from openinfer_ray.ranks.setting import RaySetting
from openinfer_ray.shares import choose_shares

FAKE = Path(__file__).parent / "fake_placer.py"
SETTING = RaySetting(address="auto", shares=(1,), wait_s=600)
GIVE_UP_S = 600  # of what the host should end at once
TWO_RANKS = RankSpec(num_ranks=2, on_gpu=False)

linux = pytest.mark.skipif(sys.platform != "linux", reason="ranks on Ray need Linux")


def host(way: str, *signs: str, setting: RaySetting = SETTING) -> RayRankHost:
    return RayRankHost(setting, placer=(sys.executable, str(FAKE), way, *signs))


@contextlib.contextmanager
def closing(opened: RayRankHost) -> Iterator[RayRankHost]:
    try:
        yield opened
    finally:
        opened.close()


def test_the_host_is_found_by_its_name() -> None:
    assert find_plugin("openinfer.rank_hosts", "ray").load() is open_on_ray


def test_a_setting_is_read_as_it_is_written() -> None:
    setting = RaySetting.parse("10.0.0.1:6379,ranks-per-node=8,cpus=4,wait-s=30,group=0a1b")
    assert setting == RaySetting(address="10.0.0.1:6379", shares=(8,), cpus=4, wait_s=30, group="0a1b")
    assert RaySetting.parse(setting.text) == setting
    unequal = RaySetting(address="auto", shares=(2, 1), model="/a folder/with,every=thing/100%")
    assert RaySetting.parse(unequal.text) == unequal
    assert RaySetting.parse(SETTING.text) == SETTING


@pytest.mark.parametrize(
    "text",
    [
        "",
        "auto",
        "local,ranks-per-node=1",
        "ray://10.0.0.1:10001,ranks-per-node=1",
        "auto,ranks-per-node=0",
        "auto,ranks-per-node=-1",
        "auto,ranks-per-node=2+",
        "auto,ranks-per-node=1+x",
        "auto,ranks-per-node=800+800",
        "auto,ranks-per-node=1,ranks-per-node=2",
        "auto,ranks-per-node=1,gpus=2",
        "auto,ranks-per-node=1,cpus=9999",
        "auto,ranks-per-node=1,wait-s=0",
        "auto,ranks-per-node=1,group=xy",
        "auto,ranks-per-node=1,group=abc",
    ],
)
def test_a_setting_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--rank-host ray") as refusal:
        RaySetting.parse(text)
    assert refusal.value.field == "rank_host"


@pytest.mark.parametrize(("ranks", "on_node"), [(4, 4), (2, 4), (6, 4), (1, 1)])
def test_ranks_that_are_no_two_whole_nodes_are_refused(ranks: int, on_node: int) -> None:
    with pytest.raises(Refused, match=f"{ranks} ranks are not two or more nodes of {on_node}"):
        open_on_ray.planned(f"auto,ranks-per-node={on_node}", RankSpec(num_ranks=ranks, on_gpu=True))


def test_shares_that_are_not_the_ranks_are_refused() -> None:
    with pytest.raises(Refused, match=r"2\+1 are 3 ranks, not 4"):
        open_on_ray.planned("auto,ranks-per-node=2+1", RankSpec(num_ranks=4, on_gpu=True))


def test_each_nodes_ranks_are_planned_on_its_first_gpus() -> None:
    placement = open_on_ray.planned("auto,ranks-per-node=2", RankSpec(num_ranks=4, on_gpu=True))
    assert placement.places == (RankPlace(0, 0), RankPlace(0, 1), RankPlace(1, 0), RankPlace(1, 1))
    placement = open_on_ray.planned("auto,ranks-per-node=2+1", RankSpec(num_ranks=3, on_gpu=True))
    assert placement.places == (RankPlace(0, 0), RankPlace(0, 1), RankPlace(1, 0))


def test_the_nodes_of_one_replica_are_different_ones() -> None:
    two_nodes = Bundle(cpus=1, gpus=(4, 4))
    large, small, none = {"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 4.0}, {"CPU": 64.0}
    assert replicas_on([large], two_nodes, most=4) == 0
    assert replicas_on([large, none], two_nodes, most=4) == 0
    assert replicas_on([large, large], two_nodes, most=4) == 2
    assert replicas_on([large, large], two_nodes, most=1) == 1
    assert replicas_on([large, small, small], two_nodes, most=4) == 2
    assert replicas_on([large, small], two_nodes, most=4) == 1


def node(gpus: int, *, cpus: int = 64) -> dict[str, float]:
    return {"CPU": float(cpus), "GPU": float(gpus)} if gpus else {"CPU": float(cpus)}


@pytest.mark.parametrize(
    ("nodes", "shares", "room"),
    [
        ([8, 4], (8, 4), 1),
        ([8, 4], (4, 8), 1),
        ([4, 4], (8, 4), 0),
        ([12], (8, 4), 0),  # of different nodes
        ([8, 4, 8, 4], (8, 4), 2),
        ([8, 8, 8], (8, 4), 2),  # the smaller shares of two replicas on one node
        ([12, 12], (8, 4), 2),
        ([3, 3, 3], (2, 1), 3),
    ],
)
def test_room_for_unequal_shares(nodes: list[int], shares: tuple[int, ...], room: int) -> None:
    assert replicas_on([node(gpus) for gpus in nodes], Bundle(cpus=1, gpus=shares), most=8) == room


@pytest.mark.parametrize(
    ("nodes", "ranks", "most", "shares"),
    [
        ([8, 8], 8, 2, (8,)),  # one node is enough
        ([4, 4, 4], 8, 1, (4, 4)),
        ([8, 4, 4], 12, 1, (8, 4)),  # two nodes, unequally, in the place of three of 4
        ([8, 8, 8], 12, 1, (6, 6)),
        ([8, 4, 8, 4], 12, 2, (8, 4)),
        ([2, 1], 3, 1, (2, 1)),
        ([8, 0, 1], 9, 1, (8, 1)),
    ],
)
def test_as_few_nodes_as_possible_are_chosen(nodes: list[int], ranks: int, most: int, shares: tuple[int, ...]) -> None:
    there = [node(gpus) for gpus in nodes]
    assert choose_shares(there, ranks=ranks, cpus=2, most=most) == shares
    assert replicas_on(there, Bundle(cpus=2, gpus=shares), most=most) == most


@pytest.mark.parametrize(("nodes", "ranks", "most"), [([8, 4], 16, 1), ([8, 4], 12, 2), ([], 1, 1), ([0, 0], 2, 1)])
def test_replicas_that_fit_in_no_way_are_refused(nodes: list[int], ranks: int, most: int) -> None:
    with pytest.raises(Refused, match="do not fit the cluster however they are spread"):
        choose_shares([node(gpus) for gpus in nodes], ranks=ranks, cpus=1, most=most)


def test_nodes_without_the_processors_are_not_chosen() -> None:
    assert choose_shares([node(8, cpus=1), node(4), node(4)], ranks=8, cpus=2, most=1) == (4, 4)


def test_a_node_has_its_own_path_of_a_model() -> None:
    paths = {VARIABLE: "/models=/mnt/nvme:/models/large=/mnt/raid:/=/other"}
    assert path_here("/models/a", paths) == Path("/mnt/nvme/a")
    assert path_here("/models", paths) == Path("/mnt/nvme")
    assert path_here("/models/large/b", paths) == Path("/mnt/raid/b")
    assert path_here("/models2/a", paths) == Path("/other/models2/a")
    assert path_here("/models/a", {}) == Path("/models/a")


@pytest.mark.parametrize("paths", ["/models", "models=/mnt", "/models=mnt", "/models=/mnt:x"])
def test_paths_that_cannot_be_read_are_refused_by_name(paths: str) -> None:
    with pytest.raises(Refused, match=VARIABLE):
        path_here("/models/a", {VARIABLE: paths})


@linux
def test_the_host_keeps_the_contract() -> None:
    check_rank_host(lambda: host("joins"))


@linux
@pytest.mark.parametrize("shares", [(2,), (2, 1, 1)])
def test_the_host_keeps_the_contract_with_several_ranks_of_a_node(shares: tuple[int, ...]) -> None:
    check_rank_host(lambda: host("joins", setting=RaySetting(address="auto", shares=shares)), num_ranks=4)


@linux
@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("refuses", "no 1 nodes"),
        ("dies", "the process that places ranks on Ray has ended"),
        ("loses", "node b is gone"),
    ],
)
def test_ranks_that_cannot_come_are_not_waited_for(way: str, said: str) -> None:
    with closing(host(way)) as opened, pytest.raises(Refused, match=said):
        opened.start(1, TWO_RANKS)


@linux
def test_a_node_that_ray_gives_up_ends_the_links_of_ranks_that_live(tmp_path: Path) -> None:
    signs = tmp_path / "signs"
    os.mkfifo(signs)
    with closing(host("joins", str(signs))) as opened, ThreadPoolExecutor(1) as threads:
        link = opened.start(1, TWO_RANKS)
        listening = threads.submit(lambda: list(link.frames()))
        try:
            signs.write_text("now\n")
            listening.result(GIVE_UP_S)
        finally:
            link.end(deadline_s=0)
