"""What `--kv-tier` chooses, and what it is refused for."""

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from openinfer_core import InvalidRequest, Plugin, Refused, UnknownPlugin
from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import Scheduler, SchedulerCapabilities
from openinfer_engine import EngineOptions
from openinfer_engine.kv_tiers import MemoryPrefault, OpenTiers, begin_prefault, choose_tiers, open_port, require_tiered
from openinfer_engine.kv_tiers.choice import ChosenTiers, require_snapshots
from openinfer_engine.kv_tiers.pool import HostPool
from openinfer_engine.kv_tiers.prefault import available_bytes
from openinfer_kv_cache import KvDtype, KvLayout, KvSpec, KvTier, PagedGroup, PagedTensor, StateSlotGroup, StateTensor
from openinfer_kv_cache.tiers import KV_TIERS

TENSOR = PagedTensor(name="k", num_heads=1, head_dim=8, dtype=KvDtype.FLOAT32)
SPEC = KvSpec(model_tag="m", paged=(PagedGroup(name="attention", num_layers=2, tensors=(TENSOR,)),))
LAYOUT = KvLayout.from_spec(SPEC, block_size_tokens=4)


class PlainTier:
    """A tier that knows memory of this machine only."""

    name = "plain"
    layout = LAYOUT
    accepts_saves = True
    digest_key: bytes | None = None
    is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def find(self, digests: Any) -> Any: ...

    def load(self, hit: Any, blocks: Any, *, timeout_s: float | None = None) -> Any: ...

    def save(self, digests: Any, blocks: Any, *, timeout_s: float | None = None) -> Any: ...

    def counters(self) -> Any: ...


class _Huge:
    def __len__(self) -> int:
        return 1 << 50


class HugeTier(PlainTier):
    """A tier that wants a petabyte."""

    takes_device_blocks = True

    def pinnable_memory(self) -> Any:
        return [_Huge()]


def open_plain(layout: KvLayout, setting: str) -> PlainTier:
    assert (layout, setting) == (LAYOUT, "x")
    return PlainTier()


class _Ours(EntryPoint):
    def load(self) -> Any:
        return open_plain


def plain(key_file: str | None = None) -> ChosenTiers:
    plugin = Plugin(KV_TIERS, "plain", _Ours("plain", "openinfer_kv_offload.settings:PlainTier", KV_TIERS))
    return ChosenTiers(settings=("plain=x",), plugins=(plugin,), opener=plugin, opener_setting="x", key_file=key_file)


def test_one_tier_is_opened_by_its_own_plugin_and_several_by_the_stack() -> None:
    one = choose_tiers(EngineOptions(kv_tier=["host=1GiB,policy=lfu"]))
    assert one is not None
    assert (one.opener.name, one.opener_setting) == ("host", "1GiB,policy=lfu")
    two = choose_tiers(EngineOptions(kv_tier=["host=1GiB", "disk=/x,2GiB"]))
    assert two is not None
    assert (two.opener.name, two.opener_setting) == ("stack", "host=1GiB;disk=/x,2GiB")
    assert list(two.parts) == ["kv tier 1", "kv tier 2"]
    assert two.parts["kv tier 2"].startswith("disk=/x,2GiB (openinfer-kv-offload ")
    assert choose_tiers(EngineOptions()) is None


