"""The tier `nixl-gpu`: the published kit, what peers read of each other, and what goes wrong, without a GPU."""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from fake_agents import Wire
from gpu_tier import BLOCK_BYTES, HOST, LAYOUT, Case, FakeDevice, Pair, overwrite

from openinfer_core.process import mutual_proof
from openinfer_kv_cache import Digest, ResidentTier, SharedTier, TierFailure, TierMedium, TransferState
from openinfer_kv_cache.testing.device_blocks import FakeDeviceBlock
from openinfer_kv_cache.testing.tier_cases import chain, content, empty, ended, kit_layout, load, save
from openinfer_kv_cache.testing.tier_contract import check_tier
from openinfer_kv_offload import HostTier, HostTierOptions, TierConfigError, TierStack
from openinfer_nixl import open_nixl_gpu
from openinfer_nixl.agent import Piece
from openinfer_nixl.gpu.index import BlockBook
from openinfer_nixl.gpu.messages import PROTOCOL, Count, Counted, Lease, Leased, LeasedBlock, questions
from openinfer_nixl.gpu.peers import BlockPeer
from openinfer_nixl.gpu.settings import open_with, parse
from openinfer_nixl.gpu.tier import GpuTier
from openinfer_nixl.messages import Described, Frames, GiveBack, GivenBack

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tier is for Linux")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def test_the_tier_keeps_the_contract(tmp_path: Path) -> None:
    check_tier(lambda: Case(tmp_path, Wire()))


def failed_load(tier: GpuTier, digests: list[Digest], *, completed: int = 0) -> TierFailure | None:
    """Of a load that finds all of a chain, why it ended; what came before is right."""
    hit = tier.find(digests)
    assert list(hit.digests) == digests
    blocks = empty(len(digests), tier.layout)
    transfer = tier.load(hit, blocks)
    assert ended(transfer) is TransferState.PARTIAL
    assert transfer.completed_blocks == completed
    for digest, block in zip(digests[:completed], blocks, strict=False):
        assert bytes(block) == content(digest, tier.layout)
    return transfer.failure


def test_a_peer_loads_what_the_other_one_has_saved_in_one_transfer(pair: Pair) -> None:
    one, two = pair.open(0), pair.open(1)
    assert isinstance(two, SharedTier)
    assert isinstance(two, ResidentTier)
    digests = chain(0, 6)
    assert save(one, digests) is TransferState.COMPLETED
    assert load(two, digests) == 0, "nothing is known of peers before a look-up"
    two.look_up(digests)
    assert load(two, digests) == 6
    assert pair.wire.reads == 1, "blocks of one chain are neighbours, and one piece of one transfer"
    assert two.counters()[0].loaded_blocks == 6
    two.check_integrity()


def test_blocks_of_a_device_go_from_memory_beside_one_pool_to_the_other_one(pair: Pair) -> None:
    devices = FakeDevice(), FakeDevice()
    one, two = (pair.open(number, device=device) for number, device in enumerate(devices))
    digests = chain(0, 5)
    right = [content(digest, LAYOUT) for digest in digests]
    assert ended(one.save(digests, [FakeDeviceBlock(each) for each in right])) is TransferState.COMPLETED
    asking = threading.Thread(target=two.look_up, args=(digests,))
    asking.start()
    asking.join(60)
    assert asking.ident in devices[1].threads, "UCX finds no GPU in a thread that has none"
    blocks = [FakeDeviceBlock(bytes(BLOCK_BYTES)) for _ in digests]
    assert ended(two.load(two.find(digests), blocks)) is TransferState.COMPLETED
    assert [bytes(block.memory) for block in blocks] == right
    for tier in (one, two):
        tier.close()
    assert [device.room_bytes for device in devices] == [1 << 30] * 2, "memory was not given back"


def test_a_chain_is_put_together_from_both(pair: Pair) -> None:
    one, two = pair.open(0), pair.open(1)
    digests = chain(0, 7)
    assert save(two, digests[:2]) is TransferState.COMPLETED
    assert save(one, digests[:5]) is TransferState.COMPLETED
    assert save(two, digests[5:]) is TransferState.COMPLETED
    two.look_up(digests)
    assert load(two, digests) == 7
    assert pair.wire.reads == 1
    assert save(two, digests) is TransferState.COMPLETED, "what a peer has is kept, too, when it is saved"
    assert two.counters()[0].stored_blocks == 7


