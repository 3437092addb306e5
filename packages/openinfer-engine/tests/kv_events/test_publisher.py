"""Real sockets on loopback: what is published, what is replayed, and what a subscriber that lags sees."""

import socket
import time
from array import array

import msgspec
import pytest
import zmq

from openinfer_core.errors import Refused
from openinfer_engine.kv_events.publisher import KvEventPublisher
from openinfer_engine.kv_events.recorder import KvEventRecorder
from openinfer_engine.kv_events.setting import parse_kv_events
from openinfer_kv_cache import Digest, KvCache, KvCacheOptions, StoredBlocks

GIVE_UP_MS = 30_000
END = (2**64 - 1).to_bytes(8, "big")


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


@pytest.fixture
def started():
    """Starts publishers at free ports and closes them."""
    publishers = []

    def start(fields=""):
        events, replay = free_ports(2)
        setting = parse_kv_events(f"{events},replay={replay}{fields}")
        publishers.append(KvEventPublisher(setting, block_size_tokens=2))
        return publishers[-1], setting

    yield start
    for publisher in publishers:
        publisher.close()


def opened(context, kind, endpoint):
    made = context.socket(kind)
    made.setsockopt(zmq.RCVTIMEO, GIVE_UP_MS)
    made.setsockopt(zmq.LINGER, 0)
    made.connect(endpoint)
    return made


def ask_all(context, endpoint, first):
    """Everything from a sequence number on, as (topic, number, events)."""
    dealer = opened(context, zmq.DEALER, endpoint)
    with dealer:
        dealer.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            _, topic, number, batch = dealer.recv_multipart()
            if number == END:
                return found
            found.append((topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)[1]))


def stored(number):
    return StoredBlocks(None, [Digest(number.to_bytes(16, "big"))], array("I", [number, number]), None, None)


def test_a_subscriber_gets_each_step_under_its_number(started, context):
    publisher, setting = started(",topic=kv@pod@model")
    subscriber = opened(context, zmq.SUB, setting.endpoint)
    subscriber.subscribe(b"kv@pod@model")
    numbers = []
    give_up_s = time.monotonic() + 30
    step = 0
    subscriber.setsockopt(zmq.RCVTIMEO, 20)
    while len(numbers) < 3:  # a subscription takes its time, and what was sent before it is for replay
        assert time.monotonic() < give_up_s
        publisher.publish([stored(step)])
        step += 1
        try:
            topic, number, batch = subscriber.recv_multipart()
        except zmq.Again:
            continue
        assert topic == b"kv@pod@model"
        numbers.append(int.from_bytes(number, "big"))
        events = msgspec.msgpack.decode(batch)[1]
        assert events == [["BlockStored", [numbers[-1]], None, [numbers[-1]] * 2, 2, None, "GPU", None, None]]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    subscriber.close()


def test_what_was_missed_is_replayed_from_a_number_on_until_it_is_forgotten(started, context):
    publisher, setting = started(",buffer_steps=3")
    for step in range(5):
        publisher.publish([stored(step)])
    give_up_s = time.monotonic() + 30
    while len(found := ask_all(context, setting.replay, 0)) < 3 or found[-1][1] < 4:
        assert time.monotonic() < give_up_s
    assert [number for _, number, _ in found] == [2, 3, 4]
    assert [number for _, number, _ in ask_all(context, setting.replay, 4)] == [4]
    assert ask_all(context, setting.replay, 5) == []


def test_requests_that_make_no_sense_are_not_answered_and_do_no_harm(started, context):
    publisher, setting = started()
    dealer = opened(context, zmq.DEALER, setting.replay)
    dealer.send_multipart((b"", b"short"))
    dealer.send_multipart((b"one frame",))
    publisher.publish([None])
    give_up_s = time.monotonic() + 30
    while not (found := ask_all(context, setting.replay, 0)):
        assert time.monotonic() < give_up_s
    assert found == [(b"", 0, [["AllBlocksCleared"]])]
    dealer.close()


def test_a_pool_is_told_from_its_beginning_to_its_clearing(started, context):
    publisher, setting = started()
    cache = KvCache(KvCacheOptions(num_blocks=2, block_size_tokens=2))
    cache.pool.listener = recorder = KvEventRecorder(publisher)
    recorder.flush()
    sequence = cache.sequence([1, 2, 3, 4])
    sequence.reserve(4)
    sequence.seal(4)
    recorder.flush()
    recorder.flush()  # nothing happened: no message
    sequence.release()
    cache.pool.allocate(1)
    cache.clear()
    recorder.flush()
    give_up_s = time.monotonic() + 30
    while len(found := ask_all(context, setting.replay, 0)) < 3:
        assert time.monotonic() < give_up_s
    a, b = (int.from_bytes(digest[-8:], "big") for digest in sequence.prefix_digests())
    assert [events for _, _, events in found] == [
        [["AllBlocksCleared"]],
        [["BlockStored", [a, b], None, [1, 2, 3, 4], 2, None, "GPU", None, None]],
        [["BlockRemoved", [b], "GPU"], ["AllBlocksCleared"]],
    ]


def test_an_engine_connects_to_a_router_that_listens(context):
    router = context.socket(zmq.SUB)
    router.setsockopt(zmq.RCVTIMEO, 20)
    router.subscribe(b"")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    publisher = KvEventPublisher(parse_kv_events(f"tcp://127.0.0.1:{port},connect=true"), block_size_tokens=2)
    give_up_s = time.monotonic() + 30
    while True:
        publisher.publish([None])
        try:
            frames = router.recv_multipart()
            break
        except zmq.Again:
            assert time.monotonic() < give_up_s
    assert msgspec.msgpack.decode(frames[2])[1] == [["AllBlocksCleared"]]
    router.close()
    publisher.close()


def test_an_endpoint_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=f"tcp://127.0.0.1:{port} cannot be used: Address already in use"):
            KvEventPublisher(parse_kv_events(str(port)), block_size_tokens=2)


def test_closing_again_does_nothing(started):
    publisher, _ = started()
    publisher.publish([None])
    publisher.close()
    publisher.close()
