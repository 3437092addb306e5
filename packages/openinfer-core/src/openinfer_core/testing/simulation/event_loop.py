"""`VirtualEventLoop`: asyncio in a task of a world. It waits in virtual time and is woken by other tasks."""

import asyncio
from collections.abc import Callable
from typing import Any

from openinfer_core.testing.simulation.world import Task, World


class _Selector:
    """What an event loop waits in; nothing is ever ready in it, since a virtual loop has no sockets."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: Task | None = None
        self._is_woken = False

    def select(self, timeout: float | None = None) -> list[Any]:
        world = self._world
        if self._is_woken or timeout == 0:
            world.yield_to_others()
        else:
            self._waiting = world.current
            world.park(timeout)
            self._waiting = None
        self._is_woken = False
        return []

    def wake(self) -> None:
        self._is_woken = True
        if self._waiting is not None:
            self._world.wake(self._waiting)


class VirtualEventLoop(asyncio.BaseEventLoop):
    """An event loop whose callbacks cost what the world is charged for them.

    Args:
        world: whose task runs it.
        charge: called with the number of callbacks after each turn; lets their time pass.

    Attributes:
        longest_turn_s: the most that one turn of the loop has taken so far.
    """

    def __init__(self, world: World, *, charge: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self._world = world
        self._charge = charge
        self._selector = _Selector(world)
        self.longest_turn_s = 0.0

    def _run_once(self) -> None:
        num_callbacks = len(self._ready)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]
        began_s = self._world.now_s
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        if self._charge is not None:
            self._charge(max(1, num_callbacks))
        if num_callbacks:
            self.longest_turn_s = max(self.longest_turn_s, self._world.now_s - began_s)

    def call_at_from_outside(self, when_s: float, call: Callable[[], object]) -> None:
        """`call_at` for another task of the world."""
        if self.is_closed():
            return
        self.call_at(when_s, call)
        self._write_to_self()

    def _process_events(self, event_list: list[Any]) -> None:
        del event_list

    def _write_to_self(self) -> None:
        self._selector.wake()
