"""The tiers of this package as the conformance kit opens them."""

import itertools
from collections.abc import Callable
from pathlib import Path

from openinfer_kv_cache import KvLayout
from openinfer_kv_cache.testing.tier_contract import FaultInjector
from openinfer_kv_offload.disk.tier import DiskTier, DiskTierOptions
from openinfer_kv_offload.format.record import HEADER_BYTES, record_bytes
from openinfer_kv_offload.host.options import HostPolicy, HostTierOptions
from openinfer_kv_offload.host.tier import HostTier
from openinfer_kv_offload.remote.object_store import ObjectStore
from openinfer_kv_offload.remote.tier import RemoteTier, RemoteTierOptions
from openinfer_kv_offload.stack.tier import StackOptions, TierStack, WriteMode
from openinfer_kv_offload.transfer.memory import WrapMedium, as_it_is
from openinfer_kv_offload.transfer.queue import QueueOptions

CAPACITY_BLOCKS = 12
_SEGMENT_RECORDS = 4
# The writer gives up one whole segment at a time, so it needs one more than it certainly keeps.
_BUDGET_RECORDS = CAPACITY_BLOCKS + _SEGMENT_RECORDS


class HostCase:
    """A `HostTier` of `CAPACITY_BLOCKS`."""

    is_persistent = False
    capacity_blocks = CAPACITY_BLOCKS

    def __init__(self, policy: HostPolicy = HostPolicy.LRU, queue: QueueOptions | None = None) -> None:
        self._policy = policy
        self._queue = queue or QueueOptions()

    def open(self, layout: KvLayout, faults: FaultInjector) -> HostTier:
        return _host(layout, faults.wrap, self._queue, self._policy)


class DiskCase:
    """A `DiskTier` of a few small segments."""

    is_persistent = True
    capacity_blocks = CAPACITY_BLOCKS

    def __init__(self, folder: Path, queue: QueueOptions | None = None) -> None:
        self._folder = folder
        self._queue = queue or QueueOptions()

    def open(self, layout: KvLayout, faults: FaultInjector) -> DiskTier:
        return _disk(layout, self._folder, faults.wrap, self._queue)


class StackCase:
    """Host over disk; one host block for every two on the disk, and faults on both only with `faulty_disk`."""

    capacity_blocks = 8

    def __init__(self, folder: Path, write: WriteMode, *, faulty_disk: bool, queue: QueueOptions | None = None) -> None:
        self.is_persistent = write is WriteMode.THROUGH
        self._folder = folder
        self._write = write
        self._faulty_disk = faulty_disk
        self._queue = queue or QueueOptions()

    def open(self, layout: KvLayout, faults: FaultInjector) -> TierStack:
        host = _host(layout, faults.wrap, self._queue, HostPolicy.LRU)
        disk = _disk(layout, self._folder, faults.wrap if self._faulty_disk else as_it_is, self._queue)
        return TierStack([host, disk], StackOptions(write=self._write))


class RemoteCase:
    """A `RemoteTier` under a prefix of its own, on the running server that `connect` reaches.

    With more than one connection a fault may meet any block of a transfer; the kit wants to know which.
    """

    is_persistent = True
    capacity_blocks = CAPACITY_BLOCKS
    _numbers = itertools.count()

    def __init__(
        self, connect: Callable[[], ObjectStore], *, connections: int = 1, queue: QueueOptions | None = None
    ) -> None:
        self._connect = connect
        self._connections = connections
        self._queue = queue or QueueOptions()
        self._prefix = f"case-{next(self._numbers)}"

    def open(self, layout: KvLayout, faults: FaultInjector) -> RemoteTier:
        options = RemoteTierOptions(
            budget_bytes=CAPACITY_BLOCKS * (HEADER_BYTES + layout.block_bytes),
            prefix=self._prefix,
            connections=self._connections,
            queue=self._queue,
        )
        return RemoteTier(layout, self._connect(), options, wrap_medium=faults.wrap)


def _host(layout: KvLayout, wrap_medium: WrapMedium, queue: QueueOptions, policy: HostPolicy) -> HostTier:
    place_bytes = -(-layout.block_bytes // 64) * 64
    options = HostTierOptions(capacity_bytes=CAPACITY_BLOCKS * place_bytes, policy=policy, queue=queue)
    return HostTier(layout, options, wrap_medium=wrap_medium)


def _disk(layout: KvLayout, folder: Path, wrap_medium: WrapMedium, queue: QueueOptions) -> DiskTier:
    size = record_bytes(layout.block_bytes)
    options = DiskTierOptions(
        folder=str(folder), budget_bytes=_BUDGET_RECORDS * size, segment_bytes=_SEGMENT_RECORDS * size, queue=queue
    )
    return DiskTier(layout, options, wrap_medium=wrap_medium)
