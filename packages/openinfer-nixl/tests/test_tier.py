"""The tier between two processes' worth of memory: the published kit, what peers see, and what goes wrong."""

import contextlib
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_agents import Wire

from openinfer_core.process import mutual_proof
from openinfer_kv_cache import Digest, KvLayout, TierFailure, TransferState
from openinfer_kv_cache.testing.tier_cases import chain, empty, ended, kit_layout, load, save
from openinfer_kv_cache.testing.tier_contract import FaultInjector, check_tier
from openinfer_kv_offload import RemoteTier, TierConfigError
from openinfer_nixl import open_nixl
from openinfer_nixl.agent import StillMoving, import_nixl
from openinfer_nixl.arena import Arena
from openinfer_nixl.directory import ArenaOffer, Directory
from openinfer_nixl.messages import (
    PROTOCOL,
    Described,
    Found,
    Frames,
    GiveBack,
    GivenBack,
    Has,
    Keys,
    Leased,
    List,
    TakeLease,
    answers,
    questions,
)
from openinfer_nixl.peers import Peer, PeerConnection
from openinfer_nixl.settings import NixlFields, open_with, parse
from openinfer_nixl.store import NixlStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tier is for Linux")

# An address of loopback that no other test has, so that a port that was free stays free until it is used.
HOST = f"127.{secrets.randbelow(250) + 1}.{secrets.randbelow(250)}.{secrets.randbelow(250) + 1}"
LAYOUT = kit_layout()
OBJECT_BYTES = LAYOUT.block_bytes + 128


def free_port() -> int:
    with socket.create_server((HOST, 0)) as taken:
        return taken.getsockname()[1]


class Pair:
    """Two tiers that are each other's peers, in one process."""

    def __init__(self, folder: Path) -> None:
        self.token = folder / "token"
        self.token.write_bytes(b"t" * 32)
        self.wire = Wire()
        self.ports = (free_port(), free_port())
        self._open = ExitStack()

    def fields(self, number: int, **changed: Any) -> NixlFields:
        here, there = self.ports[number], self.ports[1 - number]
        setting = f"{HOST}:{here},1MiB,token_file={self.token},peers={HOST}:{there},refresh_s=1e-9"
        given = {"budget_bytes": 64 * OBJECT_BYTES, "timeout_s": 60.0, **changed}
        return msgspec.structs.replace(parse(setting), **given)

    def open(self, number: int, layout: KvLayout = LAYOUT, **changed: Any) -> RemoteTier:
        tier = open_with(layout, self.fields(number, **changed), self.wire.agent)
        self._open.callback(tier.close)
        return tier

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


class Case:
    """One tier without peers, for the kit."""

    is_persistent = False
    capacity_blocks = 8

    def __init__(self, folder: Path, wire: Wire) -> None:
        self._folder, self._wire = folder, wire

    def open(self, layout: KvLayout, faults: FaultInjector) -> RemoteTier:
        token = self._folder / "token"
        token.write_bytes(b"t" * 32)
        fields = parse(f"{HOST}:0,1MiB,token_file={token},connections=1")
        budget_bytes = self.capacity_blocks * (layout.block_bytes + 128)
        fields = msgspec.structs.replace(fields, budget_bytes=budget_bytes)
        return open_with(layout, fields, self._wire.agent, wrap_medium=faults.wrap)


def test_the_tier_keeps_the_contract(tmp_path: Path) -> None:
    check_tier(lambda: Case(tmp_path, Wire()))


def failed_load(tier: RemoteTier, digests: list[Digest]) -> TierFailure | None:
    """Of a load that finds all of a chain, why it ended."""
    hit = tier.find(digests)
    assert list(hit.digests) == digests
    transfer = tier.load(hit, empty(len(digests), tier.layout))
    assert ended(transfer) is TransferState.PARTIAL
    return transfer.failure


def load_at_last(tier: RemoteTier, digests: list[Digest]) -> None:
    """A peer that was not there is dialled again after a second."""
    give_up_s = time.monotonic() + 60
    while load(tier, digests) < len(digests):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
        tier.look_up(digests)


def test_a_peer_loads_what_the_other_one_has_saved(pair: Pair) -> None:
    one, two = pair.open(0), pair.open(1)
    digests = chain(0, 4)
    assert save(one, digests) is TransferState.COMPLETED
    two.look_up(digests)
    pair.wire.reads = 0
    assert load(two, digests) == 4
    assert pair.wire.reads == 4
    assert two.counters()[0].loaded_blocks == 4


def test_each_is_the_others_peer(pair: Pair) -> None:
    one, two = pair.open(0), pair.open(1)
    for saving, loading, digests in ((one, two, chain(1, 2)), (two, one, chain(2, 2))):
        assert save(saving, digests) is TransferState.COMPLETED
        load_at_last(loading, digests)


def test_bytes_that_change_on_their_way_are_no_block(pair: Pair) -> None:
    """A lease that was over too early, memory that is not what a peer says: the checksum is that of the save."""
    one, two = pair.open(0), pair.open(1)
    digests = chain(0, 1)
    assert save(one, digests) is TransferState.COMPLETED
    two.look_up(digests)
    pair.wire.shift_bytes = 1
    assert failed_load(two, digests) is TierFailure.CORRUPT
    assert two.counters()[0].corrupt_blocks == 1


