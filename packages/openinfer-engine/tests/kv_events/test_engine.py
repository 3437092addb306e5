"""An engine with `kv_events`: a router that only listens knows what its prefix cache holds."""

import socket
import sys
import time

import msgspec
import pytest
import zmq

from openinfer_core import (
    GenerateRequest,
    InvalidRequest,
    Refused,
    RequestId,
    SamplingParams,
    Scheduled,
    Tokens,
    find_plugin,
)
from openinfer_core.control import Sleep, UpdateWeights, Wake
from openinfer_core.errors import ContractViolation
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerCapabilities, SchedulerConfig
from openinfer_engine.engine_plan import resolve
from openinfer_engine.kv_events.opening import open_kv_events
from openinfer_engine.launch import build_loop
from openinfer_engine.options import EngineOptions
from openinfer_engine.scheduler import TokenBudgetScheduler

BLOCK = 4


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def replay():
    """Makes a function that asks an endpoint for all events so far."""
    with zmq.Context() as context:

        def ask(endpoint):
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.RCVTIMEO, 30_000)
                dealer.connect(endpoint)
                dealer.send_multipart((b"", bytes(8)))
                events = []
                while (frames := dealer.recv_multipart())[2] != b"\xff" * 8:
                    events += msgspec.msgpack.decode(frames[3])[1]
                return events

        yield ask


def run(loop, number, prompt, *, max_tokens):
    """Runs one request to its end; returns how many tokens were cached, and the sampled ids."""
    request = GenerateRequest(
        request_id=RequestId(number),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
    )
    events = loop.submit(request)
    while loop.busy:
        events += loop.step()
    cached = sum(event.cached_tokens for event in events if isinstance(event, Scheduled))
    return cached, [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def follow(events):
    """What a router makes of events: the tokens and the parent of each hash that it knows."""
    known = {}
    for name, *fields in events:
        match name:
            case "BlockStored":
                hashes, parent, tokens, size, *_ = fields
                assert size == BLOCK
                for place, each in enumerate(hashes):
                    known[each] = (parent, tokens[place * size : (place + 1) * size])
                    parent = each
            case "BlockRemoved":
                for each in fields[0]:
                    del known[each]
            case _:
                known.clear()
    return known


def longest_prefix(known, token_ids):
    """How many of the first tokens a router knows to be cached."""
    parent, place = None, 0
    children = {(before, tuple(tokens)): each for each, (before, tokens) in known.items()}
    while (parent := children.get((parent, tuple(token_ids[place : place + BLOCK])))) is not None:
        place += BLOCK
    return place


def test_a_router_that_only_listens_knows_what_is_cached(replay):
    events_port, replay_port = free_ports(2)
    options = EngineOptions(
        kv_events=f"{events_port},replay={replay_port}",
        block_size_tokens=BLOCK,
        num_blocks=8,
        max_model_tokens=32,
        max_num_seqs=2,
    )
    definition = find_plugin("openinfer.models", "qwen3").load()().definition
    loop = build_loop(resolve(definition, find_plugin("openinfer.checkpoints", "tiny").load()(), options))
    first, second = list(range(20, 34)), list(range(60, 81))
    _, sampled = run(loop, 1, first, max_tokens=4)
    first += sampled
    _, sampled = run(loop, 2, second, max_tokens=8)
    second += sampled
    give_up_s = time.monotonic() + 30
    while longest_prefix(known := follow(replay(f"tcp://127.0.0.1:{replay_port}")), second) < 28:
        assert time.monotonic() < give_up_s, f"a router knows {known} only"
    removed = [event for event in replay(f"tcp://127.0.0.1:{replay_port}") if event[0] == "BlockRemoved"]
    assert removed  # eight blocks do not hold both
    for number, token_ids in ((3, first), (4, second)):
        expected = longest_prefix(follow(replay(f"tcp://127.0.0.1:{replay_port}")), token_ids)
        cached, _ = run(loop, number, [*token_ids, 1], max_tokens=1)
        assert cached == expected
    loop.close()
    assert loop.info.composition["kv_events"] == options.kv_events


def test_blocks_in_tiers_are_told_with_their_medium(replay, tmp_path):
    events_port, replay_port = free_ports(2)
    options = EngineOptions(
        kv_events=f"{events_port},replay={replay_port}",
        kv_tier=["host=1MiB", f"disk={tmp_path},4MiB"],
        block_size_tokens=BLOCK,
        num_blocks=8,
        max_model_tokens=32,
    )
    definition = find_plugin("openinfer.models", "qwen3").load()().definition
    loop = build_loop(resolve(definition, find_plugin("openinfer.checkpoints", "tiny").load()(), options))
    run(loop, 1, range(20, 45), max_tokens=1)
    # The second tier is written to after the save; closing waits for it, and sends what is left.
    events, told = [], {"GPU": set(), "CPU": set(), "STORAGE": set()}
    give_up_s = time.monotonic() + 60
    while len(told["STORAGE"]) < 6:
        assert time.monotonic() < give_up_s, told
        run(loop, 2, [1], max_tokens=1)  # a step, which sends what the tiers have said since
        events = replay(f"tcp://127.0.0.1:{replay_port}")
        for name, *fields in events:
            if name == "BlockStored":
                told[fields[5]].update(fields[0])
    loop.close()
    assert told["CPU"] == told["STORAGE"] == told["GPU"]
    of_tiers = [fields for name, *fields in events if name == "BlockStored" and fields[5] != "GPU"]
    assert all(fields[1:5] == [None, [], BLOCK, None] for fields in of_tiers)  # as vLLM tells of them


def hashes_of(replay, key_file):
    """What an engine with this key file says of one prompt."""
    events_port, replay_port = free_ports(2)
    options = EngineOptions(
        kv_events=f"{events_port},replay={replay_port}", kv_key_file=key_file, block_size_tokens=BLOCK, num_blocks=8
    )
    definition = find_plugin("openinfer.models", "qwen3").load()().definition
    loop = build_loop(resolve(definition, find_plugin("openinfer.checkpoints", "tiny").load()(), options))
    run(loop, 1, range(20, 34), max_tokens=1)
    give_up_s = time.monotonic() + 30
    while not (known := set(follow(replay(f"tcp://127.0.0.1:{replay_port}")))):
        assert time.monotonic() < give_up_s, "nothing is told"
    loop.close()
    return known


def test_replicas_with_one_key_file_hash_alike_and_others_do_not(replay, tmp_path):
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_bytes(b"k" * 32)
    other.write_bytes(b"o" * 32)
    first, second, third = (hashes_of(replay, str(path)) for path in (key, key, other))
    assert first == second
    assert len(first) == 3
    assert not first & third
    assert not first & hashes_of(replay, None)


def test_a_key_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match=r"--kv-key-file .*none: No such file"):
        hashes_of(None, str(tmp_path / "none"))


