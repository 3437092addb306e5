"""`Agent`: what moves bytes from a peer's memory into this process's; `NixlAgent` does it through NIXL."""

import importlib
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from openinfer_kv_offload import TierConfigError

_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
_BACKEND = "UCX"
# UCX reads through CUDA's IPC only where it sees NVLinks, else over TCP with a copy on each side. A virtual machine
# need not show them, and of one GPU there are none: the copy engines are faster than TCP in any case.
_READS_WITHOUT_NVLINK = ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
_LONGEST_NAP_S = 0.001
_NAME_BYTES = 8
_DEVICE_BYTES = 2  # of a description, before what NIXL says


Memory: TypeAlias = Literal["DRAM", "VRAM"]
"""As NIXL names a host's memory and a GPU's."""


class Piece(NamedTuple):
    """Bytes that a transfer copies."""

    remote: int  # address in the peer's memory
    local: int  # and in this process's
    num_bytes: int


class StillMoving(ConnectionError):
    """A transfer has not ended in its time, and may write into its memory later."""


class Agent(Protocol):
    """Of one process, with one piece of memory; used from several threads at once."""

    def describe(self) -> bytes:
        """What a peer needs to read the memory: who has it can read and write all of it."""
        ...

    def meet(self, description: bytes) -> str:
        """The name of the peer that a description is of.

        Raises:
            ConnectionError: it cannot be reached.
        """
        ...

    def part(self, peer: str) -> None:
        """Forgets a peer; one that is not known is no error."""
        ...

    def read(self, peer: str, pieces: Sequence[Piece], *, timeout_s: float) -> None:
        """Copies pieces of a peer's memory into this one's, in one transfer.

        Raises:
            StillMoving: the time is over.
            ConnectionError: the peer is gone, or has no such memory.
        """
        ...

    def close(self) -> None:
        """Takes the memory back; idempotent."""
        ...


class NixlAgent:
    """An agent of NIXL over UCX.

    Args:
        address: of the memory, which outlives the agent.
        num_bytes: of it.
        memory: its kind, and that of all peers.
        device: number of the GPU that it is of, as this process counts them.

    Raises:
        TierConfigError: NIXL is not installed.
    """

    def __init__(self, address: int, num_bytes: int, *, memory: Memory = "DRAM", device: int = 0) -> None:
        api = import_nixl()
        if memory == "VRAM":
            os.environ.setdefault(*_READS_WITHOUT_NVLINK)
        self._lock = threading.Lock()
        self._memory: Memory = memory
        self._device = device
        self._devices: dict[str, int] = {}  # of peers, as their processes count them
        config = api.nixl_agent_config(backends=[_BACKEND])
        self._agent: Any = api.nixl_agent(f"openinfer-{secrets.token_hex(_NAME_BYTES)}", config)
        self._registered: Any = self._agent.register_memory([(address, num_bytes, device, "")], memory)

    def describe(self) -> bytes:
        with self._lock:
            return self._device.to_bytes(_DEVICE_BYTES, "little") + self._agent.get_agent_metadata()

    def meet(self, description: bytes) -> str:
        device, metadata = description[:_DEVICE_BYTES], description[_DEVICE_BYTES:]
        with self._lock:
            try:
                said: bytes | str = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise ConnectionError(f"NIXL cannot reach the peer: {error}") from error
            name = said.decode() if isinstance(said, bytes) else said
            self._devices[name] = int.from_bytes(device, "little")
        return name

    def part(self, peer: str) -> None:
        with self._lock:
            self._devices.pop(peer, None)
            try:
                self._agent.remove_remote_agent(peer)
            except Exception:  # noqa: BLE001 - NIXL's own kinds; a peer that it has lost already
                return

    def read(self, peer: str, pieces: Sequence[Piece], *, timeout_s: float) -> None:
        give_up_s = time.monotonic() + timeout_s
        handle, state = self._begin(peer, pieces)
        nap_s = 0.0
        while state == "PROC" and time.monotonic() < give_up_s:
            time.sleep(nap_s)
            nap_s = min(_LONGEST_NAP_S, nap_s + 1e-5)
            with self._lock:
                state = _checked(lambda: self._agent.check_xfer_state(handle))
        with self._lock:
            released = _checked(lambda: self._agent.release_xfer_handle(handle) or "DONE")
        if state == "PROC" or released != "DONE":
            num_bytes = sum(piece.num_bytes for piece in pieces)
            raise StillMoving(f"NIXL has not moved {num_bytes} bytes within {timeout_s:g} s")
        if state != "DONE":
            raise ConnectionError(f"NIXL's transfer ended as {state}")

    def close(self) -> None:
        registered, self._registered = self._registered, None
        if registered is not None:
            with self._lock:
                self._agent.deregister_memory(registered)

    def _begin(self, peer: str, pieces: Sequence[Piece]) -> tuple[Any, str]:
        with self._lock:
            try:
                agent = self._agent
                there = [(piece.remote, piece.num_bytes, self._devices[peer]) for piece in pieces]
                here = [(piece.local, piece.num_bytes, self._device) for piece in pieces]
                there, here = agent.get_xfer_descs(there, self._memory), agent.get_xfer_descs(here, self._memory)
                handle = agent.initialize_xfer("READ", here, there, peer)
                return handle, agent.transfer(handle)
            except Exception as error:
                raise ConnectionError(f"NIXL refuses the transfer: {error}") from error


def _checked(ask: Any) -> str:
    try:
        return ask()
    except Exception:  # noqa: BLE001 - NIXL's own kinds
        return "ERR"


def import_nixl(modules: Sequence[str] = _MODULES) -> Any:
    """NIXL's module; raises `TierConfigError` if it is not installed."""
    for name in modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in {name, name.partition(".")[0]}:
                raise TierConfigError(f"NIXL cannot be used: {error}") from error
    raise TierConfigError(
        "NIXL is not installed: pip install --no-deps nixl-cu13 (its wheel names PyTorch, and does not need it)"
    )