def test_a_peer_that_is_gone_is_a_miss(pair: Pair) -> None:
    one, two = pair.open(0), pair.open(1)
    digests, own = chain(0, 2), chain(7, 2)
    assert save(one, digests) is TransferState.COMPLETED
    two.look_up(digests)
    one.close()
    assert failed_load(two, digests) is TierFailure.MISSING
    assert save(two, own) is TransferState.COMPLETED  # its own memory is used as before
    assert load(two, own) == 2


def test_a_peer_that_comes_back_is_found_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    two = pair.open(1)
    digests = chain(0, 2)
    two.look_up(digests)  # it is not there yet
    one = pair.open(0)
    assert save(one, digests) is TransferState.COMPLETED
    load_at_last(two, digests)
    pair.close()


def test_a_transfer_that_hangs_costs_its_place(pair: Pair) -> None:
    one = pair.open(0)
    (digest,) = chain(0, 1)
    assert save(one, [digest]) is TransferState.COMPLETED
    arena = Arena(1, OBJECT_BYTES, num_landings=2, lease_s=30.0, clock=time.monotonic)
    agent = pair.wire.agent(arena.address, arena.num_bytes)
    token, layout = b"t" * 32, LAYOUT.digest
    offer = ArenaOffer(arena)
    directory = Directory(socket.create_server((HOST, 0)), offer, token=token, layout=layout, description=b"")
    there = (HOST, pair.ports[0])
    peer = Peer(PeerConnection(there, agent, answers, token=token, layout=layout, timeout_s=60.0))
    store = NixlStore(arena, directory, [peer], agent, timeout_s=0.01, address="here")
    key = f"openinfer/block/{digest.hex()}"
    assert store.has(key)
    pair.wire.hangs = True
    for _ in range(3):  # the third finds no place: what hangs may still write into the other two
        with pytest.raises(StillMoving):
            store.get(key)
    assert pair.wire.reads == 2
    store.close()


def test_a_peer_that_leases_more_than_a_block_is_not_read(pair: Pair) -> None:
    answers_to = {Has: Found(True), List: Keys(()), GiveBack: GivenBack(), TakeLease: Leased(1, 0, 1 << 40)}

    def lie(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            mutual_proof.admit(connection, token=b"t" * 32, protocol=PROTOCOL, judge=lambda _: None)
            frames = Frames(connection)
            frames.send(Described(pair.wire.agent(0, 0).describe()))
            with contextlib.suppress(ConnectionError):
                while True:
                    frames.send(answers_to[type(questions.decode(frames.receive()))])

    with socket.create_server((HOST, pair.ports[0])) as listener:
        liar = threading.Thread(target=lie, args=(listener,))
        liar.start()
        two = pair.open(1)
        digests = chain(0, 1)
        two.look_up(digests)
        assert failed_load(two, digests) is TierFailure.MISSING
        two.close()
        liar.join(60)
    assert pair.wire.reads == 0


def test_a_peer_that_goes_while_it_is_read_is_a_miss(pair: Pair) -> None:
    one, two = pair.open(0), pair.open(1, connections=1)
    digests = chain(0, 2)
    assert save(one, digests) is TransferState.COMPLETED
    two.look_up(digests)
    memories = dict(pair.wire.memories)
    pair.wire.memories.update(dict.fromkeys(memories, (0, 0)))
    assert failed_load(two, digests) is TierFailure.MISSING
    pair.wire.memories.update(memories)
    two.look_up(digests)
    assert load(two, digests) == 2  # by the only landing place, which was given back


@pytest.mark.parametrize("wrong", ["token", "layout"])
def test_a_peer_without_the_token_or_of_another_layout_has_nothing_here(pair: Pair, wrong: str) -> None:
    one = pair.open(0)
    digests = chain(0, 1)
    assert save(one, digests) is TransferState.COMPLETED
    if wrong == "token":
        pair.token.write_bytes(b"u" * 32)
    two = pair.open(1, LAYOUT if wrong == "token" else kit_layout(model_tag="another"))
    two.look_up(digests)
    assert load(two, digests) == 0
    assert pair.wire.reads == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("127.0.0.1:7600", "needs an address and a size"),
        ("7600,1GiB,token_file=t", "not HOST:PORT"),
        ("a:70000,1GiB,token_file=t", "not HOST:PORT"),
        ("a:1,1GiB", "no token_file"),
        ("a:1,1GB,token_file=t", "not a size"),
        ("a:1,1GiB,token_file=t,peers=b", "not HOST:PORT"),
        ("a:1,1GiB,token_file=t,timeout_s=nan", "timeout_s"),
        ("a:1,1GiB,token_file=t,lease_s=0", "lease_s"),
        ("a:1,1GiB,token_file=t,colour=red", "colour"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(setting: str, message: str) -> None:
    with pytest.raises(TierConfigError, match=message):
        open_nixl.check_setting(LAYOUT, setting)


def test_a_token_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierConfigError, match="token_file"):
        open_with(LAYOUT, parse(f"{HOST}:0,1MiB,token_file={tmp_path / 'none'}"), Wire().agent)


def test_without_nixl_the_tier_says_what_is_missing() -> None:
    with pytest.raises(TierConfigError, match="pip install --no-deps nixl-cu13"):
        import_nixl(["no_such_nixl._api"])