def test_each_rank_opens_tiers_with_its_number_in_their_setting(tmp_path: Path) -> None:
    setting = f"disk={tmp_path}/{{rank}},1MiB"
    chosen = choose_tiers(EngineOptions(kv_tier=[setting], tensor_parallel_size=2))
    assert chosen is not None
    assert chosen.parts["kv tier 1"].startswith(f"{setting} on each of 2 ranks (openinfer-kv-offload ")
    for rank in range(2):
        spec = KvSpec(model_tag="m", paged=SPEC.paged, num_ranks=2, rank_index=rank)
        chosen.open(KvLayout.from_spec(spec, block_size_tokens=4)).tier.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (["tape=1TiB"], UnknownPlugin, "'tape'"),
        (["=1TiB"], InvalidRequest, "NAME=SETTING"),
        (["host=1GiB;disk=/x,1GiB", "disk=/y,1GiB"], InvalidRequest, "has a ';'"),
    ],
)
def test_settings_that_name_nothing_are_refused(settings: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose_tiers(EngineOptions(kv_tier=settings))


def test_models_with_recurrent_states_are_refused_without_copies_of_them() -> None:
    require_snapshots(SPEC, 0)
    state = StateTensor(name="state", shape=(4,), dtype=KvDtype.FLOAT32)
    states = StateSlotGroup(name="linear", num_layers=1, tensors=(state,))
    spec = KvSpec(model_tag="m", paged=SPEC.paged, slots=(states,))
    require_snapshots(spec, 1)
    with pytest.raises(Refused, match=r"recurrent states \(linear\).* state_snapshot_bytes has room for none"):
        require_snapshots(spec, 0)


def test_a_lasting_tier_without_a_key_needs_a_key_file(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="give --kv-key-file"):
        plain().open(LAYOUT)
    path = tmp_path / "key"
    path.write_bytes(b"short")
    with pytest.raises(InvalidRequest, match="it must have 16 to 64"):
        plain(str(path)).open(LAYOUT)
    path.write_bytes(bytes(range(32)))
    assert plain(str(path)).open(LAYOUT).digest_key == bytes(range(32))


class _Scheduler:
    def __init__(self, **declared: bool) -> None:
        self.capabilities = SchedulerCapabilities(**declared)


class _TieredScheduler(_Scheduler):
    def use_tiers(self, port: object) -> None: ...


def test_schedulers_that_declare_no_tiers_are_refused() -> None:
    with pytest.raises(Refused, match=r"the scheduler mine uses no KV tiers .* use token-budget"):
        require_tiered(cast("Scheduler", _TieredScheduler()), name="mine")


def test_a_scheduler_that_declares_tiers_and_has_no_use_tiers_is_named() -> None:
    with pytest.raises(ContractViolation, match=r"scheduler mine declares uses_kv_tiers and has no use_tiers"):
        require_tiered(cast("Scheduler", _Scheduler(uses_kv_tiers=True)), name="mine")


def test_tiers_of_a_model_with_states_need_a_scheduler_that_copies_them() -> None:
    foreign = cast("Scheduler", _TieredScheduler(uses_kv_tiers=True))
    assert require_tiered(foreign, name="mine") is foreign
    with pytest.raises(Refused, match="keeps recurrent states, and the scheduler mine plans no copies of them"):
        require_tiered(foreign, name="mine", has_states=True)
    copying = cast("Scheduler", _TieredScheduler(uses_kv_tiers=True, copies_states=True))
    assert require_tiered(copying, name="mine", has_states=True) is copying


class _OnDevice(HostPool):
    is_on_device = True


def test_a_device_needs_tiers_that_take_its_blocks() -> None:
    tiers = OpenTiers(tier=cast("KvTier", PlainTier()), digest_key=None)
    pool = np.zeros((3, LAYOUT.block_bytes // 4), np.float32)
    with pytest.raises(Refused, match="use it with --device cpu"):
        begin_prefault(tiers)
    with pytest.raises(Refused, match="use it with --device cpu"):
        open_port(tiers, pool=_OnDevice(pool), load_timeout_s=1.0)
    port = open_port(tiers, pool=HostPool(pool), load_timeout_s=1.0)
    with pytest.raises(ContractViolation, match="blocks of the pool have"):
        open_port(tiers, pool=HostPool(pool[:, :3].copy()), load_timeout_s=1.0)
    port.close()
    port.close()


class _Resident(PlainTier):
    """A tier that keeps its blocks beside the pool's."""

    takes_device_blocks = True

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def pinnable_memory(self) -> Sequence[memoryview]:
        return []

    def use_memory(self, device: Any) -> None:
        if device == "full":
            raise MemoryError("no room")
        self.given.append(device)


class _Beside(HostPool):
    source: Any = "gpu"


def test_a_tier_beside_the_pool_is_given_the_pools_device_once() -> None:
    pool = np.zeros((3, LAYOUT.block_bytes // 4), np.float32)
    for memory, expected in ((HostPool(pool), None), (_Beside(pool), "gpu")):
        tier = _Resident()
        tiers = OpenTiers(tier=cast("KvTier", tier), digest_key=None)
        open_port(tiers, pool=memory, load_timeout_s=1.0).close()
        assert tier.given == [expected]


def test_a_device_without_room_for_a_tier_is_refused() -> None:
    class Full(HostPool):
        source: Any = "full"

    tiers = OpenTiers(tier=cast("KvTier", _Resident()), digest_key=None)
    with pytest.raises(Refused, match="cannot have its memory: no room"):
        open_port(tiers, pool=Full(np.zeros((3, LAYOUT.block_bytes // 4), np.float32)), load_timeout_s=1.0)


def test_blocks_of_a_host_pool_are_its_memory() -> None:
    pool = np.zeros((3, 2, 4), np.float32)
    blocks: Sequence[Any] = HostPool(pool).blocks
    blocks[1][:4] = np.float32(7.0).tobytes()
    assert len(blocks) == 3
    assert pool[1, 0, 0] == 7.0


def test_chunks_of_slots_are_their_memory() -> None:
    pool, slots = np.zeros((3, 2, 4), np.float32), np.zeros((5, 64), np.uint8)
    chunks: Sequence[Any] = HostPool(pool, slots).states
    assert [len(each) for each in chunks] == [2] * 5
    chunks[4][1][:2] = bytes([1, 2])
    assert slots[4, 32:34].tolist() == [1, 2]


def test_memory_that_is_there_is_the_machine_s_and_the_container_s(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    for path, text in (
        ("proc/meminfo", "MemFree: 1 kB\nMemAvailable:    2048 kB\n"),
        ("sys/fs/cgroup/memory.max", "max\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    assert available_bytes(tmp_path) == 2 << 20
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1048576\n")
    assert available_bytes(tmp_path) == 1 << 20


def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    tiers = OpenTiers(tier=cast("KvTier", HugeTier()), digest_key=None)
    with pytest.raises(Refused, match="want 1048576"):
        begin_prefault(tiers)


def test_pages_are_taken_by_threads() -> None:
    memory = memoryview(bytearray(b"\1" * 10_000))
    taking = MemoryPrefault([memory])
    taking.finish()
    taking.close()
    assert [memory[place] for place in (0, 1, 4096, 8192)] == [0, 1, 0, 0]
