"""`VirtualEventLoop`: asyncio in a task of a world. It waits in virtual time and is woken by other tasks."""

import asyncio
from collections.abc import Callable
from typing import Any

from openinfer_core.testing.simulation.world import Task, World


class _Selector:
    """What an event loop waits in, until another task wakes it or what it listens to is readable."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: Task | None = None
        self._is_woken = False
        self.readers: dict[Any, asyncio.Handle] = {}  # by end of a socket

    def select(self, timeout: float | None = None) -> list[asyncio.Handle]:
        world = self._world
        if self._is_woken or timeout == 0 or self._readable():
            world.yield_to_others()
        else:
            self._waiting = world.current
            world.park(timeout)
            self._waiting = None
        self._is_woken = False
        return self._readable()

    def _readable(self) -> list[asyncio.Handle]:
        return [handle for end, handle in self.readers.items() if end.is_readable]

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

    def time(self) -> float:
        return self._world.now_s

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

    # --- sockets ----------------------------------------------------------------------------------------

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self.remove_reader(fd)
        self._selector.readers[fd.end] = asyncio.Handle(callback, args, self)
        fd.end.watchers.append(self._selector.wake)

    def remove_reader(self, fd: Any) -> bool:
        handle = self._selector.readers.pop(fd.end, None)
        if handle is None:
            return False
        handle.cancel()
        fd.end.watchers.remove(self._selector.wake)
        return True

    async def connect_accepted_socket(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], sock: Any, **options: Any
    ) -> tuple[Any, Any]:
        """As asyncio has it, without TLS."""
        del options
        protocol = protocol_factory()
        transport = sock.end.into_transport(self, {"socket": sock})
        transport.set_protocol(protocol)
        transport.on_over = sock.close
        protocol.connection_made(transport)
        return transport, protocol

    async def create_connection(self, protocol_factory: Any, *, sock: Any, **options: Any) -> tuple[Any, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return await self.connect_accepted_socket(protocol_factory, sock, **options)

    create_unix_connection = create_connection  # pyright: ignore[reportAssignmentType]

    async def connect_read_pipe(self, protocol_factory: Any, pipe: Any) -> tuple[Any, Any]:
        """As asyncio has it; what was read ahead of it comes first."""
        transport, protocol = await self.connect_accepted_socket(protocol_factory, pipe)
        read_ahead = pipe.take_read_ahead()
        if read_ahead:
            transport.inherit("arrive", read_ahead)
        return transport, protocol

    def _process_events(self, event_list: list[Any]) -> None:
        for handle in event_list:
            self._add_callback(handle)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def _write_to_self(self) -> None:
        self._selector.wake()
