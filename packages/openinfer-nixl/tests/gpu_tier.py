"""Two tiers of the kind `nixl-gpu` in one process, on this machine's memory or on that of a device that is none."""

import ctypes
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fake_agents import Wire

from openinfer_kv_cache import KvLayout, MemorySource
from openinfer_kv_cache.testing.device_blocks import FakeDeviceBlock
from openinfer_kv_cache.testing.tier_cases import kit_layout
from openinfer_kv_cache.testing.tier_contract import FaultInjector
from openinfer_nixl.gpu.messages import PROTOCOL, Answer, answers
from openinfer_nixl.gpu.settings import GpuFields, open_with, parse
from openinfer_nixl.gpu.tier import GpuTier
from openinfer_nixl.peers import PeerConnection

# An address of loopback that no other test has, so that a port that was free stays free until it is used.
HOST = f"127.{secrets.randbelow(250) + 1}.{secrets.randbelow(250)}.{secrets.randbelow(250) + 1}"
LAYOUT = kit_layout()
BLOCK_BYTES = LAYOUT.block_bytes


def free_port() -> int:
    with socket.create_server((HOST, 0)) as taken:
        return taken.getsockname()[1]


class FakeDevice:
    """A device whose memory is this machine's, with room for so many bytes."""

    def __init__(self, room_bytes: int = 1 << 30) -> None:
        self.room_bytes = room_bytes
        self.threads: set[int] = set()  # whose device it is

    def allocate(self, num_bytes: int) -> "FakeDeviceMemory":
        if num_bytes > self.room_bytes:
            raise MemoryError(f"no room for {num_bytes} bytes")
        self.room_bytes -= num_bytes
        return FakeDeviceMemory(self, num_bytes)


class FakeDeviceMemory:
    device = 3

    def __init__(self, of: FakeDevice, num_bytes: int) -> None:
        self._of = of
        self._memory = np.zeros(num_bytes, np.uint8)
        self._open_bytes = num_bytes

    @property
    def address(self) -> int:
        return self._memory.ctypes.data

    def use(self) -> None:
        self._of.threads.add(threading.get_ident())

    def copy_out(self, blocks: Sequence[FakeDeviceBlock], offsets_bytes: Sequence[int]) -> list[bytes]:
        return list(blocks[0].mover.copy_out(blocks, self._views(blocks, offsets_bytes)))

    def copy_in(self, blocks: Sequence[FakeDeviceBlock], offsets_bytes: Sequence[int]) -> list[bytes]:
        return list(blocks[0].mover.copy_in(blocks, self._views(blocks, offsets_bytes)))

    def close(self) -> None:
        self._of.room_bytes += self._open_bytes
        self._open_bytes = 0

    def _views(self, blocks: Sequence[FakeDeviceBlock], offsets_bytes: Sequence[int]) -> list[memoryview]:
        sizes = [block.nbytes for block in blocks]
        return [self._memory.data[begin : begin + size] for begin, size in zip(offsets_bytes, sizes, strict=True)]


class Pair:
    """Two tiers that are each other's peers."""

    def __init__(self, folder: Path) -> None:
        self.token = folder / "token"
        self.token.write_bytes(b"t" * 32)
        self.wire = Wire()
        self.ports = (free_port(), free_port())
        self._open = ExitStack()

    def fields(self, number: int, **changed: Any) -> GpuFields:
        here, there = self.ports[number], self.ports[1 - number]
        setting = f"{HOST}:{here},1MiB,token_file={self.token},peers={HOST}:{there}"
        given = {"budget_bytes": 64 * BLOCK_BYTES, "timeout_s": 60.0, **changed}
        return msgspec.structs.replace(parse(setting), **given)

    def open(
        self, number: int, layout: KvLayout = LAYOUT, *, device: MemorySource | None = None, **changed: Any
    ) -> GpuTier:
        tier = open_with(layout, self.fields(number, **changed), self.wire.agent)
        self._open.callback(tier.close)
        tier.use_memory(device)
        return tier

    def connect(self, *, to: int) -> "PeerConnection[Answer]":
        """As a peer without a tier."""
        agent, said = self.wire.agent(0, 0), {"token": b"t" * 32, "layout": f"{LAYOUT.digest} DRAM"}
        there = (HOST, self.ports[to])
        return PeerConnection(there, agent, answers, **said, timeout_s=60.0, protocol=PROTOCOL)

    def close(self) -> None:
        self._open.close()


class Case:
    """One tier without peers, for the kit."""

    is_persistent = False
    capacity_blocks = 8

    def __init__(self, folder: Path, wire: Wire) -> None:
        self._folder, self._wire = folder, wire

    def open(self, layout: KvLayout, faults: FaultInjector) -> GpuTier:
        token = self._folder / "token"
        token.write_bytes(b"t" * 32)
        fields = parse(f"{HOST}:0,1MiB,token_file={token},connections=1")
        fields = msgspec.structs.replace(fields, budget_bytes=self.capacity_blocks * layout.block_bytes)
        tier = open_with(layout, fields, self._wire.agent, wrap_medium=faults.wrap)
        tier.use_memory(None)
        return tier


def overwrite(address: int, num_bytes: int) -> None:
    """As an owner that has given a place to another block."""
    ctypes.memset(address, 7, num_bytes)
