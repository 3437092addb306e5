"""The remote tiers against real servers: Valkey and SeaweedFS, processes of this machine."""

import os
import signal
import sys
import time

import pytest

from openinfer_kv_cache import KvTierError, PrefixHasher, TierFailure, TransferState
from openinfer_kv_cache.testing.tier_cases import chain, check_completed, empty, ended, filled, kit_layout, load, save
from openinfer_kv_cache.testing.tier_contract import InjectedFault, check_tier
from openinfer_kv_offload import (
    QueueOptions,
    RemoteTier,
    RemoteTierOptions,
    StoreAccess,
    StoreError,
    TierConfigError,
    open_tiers,
)
from openinfer_kv_offload.remote.s3_store import S3Store
from openinfer_kv_offload.remote.valkey_store import ValkeyStore
from openinfer_kv_offload.testing.cases import RemoteCase
from openinfer_kv_offload.testing.servers import S3_BUCKET, S3_ENVIRONMENT, S3Server, ValkeyServer, free_ports
from openinfer_kv_offload.testing.soak import remote_case, run_machine

LAYOUT = kit_layout()
OBJECT_BYTES = LAYOUT.block_bytes + 128
KINDS = ("valkey", "s3")
each_kind = pytest.mark.parametrize("kind", KINDS)


class Service:
    """One running server, and how a tier reaches it."""

    def __init__(self, kind, server):
        self.kind = kind
        self.server = server

    def connect(self, timeout_s=2.0):
        if self.kind == "valkey":
            return ValkeyStore(self.server.url, timeout_s=timeout_s)
        return S3Store(S3_BUCKET, endpoint=self.server.endpoint, timeout_s=timeout_s)

    def tier(self, prefix, *, timeout_s=2.0, **options):
        given = {"budget_bytes": 64 * OBJECT_BYTES, "refresh_s": 1e-9, **options}
        return RemoteTier(LAYOUT, self.connect(timeout_s), RemoteTierOptions(prefix=prefix, **given), name=self.kind)

    def setting(self, prefix):
        if self.kind == "valkey":
            return f"valkey={self.server.url},1MiB,prefix={prefix}"
        return f"s3=s3://{S3_BUCKET}/{prefix},1MiB,endpoint={self.server.endpoint}"