class Heard:
    """Digests that can be found in a tier, as it tells."""

    def __init__(self) -> None:
        self.digests: list[Digest] = []

    def stored(self, digests: Sequence[Digest], medium: TierMedium) -> None:
        assert medium is TierMedium.CPU
        self.digests += digests

    def removed(self, digests: Sequence[Digest], medium: TierMedium) -> None:
        assert medium is TierMedium.CPU
        for digest in digests:
            self.digests.remove(digest)


def test_a_listener_hears_of_a_tiers_own_blocks_alone(pair: Pair) -> None:
    one, two = pair.open(0, budget_bytes=2 * BLOCK_BYTES), pair.open(1)
    heard = Heard(), Heard()
    one.listen(heard[0])
    two.listen(heard[1])
    assert save(one, chain(0, 2)) is TransferState.COMPLETED
    assert save(one, chain(1, 1)) is TransferState.COMPLETED
    two.look_up(chain(1, 1))
    assert load(two, chain(1, 1)) == 1
    assert sorted(heard[0].digests) == sorted([*chain(0, 2)[1:], *chain(1, 1)])
    assert heard[1].digests == []


def test_bytes_that_change_on_their_way_are_no_block(pair: Pair) -> None:
    one, two = pair.open(0), pair.open(1)
    digests = chain(0, 3)
    assert save(one, digests) is TransferState.COMPLETED
    two.look_up(digests)
    pair.wire.before_copy = lambda piece: overwrite(piece.remote + BLOCK_BYTES, BLOCK_BYTES)
    assert failed_load(two, digests, completed=1) is TierFailure.CORRUPT
    assert two.counters()[0].corrupt_blocks == 1
    assert len(two.find(digests).digests) == 1, "what was not right is not believed to be there"


def test_a_read_after_its_lease_is_no_block(pair: Pair) -> None:
    """The owner gives the place to another block while a slow peer reads it."""
    one, two = pair.open(0, budget_bytes=2 * BLOCK_BYTES, lease_s=0.001), pair.open(1)
    digests, others = chain(0, 2), chain(1, 2)
    assert save(one, digests) is TransferState.COMPLETED
    two.look_up(digests)

    def save_others(piece: Piece) -> None:
        time.sleep(0.01)
        assert save(one, others) is TransferState.COMPLETED

    pair.wire.before_copy = save_others
    assert failed_load(two, digests) is TierFailure.CORRUPT


def test_leased_blocks_stay_where_they_are(pair: Pair) -> None:
    one, two = pair.open(0, budget_bytes=2 * BLOCK_BYTES), pair.open(1)
    digests, others = chain(0, 2), chain(1, 2)
    assert save(one, digests) is TransferState.COMPLETED
    two.look_up(digests)
    states: list[TransferState] = []
    pair.wire.before_copy = lambda _: states.append(save(one, others))
    assert load(two, digests) == 2
    assert states == [TransferState.PARTIAL], "there was no place: both were leased"
    pair.wire.before_copy = lambda _: None
    two.look_up(chain(2, 1))  # what is told by a connection is told in order: its answer comes after the lease's end
    assert save(one, others) is TransferState.COMPLETED, "a lease was not given back"
    one.check_integrity()


def test_the_answer_to_a_lease_that_is_given_back_is_taken_for_no_other(pair: Pair) -> None:
    one, peer = pair.open(0, budget_bytes=4 * BLOCK_BYTES), BlockPeer(pair.connect(to=0))
    digests = chain(0, 4)
    assert save(one, digests) is TransferState.COMPLETED
    for count in (1, 2, 3, 4):
        with peer.leased(digests[:count]) as told:
            assert told is not None
            assert len(told.answer.blocks) == count
        assert peer.count(digests[:count]) == count
    assert save(one, chain(1, 4)) is TransferState.COMPLETED, "a lease was not given back"
    peer.close()


