"""Replicas that Ray places, behind one handle: several Ray nodes of one machine, on a CPU.

Run, in an environment with `ray[serve]` and openinfer with the tiny model:

    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 python tools/ray/replicas.py --json FILE

Ray carries placement and life alone: each actor starts an engine process and tells where it listens. Requests go
from this process to the engines over TCP. What it looks at: placement, requests of several replicas, the death of a
replica's node while streams run, the replica that comes back, and the death of Ray's control store while streams run.
What was seen is in benchmarks/results/ray/replicas.json: times there are those of a busy machine.
"""

import argparse
import asyncio
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import msgspec
import ray
import ray._private.services as ray_services
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openinfer_core import Failed, Finished, GenerateRequest, RequestId, SamplingParams, Tokens
from openinfer_core.process.remote import EngineAccess, join_engine
from openinfer_core.replicas import RoutedEngine

# Ray replaces loopback by the node's address, which a sandbox without a network cannot reach.
ray_services.node_ip_address_from_perspective = lambda address=None: "127.0.0.1"
NODE = {"object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}


@ray.remote(num_cpus=0, resources={"GPUish": 1}, max_restarts=1, max_task_retries=0)
class Replica:
    """Places an engine process and lives as long as it."""

    def __init__(self) -> None:
        from openinfer.models import find_family, find_model_dir
        from openinfer_core.process.remote import spawn_engine
        from openinfer_engine.engine_spec import EngineSpec
        from openinfer_engine.launch import CHILD_MODULE
        from openinfer_engine.options import EngineOptions

        folder = find_model_dir("tiny")
        family, _ = find_family(folder)
        options = EngineOptions(num_blocks=512, max_num_seqs=32)
        self._engine = spawn_engine(CHILD_MODULE, EngineSpec.of(family.definition, folder, options), host="127.0.0.1")

    def access(self) -> bytes:
        return msgspec.json.encode(self._engine.access)

    def where(self) -> str:
        return ray.get_runtime_context().get_node_id()[:8]


class Client:
    """Asks, and remembers how each request ended."""

    def __init__(self, engine: RoutedEngine) -> None:
        self.engine = engine
        self.ends: dict[int, Any] = {}
        self.tokens: dict[int, int] = {}
        self._next = 0
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    def ask(self, *, max_tokens: int) -> int:
        number, self._next = self._next, self._next + 1
        prompt = tuple((7 * number + place) % 250 for place in range(40))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.engine.submit(GenerateRequest(request_id=RequestId(number), prompt_token_ids=prompt, sampling=sampling))
        return number

    async def _read(self) -> None:
        async for events in self.engine.events():
            for event in events:
                if isinstance(event, Tokens):
                    self.tokens[event.request_id] = self.tokens.get(event.request_id, 0) + len(event.token_ids)
                elif isinstance(event, Finished | Failed):
                    self.ends[event.request_id] = event
            self._changed.set()

    async def wait(self, is_so: Any, *, timeout_s: float = 90) -> None:
        async with asyncio.timeout(timeout_s):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()


def access_of(replica: Any) -> EngineAccess:
    """Also of an actor that Ray is restarting."""
    end_s = time.monotonic() + 120
    while True:
        try:
            return msgspec.json.decode(ray.get(replica.access.remote(), timeout=120), type=EngineAccess)
        except ray.exceptions.ActorUnavailableError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.2)


async def scenario(cluster: Cluster, nodes: list[Any], seen: dict[str, Any]) -> None:
    group = placement_group([{"GPUish": 1}] * 2, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=60)
    replicas = [
        Replica.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        ).remote()
        for index in range(2)
    ]
    began_s = time.monotonic()
    engines = {f"replica {index}": join_engine(access_of(each)) for index, each in enumerate(replicas)}
    places = [ray.get(each.where.remote()) for each in replicas]
    seen["replicas_up_s"] = round(time.monotonic() - began_s, 2)
    seen["placed_on_different_nodes"] = len(set(places)) == 2
    client = Client(RoutedEngine(engines, key=secrets.token_bytes(32)))

    first = [client.ask(max_tokens=16) for _ in range(16)]
    await client.wait(lambda: all(number in client.ends for number in first))
    seen["requests_over_two_replicas"] = sum(isinstance(client.ends[each], Finished) for each in first)

    running = [client.ask(max_tokens=2000) for _ in range(12)]
    await client.wait(lambda: all(client.tokens.get(number) for number in running))
    node_ids = {node["NodeID"][:8]: node for node in ray.nodes()}
    dying = next(each for each in nodes if each.node_id[:8] == places[1] and places[1] in node_ids)
    began_s = time.monotonic()
    cluster.remove_node(dying, allow_graceful=False)
    await client.wait(lambda: "replica 1" not in client.engine.replicas)
    seen["death_of_a_node_noticed_s"] = round(time.monotonic() - began_s, 2)
    after = [client.ask(max_tokens=8) for _ in range(8)]
    await client.wait(lambda: all(number in client.ends for number in [*running, *after]))
    seen["streams_at_the_death"] = {
        "ended_well": sum(isinstance(client.ends[each], Finished) for each in running),
        "ended_by_a_terminal_error": sum(isinstance(client.ends[each], Failed) for each in running),
    }
    seen["requests_right_after"] = sum(isinstance(client.ends[each], Finished) for each in after)

    cluster.add_node(num_cpus=1, resources={"GPUish": 1}, **NODE)
    access = await asyncio.to_thread(access_of, replicas[1])
    client.engine.add("replica 1 again", join_engine(access))
    seen["replica_came_back_s"] = round(time.monotonic() - began_s, 2)
    last = [client.ask(max_tokens=8) for _ in range(8)]
    await client.wait(lambda: all(number in client.ends for number in last))
    seen["requests_after_it_came_back"] = sum(isinstance(client.ends[each], Finished) for each in last)
    streams = [client.ask(max_tokens=400) for _ in range(8)]
    await client.wait(lambda: all(client.tokens.get(number) for number in streams))
    cluster.head_node.kill_gcs_server()
    await client.wait(lambda: all(number in client.ends for number in streams))
    seen["streams_that_ended_well_without_the_control_store"] = sum(
        isinstance(client.ends[each], Finished) for each in streams
    )
    await client.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 1, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1, resources={"GPUish": 1}, **NODE) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    seen: dict[str, Any] = {"ray": ray.__version__, "nodes_up_s": round(time.monotonic() - began_s, 2)}
    try:
        asyncio.run(scenario(cluster, nodes, seen))
    finally:
        print(json.dumps(seen, indent=1), flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
