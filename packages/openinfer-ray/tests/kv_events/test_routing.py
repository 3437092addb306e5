"""Engines of the tiny model, each with a replica's port and events: a server finds what others have sent there."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fake_replicas import TOKEN, Reader, run, until
from test_command import spec

from openinfer_core import (
    EngineInfo,
    EngineStats,
    Finished,
    GenerateRequest,
    Refused,
    RequestId,
    SamplingParams,
    Scheduled,
)
from openinfer_core.engine import AdapterStats
from openinfer_core.process.remote import open_link
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions
from openinfer_kv_cache import PrefixHasher
from openinfer_ray.following import Times
from openinfer_ray.kv_events.identity import KvIdentity
from openinfer_ray.kv_events.keys import curve_secrets, digest_key
from openinfer_ray.kv_events.relay import KvEventsRelay
from openinfer_ray.kv_events.routing import KvRouting
from openinfer_ray.ray_engine import RayEngine, join_replica
from openinfer_ray.relay import Relay
from openinfer_ray.replica import events_options, launch
from openinfer_ray.replica_spec import ReplicaAddress

KEY = digest_key(TOKEN)
OFTEN = Times(look_s=0.01, heartbeat_s=0.01, patience_s=60.0)


@contextlib.contextmanager
def replica(name: str, folder: Path) -> Iterator[ReplicaAddress]:
    """What `Replica` is, but for Ray."""
    folder.mkdir()
    asked = spec(options=msgspec.Raw(b'{"num_blocks":64,"max_num_seqs":4}'))
    engine, access = launch(asked, changed=events_options(asked, folder, token=TOKEN))
    relay = Relay(socket.create_server(("127.0.0.1", 0)), token=TOKEN, open_link=lambda: open_link(access))
    relay.start()
    events = KvEventsRelay(folder, host="127.0.0.1", secrets=curve_secrets(TOKEN))
    host, port = relay.address
    try:
        yield ReplicaAddress(name=name, host=host, port=port, events=events.ports)
    finally:
        events.close()
        relay.close()
        asyncio.run(engine.close())


def ask(number: int, *prompt: int, **fields: str) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    return GenerateRequest(
        request_id=RequestId(number), prompt_token_ids=prompt, sampling=sampling, **fields  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_request_goes_where_another_server_s_conversation_is(tmp_path: Path) -> None:
    prompt = tuple(range(2, 82))  # five blocks

    async def scenario(first: ReplicaAddress, second: ReplicaAddress) -> None:
        other = join_replica(second, token=TOKEN)  # a server of its own
        reader = Reader(other)
        other.submit(ask(1, *prompt))
        await reader.wait_for(1, Finished)
        await other.close()

        joined = {each.name: join_replica(each, token=TOKEN) for each in (first, second)}
        routing = KvRouting(joined["a"].info, key=KEY, token=TOKEN, patience_s=60.0)
        engine = RayEngine(
            joined,
            listing=lambda: [first, second],
            join=lambda each: join_replica(each, token=TOKEN),
            end=lambda: None,
            times=OFTEN,
            routing=routing,
        )
        reader = Reader(engine)
        await until(lambda: routing.num_told("b") == 5)
        assert routing.num_told("a") == 0
        for number in range(2, 6):
            engine.submit(ask(number, *prompt, number, *range(90, 130)))
            await reader.wait_for(number - 1, Finished)
            scheduled = [event for event in reader.seen if isinstance(event, Scheduled)]
            assert scheduled[-1].cached_tokens == 80
        assert routing.num_told("a") == 0
        engine.submit(ask(9, *prompt, cache_salt="another tenant"))  # nothing of it is held: the lesser load
        await reader.wait_for(5, Finished)
        await until(lambda: routing.num_told("a") == 5)
        await engine.close()
        await reader.task

    with replica("a", tmp_path / "a") as first, replica("b", tmp_path / "b") as second:
        run(scenario(first, second))


def identity_of(**changed: object) -> KvIdentity:
    info = msgspec.structs.replace(SimulatedLoop(SimulatedOptions()).info, **{"kv_layout_digest": "layout"} | changed)
    return KvIdentity(info, key=KEY)


def test_adapters_and_weights_count_by_what_replicas_say_of_them() -> None:
    identity = identity_of(block_size_tokens=4)
    hasher = PrefixHasher(4, key=KEY, layout_digest="layout")
    prompt = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert identity.digests(ask(1, *prompt)) == hasher.chain(hasher.root(), prompt)
    salted = hasher.chain(hasher.root(cache_salt="s"), prompt)
    assert identity.digests(ask(1, *prompt, cache_salt="s")) == salted

    adapter = AdapterStats(name="pirate", digest="0a" * 16, path="/a", rank=8)
    identity.told(EngineStats(adapters=(adapter,), weights_version="two"))
    hasher.weights_version = "two"
    adapted = hasher.chain(hasher.root(adapter_digest=b"\x0a" * 16), prompt)
    assert identity.digests(ask(1, *prompt, lora="pirate")) == adapted
    assert identity.digests(ask(1, *prompt, lora="unknown")) == hasher.chain(hasher.root(lora_name="unknown"), prompt)


def test_an_engine_that_does_not_say_what_its_kv_is_is_refused() -> None:
    info: EngineInfo = SimulatedLoop(SimulatedOptions()).info
    with pytest.raises(Refused, match="--replica-routing sent"):
        KvIdentity(info, key=KEY)