def test_a_lease_is_void_after_its_time() -> None:
    now_s = 0.0
    book = BlockBook(2, lease_s=30.0, clock=lambda: now_s)
    for digest in chain(0, 2):
        taken = book.take()
        assert taken is not None
        assert book.publish(taken[0], digest, b"s" * 16)
    first, held = book.lease(chain(0, 2))
    assert len(held) == 2
    now_s = 20.0
    second, _ = book.lease(chain(0, 1))
    assert book.take() is None
    book.end_leases([first])
    now_s = 49.9
    assert book.take() is not None, "the block that is leased no longer"
    assert book.take() is None
    now_s = 50.0
    assert book.take() is not None
    book.end_leases([first, second])
    book.check_integrity()


def test_a_lease_is_its_connections_alone_and_ends_with_it(pair: Pair) -> None:
    one = pair.open(0, budget_bytes=2 * BLOCK_BYTES)
    digests, others = chain(0, 2), chain(1, 2)
    assert save(one, digests) is TransferState.COMPLETED
    holder, stranger = pair.connect(to=0), pair.connect(to=0)
    told = holder.ask(Lease(tuple(digests)))
    assert told is not None
    assert isinstance(told.answer, Leased)
    assert len(told.answer.blocks) == 2
    given_back = stranger.ask(GiveBack(told.answer.lease_id))
    assert given_back is not None
    assert save(one, others) is TransferState.PARTIAL, "another peer has ended the lease"
    holder.close()
    give_up_s = time.monotonic() + 60
    while save(one, others) is not TransferState.COMPLETED:
        assert time.monotonic() < give_up_s, "a lease has outlived its connection"
        time.sleep(0.01)
    stranger.close()


def test_a_peer_that_is_gone_is_a_miss(pair: Pair) -> None:
    one, two = pair.open(0), pair.open(1)
    digests, own = chain(0, 2), chain(7, 2)
    assert save(one, digests) is TransferState.COMPLETED
    two.look_up(digests)
    one.close()
    assert failed_load(two, digests) is TierFailure.MISSING
    assert not two.find(digests).digests, "what a peer has lost is forgotten"
    two.look_up(digests)
    assert not two.find(digests).digests
    assert save(two, own) is TransferState.COMPLETED  # its own memory is used as before
    assert load(two, own) == 2


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


def test_a_block_that_a_peer_has_evicted_ends_the_load_after_those_before(pair: Pair) -> None:
    one, two = pair.open(0, budget_bytes=4 * BLOCK_BYTES), pair.open(1)
    digests = chain(0, 4)
    assert save(one, digests) is TransferState.COMPLETED
    assert load(one, digests) == 4  # its tail is given up first from now on
    two.look_up(digests)
    assert save(one, chain(1, 2)) is TransferState.COMPLETED
    assert failed_load(two, digests, completed=2) is TierFailure.MISSING
    assert len(two.find(digests).digests) == 2


def test_a_peer_that_comes_back_is_found_again(pair: Pair) -> None:
    two = pair.open(1)
    digests = chain(0, 2)
    two.look_up(digests)  # it is not there yet
    one = pair.open(0)
    assert save(one, digests) is TransferState.COMPLETED
    give_up_s = time.monotonic() + 60
    while load(two, digests) < 2:
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
        two.look_up(digests)


def test_a_transfer_that_hangs_costs_its_place(pair: Pair) -> None:
    one, two = pair.open(0), pair.open(1, connections=2, timeout_s=0.5)
    digests = chain(0, 1)
    assert save(one, digests) is TransferState.COMPLETED
    pair.wire.hangs = True
    for _ in range(3):  # the third finds no place: what hangs may still write into the other two
        two.look_up(digests)
        assert failed_load(two, digests) is TierFailure.GONE
    assert pair.wire.reads == 2