@pytest.fixture(scope="module", autouse=True)
def s3_environment():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in S3_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory, s3_environment):
    """Servers that no test disturbs."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    with ValkeyServer(folders["valkey"]) as valkey, S3Server(folders["s3"]) as s3:
        yield {"valkey": Service("valkey", valkey), "s3": Service("s3", s3)}


@pytest.fixture
def fragile(tmp_path):
    """Starts a server that the test may kill."""
    servers = []

    def start(kind):
        server = ValkeyServer(tmp_path) if kind == "valkey" else S3Server(tmp_path)
        server.start()
        servers.append(server)
        return Service(kind, server)

    yield start
    for server in servers:
        server.kill()


@each_kind
def test_remote_tier_keeps_the_contract(kind, running):
    check_tier(lambda: RemoteCase(running[kind].connect))


@each_kind
def test_random_use_under_faults_never_gives_wrong_bytes(kind, running):
    seen = run_machine(lambda: remote_case(running[kind].connect), steps=800)
    assert seen["loaded blocks"] > 50
    assert seen["reopened"] > 5
    assert seen["save partial"] > 0
    assert {f"fault {fault}" for fault in InjectedFault} <= seen.keys()


@each_kind
def test_tiers_are_opened_by_setting_and_stand_below_others(kind, running):
    settings = ["host=1MiB", running[kind].setting("stacked")]
    first = open_tiers(settings, LAYOUT)
    assert save(first, chain(1, 3)) is TransferState.COMPLETED
    first.close()
    again = open_tiers(settings, LAYOUT)
    assert load(again, chain(1, 3)) == 3
    loaded = {each.tier: each.loaded_blocks for each in again.counters()}
    assert loaded == {"host": 0, kind: 3}
    again.close()


@each_kind
def test_what_one_process_saves_another_finds_after_a_look(kind, running):
    writer = running[kind].tier("shared")
    reader = running[kind].tier("shared", access=StoreAccess.READ)
    assert save(writer, chain(2, 4)) is TransferState.COMPLETED
    assert load(reader, chain(2, 4)) == 0  # known from memory only; this miss makes it look
    reader.refresh()
    assert load(reader, chain(2, 4)) == 4
    with pytest.raises(KvTierError, match="access=read"):
        reader.save(chain(3, 1), filled(chain(3, 1), LAYOUT))
    reader.close()
    writer.close()


@each_kind
def test_a_miss_makes_the_tier_look_in_the_background(kind, running):
    writer, other = running[kind].tier("looking"), running[kind].tier("looking")
    save(writer, chain(4, 2))
    give_up_s = time.monotonic() + 30
    while load(other, chain(4, 2)) < 2:
        assert time.monotonic() < give_up_s, "another process's blocks were never found"
    other.close()
    writer.close()


@each_kind
def test_salts_keep_tenants_apart_on_one_server(kind, running):
    tier = running[kind].tier("tenants")
    hasher = PrefixHasher(1, key=b"k" * 16, layout_digest=LAYOUT.digest)
    one, two = (hasher.chain(hasher.root(cache_salt=salt), range(3)) for salt in ("one", "two"))
    save(tier, one)
    assert (load(tier, one), load(tier, two)) == (3, 0)
    tier.close()


@each_kind
def test_a_budget_deletes_the_least_recently_used_objects_on_the_server(kind, running):
    tier = running[kind].tier("budget", budget_bytes=4 * OBJECT_BYTES)
    old, used, new = chain(5, 2), chain(6, 2), chain(7, 2)
    for digests in (old, used):
        save(tier, digests)
    assert load(tier, old) == 2  # so that `used` is now the older
    save(tier, new)
    store = running[kind].connect()
    kept = {key.rpartition("/")[2] for key in store.list("budget/block/")}
    assert kept == {digest.hex() for digest in (*old, *new)}
    assert tier.counters()[0].evicted_blocks == 2
    store.close()
    tier.close()


@each_kind
def test_a_block_that_the_server_gave_up_is_a_miss_and_no_fault_of_the_tier(kind, running):
    tier = running[kind].tier("given-up", queue=QueueOptions(breaker_failures=1))
    digests = chain(8, 3)
    save(tier, digests)
    store = running[kind].connect()
    store.delete([f"given-up/block/{digests[1].hex()}"])
    blocks = empty(3, LAYOUT)
    transfer = tier.load(tier.find(digests), blocks)
    assert ended(transfer) is TransferState.PARTIAL
    assert (transfer.failure, transfer.completed_blocks) == (TierFailure.MISSING, 1)
    check_completed(transfer, digests, blocks, LAYOUT)
    assert save(tier, digests) is TransferState.COMPLETED  # the breaker, which one failure opens, is closed
    assert load(tier, digests) == 3
    store.close()
    tier.close()


@each_kind
def test_objects_that_are_not_ours_or_of_another_layout_are_never_given_back(kind, running):
    tier = running[kind].tier("foreign")
    store = running[kind].connect()
    digests = chain(9, 3)
    save(tier, digests)
    contents = [store.get(f"foreign/block/{digest.hex()}") for digest in digests]
    store.put(f"foreign/block/{digests[0].hex()}", bytes(contents[1]))  # another block's, with its own checksum
    store.put("foreign/block/readme", b"not a block")
    again = running[kind].tier("foreign")
    assert len(again.find(digests).digests) == 3
    assert load(again, digests) == 0
    assert again.counters()[0].corrupt_blocks == 1
    assert store.get(f"foreign/block/{digests[0].hex()}") is None
    store.close()
    again.close()
    tier.close()


@each_kind
def test_a_server_killed_in_the_middle_costs_blocks_and_nothing_else(kind, fragile):
    service = fragile(kind)
    tier = service.tier("killed", queue=QueueOptions(breaker_failures=2, breaker_cooldown_s=0.05))
    digests = chain(10, 24)
    transfers = [tier.save(digests[i : i + 4], filled(digests[i : i + 4], LAYOUT)) for i in range(0, 12, 4)]
    assert [ended(each) for each in transfers] == [TransferState.COMPLETED] * 3
    under_way = [tier.save(digests[i : i + 4], filled(digests[i : i + 4], LAYOUT)) for i in range(12, 24, 4)]
    blocks = empty(12, LAYOUT)
    loading = tier.load(tier.find(digests[:12]), blocks)
    service.server.kill()
    for transfer in (*under_way, loading):
        ended(transfer)
        assert transfer.failure in (None, TierFailure.GONE, TierFailure.BREAKER_OPEN)
    check_completed(loading, digests, blocks, LAYOUT)
    for _ in range(2):
        assert save(tier, chain(11, 1)) is TransferState.PARTIAL
    assert tier.counters()[0].failures[TierFailure.GONE] >= 2
    service.server.start()
    give_up_s = time.monotonic() + 30
    while save(tier, digests) is not TransferState.COMPLETED:
        assert time.monotonic() < give_up_s, "the tier did not come back with its server"
    while load(tier, digests) < len(digests):  # blocks of before the kill may be lost; then they are saved again
        save(tier, digests)
        assert time.monotonic() < give_up_s, "what was saved again cannot be loaded"
    tier.check_integrity()
    tier.close()


@each_kind
def test_a_server_that_hangs_meets_the_deadline_and_never_the_caller(kind, fragile):
    service = fragile(kind)
    tier = service.tier("hangs", timeout_s=0.5)
    digests = chain(12, 2)
    save(tier, digests)
    os.kill(service.server.pid, signal.SIGSTOP)
    try:
        hit = tier.find(digests)  # would hang if it asked the server
        transfer = tier.load(hit, empty(2, LAYOUT), timeout_s=0.02)
        assert ended(transfer) is TransferState.PARTIAL
        assert transfer.failure is TierFailure.DEADLINE
        save_of_new = tier.save(chain(13, 1), filled(chain(13, 1), LAYOUT))
        assert ended(save_of_new) is TransferState.PARTIAL
        assert save_of_new.failure is TierFailure.GONE  # the store's own time limit
    finally:
        os.kill(service.server.pid, signal.SIGCONT)
    tier.close()


def test_a_full_valkey_is_reported_as_full(tmp_path):
    with ValkeyServer(tmp_path, max_memory="2mb") as server:
        tier = Service("valkey", server).tier("full", budget_bytes=4096 * OBJECT_BYTES)
        transfer = tier.save(chain(14, 400), filled(chain(14, 400), LAYOUT))
        assert ended(transfer) is TransferState.PARTIAL
        assert transfer.failure is TierFailure.FULL
        tier.close()


def test_valkey_forgets_after_the_time_to_live_and_asks_for_its_password(tmp_path):
    secret = tmp_path / "password"
    secret.write_text("open sesame\n")
    with ValkeyServer(tmp_path, password="open sesame") as server:
        with pytest.raises(StoreError, match="cannot be used"):
            open_tiers([f"valkey={server.url},1MiB"], LAYOUT)
        tier = open_tiers([f"valkey={server.url},1MiB,ttl_s=0.001,password_file={secret}"], LAYOUT)
        save(tier, chain(15, 1))
        give_up_s = time.monotonic() + 30
        while load(tier, chain(15, 1)):
            assert time.monotonic() < give_up_s, "the server kept a block over its time to live"
        reader = open_tiers([f"valkey={server.url},1MiB,access=read,password_file={secret}"], LAYOUT)
        assert not load(reader, chain(15, 1))  # of the layout, which stays, it may read what is saved from now on
        reader.close()
        tier.close()


@each_kind
def test_a_writer_restores_the_layout_that_a_server_has_lost(kind, running):
    writer = running[kind].tier("lost-layout")
    running[kind].connect().delete(["lost-layout/layout"])
    with pytest.raises(StoreError, match="is not there"):
        running[kind].tier("lost-layout", access=StoreAccess.READ)
    writer.refresh()
    running[kind].tier("lost-layout", access=StoreAccess.READ).close()
    writer.close()


def test_a_server_that_is_not_there_is_refused_at_the_start():
    (port,) = free_ports(1)
    with pytest.raises(StoreError, match=rf"valkey://127.0.0.1:{port} cannot be used"):
        open_tiers([f"valkey=valkey://user@127.0.0.1:{port},1MiB"], LAYOUT)
    with pytest.raises(StoreError, match="cannot be used"):
        open_tiers([f"s3=s3://{S3_BUCKET},1MiB,endpoint=http://127.0.0.1:{port}"], LAYOUT)


def test_wrong_credentials_are_refused_at_the_start(running, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(StoreError, match="cannot be used"):
        open_tiers([running["s3"].setting("denied")], LAYOUT)


def test_a_reader_of_nothing_is_refused(running):
    with pytest.raises(StoreError, match="start a process that writes"):
        running["valkey"].tier("never-written", access=StoreAccess.READ)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("valkey=10.0.0.7:6379,1GiB", "no address of a Valkey server"),
        ("valkey=valkey://10.0.0.7:6379", "needs an address and a size"),
        ("valkey=valkey://10.0.0.7:6379,1GiB,ttl_s=0", "ttl_s is 0"),
        ("valkey=valkey://10.0.0.7:6379,1GiB,timeout_s=0", "timeout_s is 0"),
        ("valkey=valkey://10.0.0.7:6379,1GiB,connections=0", "connections is 0"),
        ("valkey=valkey://10.0.0.7:6379,1GiB,prefix=/a", "prefix is '/a'"),
        ("valkey=valkey://10.0.0.7:6379,1GiB,endpoint=x", "unknown field `endpoint`"),
        ("valkey=valkey://10.0.0.7:6379,1GiB,password_file=/nowhere", "password_file: "),
        ("valkey=valkey://user:secret@10.0.0.7:6379,1GiB", "write password_file=PATH instead"),
        ("s3=http://bucket,1GiB", "is no bucket"),
        ("s3=s3://bucket/a,1GiB,prefix=b", "has a prefix already"),
        ("s3=s3://bucket,1GiB,refresh_s=0", "refresh_s is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(setting, message):
    with pytest.raises(TierConfigError, match=message):
        open_tiers([setting], LAYOUT)


@pytest.mark.parametrize(
    ("setting", "module", "library"),
    [
        ("valkey=valkey://127.0.0.1,1MiB", "openinfer_kv_offload.remote.valkey_store", "valkey"),
        ("s3=s3://bucket,1MiB", "openinfer_kv_offload.remote.s3_store", "obstore"),
    ],
)
def test_a_tier_whose_library_is_not_installed_says_which_extra_brings_it(setting, module, library, monkeypatch):
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(TierConfigError, match=rf"needs the package {library} \(extra {setting[:2]}.*--offload"):
        open_tiers([setting], LAYOUT)


@each_kind
def test_what_another_process_saved_is_found_when_it_is_looked_up_and_not_a_list_later(running, kind):
    one, two = (running[kind].tier("looked-up", refresh_s=3600.0) for _ in range(2))
    digests = chain(7, 5)
    assert two.find(digests).digests == ()
    assert save(one, digests) is TransferState.COMPLETED
    assert two.find(digests).digests == ()
    two.look_up(digests)
    hit = two.find(digests)
    assert hit.digests == tuple(digests)
    hit.close()
    assert load(two, digests) == 5
    for tier in (one, two):
        tier.check_integrity()
        tier.close()


@each_kind
def test_a_beginning_of_what_is_looked_up_is_found(running, kind):
    one, two = (running[kind].tier("beginnings", refresh_s=3600.0) for _ in range(2))
    digests = chain(8, 6)
    save(one, digests[:4])
    two.look_up(digests)
    hit = two.find(digests)
    assert hit.digests == tuple(digests[:4])
    hit.close()
    for tier in (one, two):
        tier.close()