@pytest.mark.parametrize("command", [UpdateWeights(path="."), Sleep()], ids=["update", "sleep"])
def test_a_router_forgets_what_other_weights_had_computed(replay, command):
    events_port, replay_port = free_ports(2)
    tiny = find_plugin("openinfer.checkpoints", "tiny").load()()
    options = EngineOptions(
        kv_events=f"{events_port},replay={replay_port}", block_size_tokens=BLOCK, num_blocks=16, weights_root=str(tiny)
    )
    definition = find_plugin("openinfer.models", "qwen3").load()().definition
    loop = build_loop(resolve(definition, tiny, options))
    prompt = list(range(20, 33))
    run(loop, 1, prompt, max_tokens=1)
    loop.control(command)
    loop.control(Wake())
    assert run(loop, 2, prompt, max_tokens=1)[0] == 0
    give_up_s = time.monotonic() + 30
    while len(events := replay(f"tcp://127.0.0.1:{replay_port}")) < 4:
        assert time.monotonic() < give_up_s, events
    assert [event[0] for event in events] == ["AllBlocksCleared", "BlockStored"] * 2  # the first says that it began
    before, after = (set(event[1]) for event in events if event[0] == "BlockStored")
    # The same weights are known by the same names after a sleep; after an update none is.
    assert (before == after) if isinstance(command, Sleep) else not before & after
    assert longest_prefix(follow(events), prompt) == 12
    loop.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_events": "localhost"}, "kv_events: 'localhost' is no endpoint"),
        ({"kv_events": "5557", "prefix_cache": False}, "tells of the prefix cache, and prefix_cache is false"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(InvalidRequest, match=message):
        EngineOptions(**options)


class Silent:
    """A third-party scheduler that publishes no events."""

    capabilities = SchedulerCapabilities()


class DeclaresAndIsSilent:
    capabilities = SchedulerCapabilities(tells_kv_events=True)


def make_scheduler():
    config = SchedulerConfig(
        num_blocks=8, block_size_tokens=4, max_num_seqs=2, max_step_tokens=8, max_model_tokens=16, max_waiting=4
    )
    return TokenBudgetScheduler(config, FirstComeFirstServed(QueuePolicyConfig()))


def test_a_scheduler_that_tells_nobody_is_refused():
    with pytest.raises(Refused, match=r"and Silent does not .* use token-budget"):
        open_kv_events("5557", Silent(), block_size_tokens=4)


def test_a_scheduler_that_declares_events_and_has_no_listen_is_named():
    with pytest.raises(ContractViolation, match=r"DeclaresAndIsSilent declares tells_kv_events and has no listen"):
        open_kv_events("5557", DeclaresAndIsSilent(), block_size_tokens=4)


def test_without_pyzmq_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(Refused, match=r"./run install --kv-events"):
        open_kv_events("5557", make_scheduler(), block_size_tokens=4)