@pytest.mark.parametrize("lie", ["more blocks than were asked for", "an answer to something else", "no answer"])
def test_a_peer_that_says_what_cannot_be_is_not_read(pair: Pair, lie: str) -> None:
    lies: dict[str, msgspec.Struct] = {
        "more blocks than were asked for": Leased(1, (LeasedBlock(0, bytes(16)),) * 2),
        "an answer to something else": Counted(1),
        "no answer": GiveBack(1 << 62),
    }
    answers_to = {Count: Counted(1 << 40), GiveBack: GivenBack(), Lease: lies[lie]}

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            mutual_proof.admit(connection, token=b"t" * 32, protocol=PROTOCOL, judge=lambda _: None)
            frames = Frames(connection)
            frames.send(Described(pair.wire.agent(0, 0).describe()))
            with contextlib.suppress(OSError):
                while True:
                    frames.send(answers_to[type(questions.decode(frames.receive()))])

    with socket.create_server((HOST, pair.ports[0])) as listener:
        liar = threading.Thread(target=answer, args=(listener,))
        liar.start()
        two = pair.open(1)
        digests = chain(0, 1)
        two.look_up(digests)
        assert failed_load(two, digests) is TierFailure.MISSING
        two.close()
        liar.join(60)
    assert pair.wire.reads == 0


@pytest.mark.parametrize("wrong", ["token", "layout", "memory"])
def test_a_peer_of_another_token_layout_or_kind_of_memory_has_nothing_here(pair: Pair, wrong: str) -> None:
    one = pair.open(0)
    digests = chain(0, 1)
    assert save(one, digests) is TransferState.COMPLETED
    if wrong == "token":
        pair.token.write_bytes(b"u" * 32)
    layout = kit_layout(model_tag="another") if wrong == "layout" else LAYOUT
    two = pair.open(1, layout, device=FakeDevice() if wrong == "memory" else None)
    two.look_up(digests)
    assert not two.find(digests).digests
    assert pair.wire.reads == 0


def test_a_tier_without_its_memory_finds_nothing_and_says_what_is_missing(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_with(LAYOUT, pair.fields(0), pair.wire.agent)
    digests = chain(0, 1)
    tier.look_up(digests)
    assert load(tier, digests) == 0
    assert save(tier, digests) is TransferState.PARTIAL
    assert "call use_memory" in caplog.text
    tier.close()
    pair.open(0).close()  # its address is free again


def test_a_device_without_room_is_told(pair: Pair) -> None:
    tier = open_with(LAYOUT, pair.fields(0), pair.wire.agent)
    with pytest.raises(MemoryError, match="no room"):
        tier.use_memory(FakeDevice(room_bytes=100))
    tier.close()


def test_memory_is_given_back_if_nixl_does_not_take_it(pair: Pair) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TierConfigError("NIXL cannot be used")

    device = FakeDevice()
    tier = open_with(LAYOUT, pair.fields(0), refuse)  # type: ignore[arg-type]
    with pytest.raises(TierConfigError, match="NIXL"):
        tier.use_memory(device)
    assert device.room_bytes == 1 << 30
    tier.close()


def test_a_stack_hands_memory_down(pair: Pair) -> None:
    host = HostTier(LAYOUT, HostTierOptions(capacity_bytes=8 * BLOCK_BYTES))
    stack = TierStack([host, open_with(LAYOUT, pair.fields(0), pair.wire.agent)])
    assert isinstance(stack, ResidentTier)
    stack.use_memory(None)
    two = pair.open(1)
    digests = chain(0, 2)
    assert save(stack, digests) is TransferState.COMPLETED
    two.look_up(digests)
    assert load(two, digests) == 2
    stack.close()


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
        ("a:1,1GiB,token_file=t,connections=0", "connections"),
        ("a:1,1GiB,token_file=t,connections=65", "connections"),
        ("a:1,1GiB,token_file=t,prefix=x", "prefix"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(setting: str, message: str) -> None:
    with pytest.raises(TierConfigError, match=message):
        open_nixl_gpu.check_setting(LAYOUT, setting)


def test_memory_for_no_block_is_refused(pair: Pair) -> None:
    with pytest.raises(TierConfigError, match="one block needs"):
        open_with(LAYOUT, pair.fields(0, budget_bytes=BLOCK_BYTES - 1), pair.wire.agent)
    assert parse(f"{HOST}:{pair.ports[0]},1MiB,token_file=t").connections == 2
