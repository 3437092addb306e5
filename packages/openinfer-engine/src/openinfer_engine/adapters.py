"""`AdapterTable`: the adapters of an engine, as its loop sees them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from openinfer_core.control import LoadAdapter
from openinfer_core.engine import AdapterStats
from openinfer_core.request import LoadedAdapter
from openinfer_core.scheduling import StepPlan


@dataclass(frozen=True, slots=True)
class AdapterLoss:
    """An adapter could not be read again: what waits for it has to end."""

    digest: bytes
    message: str


class AdapterTable(Protocol):
    """Names, and the content that each stands for at this moment. Called from the loop's thread, but for `stats`."""

    def find(self, name: str, *, tenant: str) -> LoadedAdapter | None:
        """The adapter of that name, by its content; None if there is none that the tenant may use."""
        ...

    def count_waiting_by(self, num_waiting: Callable[[bytes], int]) -> None:
        """Called once, before the first command: how many requests of a content were never admitted.

        So long as there are any, it stays, though no name stands for it.
        """
        ...

    def begin_load(self, command: LoadAdapter, answer: Callable[[str | None], None]) -> None:
        """`answer` is called in `settle`, or in `close`, with None or why it was not loaded.

        Raises:
            Refused: it cannot be loaded.
        """
        ...

    def unload(self, name: str) -> bytes | None:
        """Takes a name away; its content, if no other name stands for it.

        Raises:
            Refused: no such adapter.
        """
        ...

    def forget(self, digest: bytes) -> None:
        """No request that waits needs this content any more, and none can name it."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether something is read, or `settle` has something to tell."""
        ...

    def settle(self) -> Sequence[AdapterLoss]:
        """Takes what was read since the last call; returns what could not be read again."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until something was read, or the time is over."""
        ...

    def applied(self, plan: StepPlan) -> None:
        """A step was applied: its adapters are in their slots."""
        ...

    def stats(self, users: dict[bytes, tuple[int, int]]) -> tuple[AdapterStats, ...]:
        """By name; of each content in `users` how many requests were admitted and how many wait. From any thread."""
        ...

    def close(self) -> None:
        """Answers what was begun. Idempotent."""
        ...
