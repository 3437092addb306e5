"""The process that speaks to Ray for an engine: `python -m openinfer_ray.ranks.placer`, see `messages`.

Ray is not in the engine's process: it has threads and signal handlers of its own, and ends a process that is connected
when its own processes do. What Ray knows as this driver's job (actors, and a placement group that was made for it)
ends with this process, and this process with the engine's, whose end closes its input.
"""

import contextlib
import io
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec

from openinfer_core import OpenInferError, Refused
from openinfer_core.process.logs import set_up_logs
from openinfer_ray.bundles import Bundle, replicas_on
from openinfer_ray.cluster import connect_driver, import_ray
from openinfer_ray.ranks.messages import Failed, Invitation, Invite, Place, Placed, line_of, to_placer
from openinfer_ray.ranks.node import RankNode

_LOOK_S = 0.5
_END_S = 10.0  # what the end may take, once the engine is gone


def main() -> int:
    """Places ranks until the engine ends; returns the exit code."""
    # What a library prints must not get into what the engine reads.
    said = os.dup(1)
    os.dup2(2, 1)
    set_up_logs(os.environ)
    with io.FileIO(said, "w") as engine, contextlib.ExitStack() as ends:
        orders = Orders(sys.stdin.buffer)
        try:
            _serve(orders, engine, ends)
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds
            why = str(error) if isinstance(error, OpenInferError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(OSError):
                engine.write(line_of(Failed(why=why)))
            orders.ended.wait()
    return 0


class Orders:
    """What the engine says, read by a thread; its end ends this process, whatever that waits for."""

    def __init__(self, source: BinaryIO) -> None:
        self.ended = threading.Event()
        self._source = source
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="openinfer-orders", daemon=True).start()

    def take(self) -> Place | Invite | None:
        """None if the engine is gone."""
        line = self._lines.get()
        return to_placer.decode(line) if line else None

    def _read(self) -> None:
        for line in self._source:
            self._lines.put(line)
        self.ended.set()
        self._lines.put(b"")
        time.sleep(_END_S)
        os._exit(1)


def _serve(orders: Orders, engine: io.FileIO, ends: contextlib.ExitStack) -> None:
    order = orders.take()
    if not isinstance(order, Place):
        return
    connect_driver(order.address)
    for number in (signal.SIGINT, signal.SIGTERM):  # as the engine's process; Ray has set handlers of its own
        signal.signal(number, signal.SIG_IGN)
    ray: Any = import_ray()
    ends.callback(ray.shutdown)
    actors = _place(order, ends)
    engine.write(line_of(Placed(host=ray.util.get_node_ip_address())))
    invite = orders.take()
    if isinstance(invite, Invite):
        _watch(_invite(actors, invite, order), orders, engine)


def _place(order: Place, ends: contextlib.ExitStack) -> list[tuple[str, Any, int]]:
    """The name of each node, an actor on it, and its ranks, in the order of addresses: the same nodes get the same."""
    ray: Any = import_ray()
    strategies: Any = import_ray("ray.util.scheduling_strategies")
    group, first = (_group_of(order.group), 1) if order.group else (_new_group(order, ends), 0)
    actors: list[Any] = []
    for index, gpus in enumerate(_bundle(order).gpus, first):
        strategy = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {"num_cpus": order.cpus, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": strategy}
        actors.append(ray.remote(RankNode).options(**options).remote(order.cpus))
        ends.callback(_end_actor, actors[-1])
    try:
        places = ray.get([actor.where.remote() for actor in actors], timeout=order.wait_s)
    except ray.exceptions.GetTimeoutError as error:
        raise Refused(f"Ray has not started actors on {len(order.shares)} nodes within {order.wait_s:g} s") from error
    in_order = sorted(zip(places, actors, order.shares, strict=True), key=lambda each: each[0])
    return [(f"{host}-{node[:12]}", actor, ranks) for (host, node), actor, ranks in in_order]


def _bundle(order: Place) -> Bundle:
    return Bundle(cpus=order.cpus, gpus=order.shares if order.on_gpu else (0,) * len(order.shares))


def _group_of(group: str) -> Any:
    groups: Any = import_ray("ray.util.placement_group")
    ids: Any = import_ray("ray._raylet")
    return groups.PlacementGroup(ids.PlacementGroupID(bytes.fromhex(group)))


def _new_group(order: Place, ends: contextlib.ExitStack) -> Any:
    """Bundles on nodes other than this one, whose GPUs are the engine's."""
    ray: Any = import_ray()
    groups: Any = import_ray("ray.util.placement_group")
    own = ray.get_runtime_context().get_node_id()
    bundle, nodes = _bundle(order), list[Mapping[str, Any]](ray.nodes())
    others = [node["Resources"] for node in nodes if node["Alive"] and node["NodeID"] != own]
    gpus = " + ".join(map(str, bundle.gpus))
    wanted = f"{len(order.shares)} nodes, other than this one, with {order.cpus} CPUs each and {gpus} GPUs"
    if not replicas_on(others, bundle, most=1):
        raise Refused(f"--rank-host ray needs {wanted}; the cluster has {len(others)} others, without that")
    group = groups.placement_group(
        bundle.resources,
        strategy="STRICT_SPREAD",
        bundle_label_selector=[{"ray.io/node-id": f"!{own}"}] * len(order.shares),
    )
    ends.callback(groups.remove_placement_group, group)
    if not group.wait(order.wait_s):
        raise Refused(f"--rank-host ray needs {wanted}; they have not been free within {order.wait_s:g} s")
    return group


def _invite(actors: list[tuple[str, Any, int]], invite: Invite, order: Place) -> dict[Any, str]:
    """The calls that join, by which the end of an actor is seen; each with the name of its node."""
    calls: dict[Any, str] = {}
    for index, (node, actor, ranks) in enumerate(actors, 1):
        invitation = Invitation(to=invite, node=node, node_index=index, ranks=ranks, model=order.model)
        calls[actor.join.remote(msgspec.json.encode(invitation))] = node
    return calls


def _watch(calls: dict[Any, str], orders: Orders, engine: io.FileIO) -> None:
    ray: Any = import_ray()
    while not orders.ended.is_set():
        if not calls:
            orders.ended.wait()
            return
        for call in ray.wait(list(calls), timeout=_LOOK_S)[0]:
            node = calls.pop(call)
            if why := _why_it_ended(call):
                engine.write(line_of(Failed(why=f"node {node}: {why}")))


def _why_it_ended(call: Any) -> str:
    ray: Any = import_ray()
    try:
        return ray.get(call)
    except ray.exceptions.RayError as error:
        return f"Ray's actor has ended: {str(error).partition(chr(10))[0]}"


def _end_actor(actor: Any) -> None:
    import_ray().kill(actor)


if __name__ == "__main__":
    raise SystemExit(main())
