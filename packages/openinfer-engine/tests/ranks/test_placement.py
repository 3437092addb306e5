"""Which number each rank gets, and where all are."""

import itertools
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from openinfer_core import InvalidRequest, PluginError, Refused, UnknownPlugin
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.options import DeviceKind, EngineOptions
from openinfer_engine.ranks.choice import planned_placement
from openinfer_engine.ranks.handshake import Node
from openinfer_engine.ranks.interfaces import interface_of
from openinfer_engine.ranks.join_host import arrange
from openinfer_engine.ranks.join_setting import JoinSetting
from openinfer_engine.ranks.placement import Placement, RankPlace, nodes_in_order
from openinfer_engine.ranks.socket_link import SocketLink
from openinfer_engine.worker.process_group import start_workers

SETTING = JoinSetting(host="127.0.0.1", port=0, token_file=Path("token"), local=2, node="a")


def links_of(nodes: Sequence[Node]) -> list[SocketLink]:
    pairs = [socket.socketpair(socket.AF_UNIX) for _ in nodes]
    for _, other in pairs:
        other.close()
    return [FakeLink(mine, node) for (mine, _), node in zip(pairs, nodes, strict=True)]


class FakeLink(SocketLink):
    """One whose head has an address, though its socket has none."""

    def __init__(self, connection: socket.socket, node: Node) -> None:
        connection.close()
        self.node = node

    @property
    def own_address(self) -> str:
        return "10.0.0.1"


NODES = [Node("c", None, 0, "10.0.0.3"), Node("b", None, 1, "10.0.0.2"), Node("b", None, 0, "10.0.0.2")]


@pytest.mark.parametrize("nodes", [*itertools.permutations(NODES)])
def test_ranks_are_numbered_by_node_and_gpu_in_whatever_order_they_come(nodes: tuple[Node, ...]) -> None:
    in_order, placement = arrange(links_of(nodes), SETTING, on_gpu=True)
    assert [(link.node.name, link.node.gpu) for link in in_order] == [("b", 0), ("b", 1), ("c", 0)]
    assert placement.nodes == (0, 0, 1, 1, 2)
    assert [place.gpu for place in placement.places] == [0, 1, 0, 1, 0]
    assert placement.places[0].address == "10.0.0.1"
    assert placement.places[4].address == "10.0.0.3"
    assert placement.gpus_of_node(3) == [0, 1]
    assert placement.spans_nodes


def test_indices_of_nodes_come_before_names() -> None:
    nodes = [Node("b", 2, 0, "10.0.0.2"), Node("c", 1, 0, "10.0.0.3")]
    in_order, _ = arrange(links_of(nodes), SETTING, on_gpu=True)
    assert [link.node.name for link in in_order] == ["c", "b"]


def test_ranks_of_the_heads_own_node_span_none() -> None:
    _, placement = arrange(links_of([Node("a", None, 2, "127.0.0.1")]), SETTING, on_gpu=True)
    assert not placement.spans_nodes
    assert placement.nodes == (0, 0, 0)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([Node("b", None, 0, ""), Node("b", None, 0, "")], "GPU 0 of node b is given to 2 ranks"),
        ([Node("a", None, 1, "")], "GPU 1 of node a is given to 2 ranks"),
        ([Node("b", 1, 0, ""), Node("b", 2, 1, "")], "the ranks of node b give it several indices"),
        ([Node("b", 1, 0, ""), Node("c", 1, 0, "")], "several nodes have the index 1"),
    ],
)
def test_places_that_contradict_each_other_are_refused(nodes: list[Node], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        arrange(links_of(nodes), SETTING, on_gpu=True)


def test_nodes_have_their_ranks_together() -> None:
    assert nodes_in_order((0, 0, 1, 2, 2)) == [(0, 2), (2, 3), (3, 5)]
    with pytest.raises(ValueError, match="must follow each other"):
        nodes_in_order((0, 1, 0))


def test_ranks_of_one_machine_have_gpus_of_their_numbers() -> None:
    assert Placement.on_one_node(3).places == (RankPlace(0, 0), RankPlace(0, 1), RankPlace(0, 2))


def test_setting_is_read() -> None:
    setting = JoinSetting.parse("[fd00::1]:7000,token-file=/run/token,local=8,node=head,wait-s=30")
    assert setting == JoinSetting(
        host="fd00::1", port=7000, token_file=Path("/run/token"), local=8, node="head", wait_s=30
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.0.0.0:7000",
        "7000,token-file=t",
        "0.0.0.0:70000,token-file=t",
        "0.0.0.0:7000,token-file=t,local=0",
        "0.0.0.0:7000,token-file=t,local=x",
        "0.0.0.0:7000,token-file=t,wait-s=0",
        "0.0.0.0:7000,token-file=t,token-file=u",
        "0.0.0.0:7000,token-file=t,colour=red",
        "0.0.0.0:7000,token-file=",
    ],
)
def test_setting_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        JoinSetting.parse(text)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="of Linux")
def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    for absent in ("192.0.2.1", "2001:db8::1", "nonsense"):
        with pytest.raises(Refused, match="NCCL_SOCKET_IFNAME"):
            interface_of(absent)


def planned(rank_host: str | None, *, device: DeviceKind = DeviceKind.CUDA) -> Placement:
    return planned_placement(EngineOptions(device=device, tensor_parallel_size=4, rank_host=rank_host))


def test_a_plan_counts_the_gpus_of_this_node_alone() -> None:
    placement = planned("join=0.0.0.0:7000,token-file=absent,local=3")
    assert placement.gpus_of_node(0) == [0, 1, 2]
    assert placement.gpus_of_node(3) == [0]
    assert placement.spans_nodes
    assert {place.address for place in placement.places} == {""}


@pytest.mark.parametrize("rank_host", [None, "process", "thread"])
def test_a_plan_of_one_machine_counts_all_gpus_here(rank_host: str | None) -> None:
    assert planned(rank_host).gpus_of_node(0) == [0, 1, 2, 3]


def test_a_plan_refuses_what_a_start_would() -> None:
    with pytest.raises(Refused, match="with local=4 all 4 ranks are on this node"):
        planned("join=0.0.0.0:7000,token-file=absent,local=4")
    with pytest.raises(InvalidRequest, match="not of the form"):
        planned("join=0.0.0.0:7000")
    with pytest.raises(PluginError, match="nowhere"):
        planned("nowhere=1")


@pytest.mark.parametrize("ranks", [1, 2])
def test_host_that_no_package_offers_is_refused_though_one_rank_needs_none(ranks: int) -> None:
    options = EngineOptions(rank_host="tape=2", tensor_parallel_size=ranks)
    spec = EngineSpec(family="none", model_dir="none", options=msgspec.Raw(b"{}"))
    with pytest.raises(UnknownPlugin, match="'tape'"):
        start_workers(spec, options)
    for host in (None, "thread", "process"):
        assert start_workers(spec, msgspec.structs.replace(options, rank_host=host, tensor_parallel_size=1)) is None
