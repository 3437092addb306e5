"""`Agent`: what moves bytes from a peer's memory into this process's; `NixlAgent` does it through NIXL."""

import importlib
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

from openinfer_kv_offload import TierConfigError

_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
_BACKEND = "UCX"
_LONGEST_NAP_S = 0.001
_NAME_BYTES = 8


Memory: TypeAlias = Literal["DRAM", "VRAM"]
"""As NIXL names a host's memory and a GPU's."""


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

    def read(self, peer: str, remote: int, local: int, num_bytes: int, *, timeout_s: float) -> None:
        """Copies bytes of a peer's memory into this one's, between two addresses.

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
        self._lock = threading.Lock()
        self._memory: Memory = memory
        self._device = device
        config = api.nixl_agent_config(backends=[_BACKEND])
        self._agent: Any = api.nixl_agent(f"openinfer-{secrets.token_hex(_NAME_BYTES)}", config)
        self._registered: Any = self._agent.register_memory([(address, num_bytes, device, "")], memory)

    def describe(self) -> bytes:
        with self._lock:
            return self._agent.get_agent_metadata()

    def meet(self, description: bytes) -> str:
        with self._lock:
            try:
                name: bytes | str = self._agent.add_remote_agent(description)
            except Exception as error:
                raise ConnectionError(f"NIXL cannot reach the peer: {error}") from error
        return name.decode() if isinstance(name, bytes) else name

    def part(self, peer: str) -> None:
        with self._lock:
            try:
                self._agent.remove_remote_agent(peer)
            except Exception:  # noqa: BLE001 - NIXL's own kinds; a peer that it has lost already
                return

    def read(self, peer: str, remote: int, local: int, num_bytes: int, *, timeout_s: float) -> None:
        give_up_s = time.monotonic() + timeout_s
        handle, state = self._begin(peer, remote, local, num_bytes)
        nap_s = 0.0
        while state == "PROC" and time.monotonic() < give_up_s:
            time.sleep(nap_s)
            nap_s = min(_LONGEST_NAP_S, nap_s + 1e-5)
            with self._lock:
                state = _checked(lambda: self._agent.check_xfer_state(handle))
        with self._lock:
            released = _checked(lambda: self._agent.release_xfer_handle(handle) or "DONE")
        if state == "PROC" or released != "DONE":
            raise StillMoving(f"NIXL has not moved {num_bytes} bytes within {timeout_s:g} s")
        if state != "DONE":
            raise ConnectionError(f"NIXL's transfer ended as {state}")

    def close(self) -> None:
        registered, self._registered = self._registered, None
        if registered is not None:
            with self._lock:
                self._agent.deregister_memory(registered)

    def _begin(self, peer: str, remote: int, local: int, num_bytes: int) -> tuple[Any, str]:
        with self._lock:
            try:
                agent = self._agent
                there = agent.get_xfer_descs([(remote, num_bytes, self._device)], self._memory)
                here = agent.get_xfer_descs([(local, num_bytes, self._device)], self._memory)
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
