"""NIXL between two processes, from host memory to host memory and from GPU memory to GPU memory."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from memory_peer import bytes_of, memory_of, module_of

from openinfer_nixl.agent import Memory, NixlAgent, Piece

pytestmark = pytest.mark.skipif(
    all(find_spec(name) is None for name in ("nixl", "nixl_cu13", "nixl_cu12")), reason="NIXL is not installed"
)

NUM_BLOCKS = 16
BLOCK_BYTES = 1 << 20
PATIENCE_S = 60.0


@pytest.fixture(params=["DRAM", pytest.param("VRAM", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> Memory:
    if request.param == "VRAM" and not has_gpu():
        pytest.skip("no NVIDIA GPU and CuPy")
    return request.param


def has_gpu() -> bool:
    try:
        return module_of("VRAM").cuda.runtime.getDeviceCount() > 0
    except Exception:  # noqa: BLE001 - CuPy's own kinds, without a driver too
        return False


@contextmanager
def peer(kind: Memory) -> Generator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    script = Path(__file__).with_name("memory_peer.py")
    command = [sys.executable, str(script), kind, str(NUM_BLOCKS), str(BLOCK_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = (line for line in process.stdout if line.startswith("{"))  # NIXL prints what it does
            yield process, json.loads(next(lines))
        finally:
            process.kill()


class Reader:
    """This process's memory, of as many blocks as the peer's, and its agent."""

    def __init__(self, kind: Memory, stack: ExitStack) -> None:
        self._kind: Memory = kind
        self._memory, self._address = memory_of(kind, NUM_BLOCKS * BLOCK_BYTES)
        self._agent = NixlAgent(self._address, self._memory.nbytes, memory=kind)
        stack.callback(self._agent.close)

    def meet(self, told: dict[str, Any]) -> str:
        return self._agent.meet(bytes.fromhex(told["description"]))

    def read(self, name: str, told: dict[str, Any], block: int, *, into: int) -> None:
        remote, local = told["address"] + block * BLOCK_BYTES, self._address + into * BLOCK_BYTES
        self._agent.read(name, [Piece(remote, local, BLOCK_BYTES)], timeout_s=PATIENCE_S)

    def sums(self) -> list[str]:
        held = bytes_of(self._kind, self._memory)
        return [hashlib.sha256(held[at : at + BLOCK_BYTES]).hexdigest() for at in range(0, len(held), BLOCK_BYTES)]


def test_blocks_of_another_process_land_as_they_are_in_any_order(kind: Memory) -> None:
    with ExitStack() as stack:
        _, told = stack.enter_context(peer(kind))
        reader = Reader(kind, stack)
        name = reader.meet(told)
        for block in range(NUM_BLOCKS):
            reader.read(name, told, block, into=NUM_BLOCKS - 1 - block)
        assert reader.sums() == told["sums"][::-1]


def test_a_peer_that_has_died_is_a_connection_error_or_still_mapped_and_changes_no_other_block(kind: Memory) -> None:
    with ExitStack() as stack:
        process, told = stack.enter_context(peer(kind))
        reader = Reader(kind, stack)
        name = reader.meet(told)
        reader.read(name, told, 0, into=0)
        process.kill()
        process.wait()
        began_s = time.monotonic()
        try:
            reader.read(name, told, 1, into=1)
        except ConnectionError:
            pass
        else:  # a GPU's memory that this process has mapped by CUDA's IPC outlives its owner
            assert kind == "VRAM"
            assert reader.sums()[1] == told["sums"][1]
        assert time.monotonic() - began_s < 2 * PATIENCE_S
        assert reader.sums()[0] == told["sums"][0]
        empty = hashlib.sha256(bytes(BLOCK_BYTES)).hexdigest()
        assert set(reader.sums()[2:]) == {empty}
