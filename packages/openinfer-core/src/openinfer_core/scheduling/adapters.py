"""Adapters of a step: who decides which of them lie in the device's adapter slots.

    request names a digest ─► AdapterPort.is_held? ─► admitted: StepPlan.adapter_loads says digest and slot
                                  └── no: hold(digest), and it waits, as for a KV tier

Public as names of `openinfer_core.scheduling`.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from openinfer_core.events import FailureKind, TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """An adapter is copied into an adapter slot before a step's rows run."""

    slot: int
    digest: bytes
    """`LoadedAdapter.digest`."""


class AdapterPort(Protocol):
    """What a scheduler asks of the adapters in host memory. Called from the thread that plans."""

    def is_held(self, digest: bytes) -> bool:
        """Whether every rank holds it, so that the next plan may load it into a slot."""
        ...

    def hold(self, digest: bytes) -> None:
        """Begins to bring it into host memory, unless that has begun. What does not come is told by
        `PlacesAdapters.drop_adapter`.
        """
        ...

    def pin(self, digest: bytes) -> None:
        """It is part of a plan that is being made: it stays until that step was applied. It is held."""
        ...

    def unpin(self, digest: bytes) -> None:
        """It is part of no plan after all."""
        ...

    def release(self, digest: bytes) -> None:
        """No request waits for it any more."""
        ...


@runtime_checkable
class PlacesAdapters(Protocol):
    """A `Scheduler` that chooses what lies in `SchedulerConfig.max_adapters` adapter slots.

    It declares `SchedulerCapabilities.places_adapters`; `--lora` is refused without. `SlotStart.request.adapter.slot`
    says the slot of each request that runs, which stays its own until the request has ended.
    """

    def use_adapters(self, port: AdapterPort) -> None:
        """Called once, before the first request."""
        ...

    def drop_adapter(self, digest: bytes, kind: FailureKind, message: str) -> list[TokenEvent]:
        """Ends the requests that wait for an adapter and were never admitted; those admitted run on in their slot."""
        ...

    def adapter_users(self) -> dict[bytes, tuple[int, int]]:
        """Of each adapter that unfinished requests name: how many were admitted, and how many wait."""
        ...
