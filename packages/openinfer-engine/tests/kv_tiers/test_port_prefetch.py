"""A port brings blocks from slow tiers into the fastest one, on all ranks; what fails there costs no request."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from openinfer_engine.kv_tiers.port import PoolTierPort
from openinfer_kv_cache import Digest, KvDtype, KvLayout, KvSpec, KvTier, PagedGroup, PagedTensor, PrefetchingPort
from openinfer_kv_offload import DiskTier, DiskTierOptions, HostTier, HostTierOptions, TierStack

TENSOR = PagedTensor(name="k", num_heads=1, head_dim=8, dtype=KvDtype.FLOAT32)
SPEC = KvSpec(model_tag="m", paged=(PagedGroup(name="attention", num_layers=2, tensors=(TENSOR,)),))
LAYOUT = KvLayout.from_spec(SPEC, block_size_tokens=4)
DIGESTS = [Digest(bytes([number]) * 16) for number in range(4)]
CONTENT = [bytes([number + 1]) * LAYOUT.block_bytes for number in range(4)]


class Share:
    """Another rank's."""

    def __init__(self) -> None:
        self.prefetched: list[Sequence[Digest]] = []
        self.faults = 0

    def prefetch(self, digests: Sequence[Digest]) -> None:
        self.prefetched.append(digests)

    def stats(self) -> tuple[Any, ...]:
        return ()

    def close(self) -> None: ...


@pytest.fixture
def stack(tmp_path: Path) -> TierStack:
    host = HostTier(LAYOUT, HostTierOptions(capacity_bytes=16 * LAYOUT.block_bytes))
    disk = DiskTier(LAYOUT, DiskTierOptions(folder=str(tmp_path / "kv"), budget_bytes=2**20))
    disk.save(DIGESTS, [memoryview(each) for each in CONTENT]).wait()
    return TierStack([host, disk])


@pytest.fixture
def share() -> Share:
    return Share()


@pytest.fixture
def port(stack: TierStack, share: Share) -> Iterator[PoolTierPort]:
    pool = np.zeros((8, LAYOUT.block_bytes), np.uint8)
    blocks = [memoryview(block) for block in pool]
    port = PoolTierPort(cast("KvTier", stack), blocks, load_timeout_s=10.0, shares=[cast("Any", share)])
    yield port
    port.close()


def test_blocks_are_brought_up_on_all_ranks(port: PoolTierPort, stack: TierStack, share: Share) -> None:
    assert isinstance(port, PrefetchingPort)
    assert port.prefetch_blocks == 4
    found = port.prefetch(DIGESTS)
    assert found.transfer is not None
    while not found.transfer.is_over():
        found.transfer.wait(1.0)
    assert (found.num_held, found.transfer.completed_blocks) == (4, 4)
    assert [each.stored_blocks for each in stack.counters()] == [4, 4]
    assert port.prefetch(DIGESTS) == (4, None)
    assert share.prefetched == [DIGESTS]


def test_a_tier_that_raises_is_not_asked_again(port: PoolTierPort, stack: TierStack) -> None:
    def raising(digests: Sequence[Digest]) -> Any:
        raise RuntimeError("injected")

    stack.find = raising
    assert port.prefetch(DIGESTS) == (0, None)
    assert (port.faults, port.prefetch_blocks) == (1, 0)


def test_one_tier_brings_nothing_up() -> None:
    tier = HostTier(LAYOUT, HostTierOptions(capacity_bytes=4 * LAYOUT.block_bytes))
    port = PoolTierPort(cast("KvTier", tier), [memoryview(bytearray(LAYOUT.block_bytes))], load_timeout_s=1.0)
    assert (port.prefetch_blocks, port.prefetch(DIGESTS)) == (0, (0, None))
    port.close()
