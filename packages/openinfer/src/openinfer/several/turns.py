"""`Turns`: which models are awake, which requests wait, and which model gives way.

    asleep ──► waking ──► awake ──► leaving ──► sleeping ──► asleep
                 │ fails                 no new requests; those that run go on
                 └──► asleep: its own requests fail, no other is touched
    awake, leaving ──► asleep              its server has died (`lost`): the next request wakes it, which starts it anew

A request of a model that is awake runs at once. Where another model is waited for and there is no room, the least
recently used model that runs nothing goes to sleep at once; where all run something, the least recently used one takes
no more requests once the oldest waiting request of the other has waited for `turn_s`, and sleeps when its last has
ended. Models that are waited for come in order of their oldest request. So each waits for the turns of those that were
there before it and for the longest request that runs, whatever the traffic of a model that is awake.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from openinfer_core import OpenInferError

logger = logging.getLogger("openinfer.several")


class Sleeper(Protocol):
    """What sleeps and wakes; each call ends when that is done."""

    async def wake(self) -> None:
        """Raises `CannotWake`."""
        ...

    async def sleep(self) -> None:
        """Raises `CannotWake`: it could not, and is of no use."""
        ...


class CannotWake(OpenInferError):
    """A model cannot be had; the message is for clients."""


class TooMany(OpenInferError):
    """As many requests wait for a model as may."""


class Phase(Enum):
    """Of a model; see the module."""

    ASLEEP = auto()
    WAKING = auto()
    AWAKE = auto()
    LEAVING = auto()
    SLEEPING = auto()


@dataclass(slots=True, eq=False)
class _Waiting:
    since_s: float
    let_in: "asyncio.Future[None]"


@dataclass(slots=True, eq=False)
class _Model:
    name: str
    sleeper: Sleeper
    phase: Phase = Phase.ASLEEP
    running: int = 0
    used_s: float = 0.0
    waiting: deque[_Waiting] = field(default_factory=deque[_Waiting])


class Turns:
    """Used in one event loop. All models are asleep at first.

    Args:
        sleepers: by name.
        max_awake: models that hold memory at a time: waking, awake, leaving or going to sleep.
        max_waiting: requests that wait for one model.
        turn_s: see the module.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sleepers: Mapping[str, Sleeper],
        *,
        max_awake: int,
        max_waiting: int,
        turn_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = {name: _Model(name, sleeper) for name, sleeper in sleepers.items()}
        self._max_awake = max_awake
        self._max_waiting = max_waiting
        self._turn_s = turn_s
        self._clock = clock
        self._moves: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def phase(self, name: str) -> Phase:
        return self._models[name].phase

    def num_waiting(self, name: str) -> int:
        return len(self._models[name].waiting)

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncGenerator[None]:
        """Within it the model of that name is awake.

        Raises:
            CannotWake: it cannot be woken.
            TooMany: too many requests wait for it.
        """
        await self._enter(self._models[name])
        try:
            yield
        finally:
            self._leave(self._models[name])

    def lost(self, name: str) -> None:
        """The server of this model has died: it holds no memory, and is to be woken anew. Nothing to do twice."""
        model = self._models[name]
        if model.phase in (Phase.AWAKE, Phase.LEAVING):
            model.phase = Phase.ASLEEP
            self.look()

    async def close(self) -> None:
        """Ends what is under way; who waits is told. Nothing is put to sleep."""
        if self._timer is not None:
            self._timer.cancel()
        for move in tuple(self._moves):
            move.cancel()
        await asyncio.gather(*self._moves, return_exceptions=True)
        for model in self._models.values():
            self._fail(model, CannotWake("the server is shutting down"))

    async def _enter(self, model: _Model) -> None:
        if model.phase is Phase.AWAKE and not model.waiting:
            self._let_in(model)
            return
        if len(model.waiting) >= self._max_waiting:
            raise TooMany(f"{self._max_waiting} requests wait for the model {model.name}; try again later")
        waiting = _Waiting(self._clock(), asyncio.get_running_loop().create_future())
        model.waiting.append(waiting)
        self.look()
        try:
            await waiting.let_in
        except asyncio.CancelledError:
            if waiting.let_in.done() and not waiting.let_in.cancelled() and waiting.let_in.exception() is None:
                self._leave(model)  # let in, and gone before it knew
            elif waiting in model.waiting:
                model.waiting.remove(waiting)
            raise

    def _let_in(self, model: _Model) -> None:
        model.running += 1
        model.used_s = self._clock()

    def _leave(self, model: _Model) -> None:
        model.running -= 1
        model.used_s = self._clock()
        self.look()

    def _fail(self, model: _Model, error: CannotWake) -> None:
        while model.waiting:
            waiting = model.waiting.popleft()
            if not waiting.let_in.done():
                waiting.let_in.set_exception(error)

    # --- decisions --------------------------------------------------------------------------------------

    def look(self) -> None:
        """Does what can be done now; called whenever something has changed, and when a turn is over."""
        for model in self._models.values():
            if model.phase is Phase.AWAKE:
                self._admit(model)
            elif model.phase is Phase.LEAVING and not model.running:
                self._begin(model, Phase.SLEEPING)
        wanted = [each for each in self._models.values() if each.waiting and each.phase is Phase.ASLEEP]
        wanted.sort(key=lambda each: each.waiting[0].since_s)
        holding = [each for each in self._models.values() if each.phase is not Phase.ASLEEP]
        room = self._max_awake - len(holding)
        for model in wanted[: max(0, room)]:
            self._begin(model, Phase.WAKING)
        coming = sum(each.phase in (Phase.LEAVING, Phase.SLEEPING) for each in holding)
        for model in wanted[max(0, room) + coming :]:
            if not self._make_room(model):
                break

    def _admit(self, model: _Model) -> None:
        while model.waiting:
            waiting = model.waiting.popleft()
            if not waiting.let_in.done():
                self._let_in(model)
                waiting.let_in.set_result(None)

    def _make_room(self, wanted: _Model) -> bool:
        """Whether some model gives way for this one, now or when its requests have ended."""
        awake = sorted(
            (each for each in self._models.values() if each.phase is Phase.AWAKE), key=lambda each: each.used_s
        )
        idle = next((each for each in awake if not each.running), None)
        if idle is not None:
            self._begin(idle, Phase.SLEEPING)
            return True
        left_s = wanted.waiting[0].since_s + self._turn_s - self._clock()
        if not awake or left_s > 0:
            self._look_later(left_s)
            return False
        awake[0].phase = Phase.LEAVING
        return True

    def _look_later(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(delay_s, 0.001), self.look) if delay_s > 0 else None

    # --- moves ------------------------------------------------------------------------------------------

    def _begin(self, model: _Model, phase: Phase) -> None:
        model.phase = phase
        move = asyncio.get_running_loop().create_task(self._move(model), name=f"openinfer-turn-{model.name}")
        self._moves.add(move)
        move.add_done_callback(self._moves.discard)

    async def _move(self, model: _Model) -> None:
        is_waking = model.phase is Phase.WAKING
        try:
            await (model.sleeper.wake() if is_waking else model.sleeper.sleep())
        except CannotWake as error:
            logger.warning("%s", error)
            model.phase = Phase.ASLEEP
            self._fail(model, error)
        except Exception:
            logger.exception("the model %s could not be brought to %s", model.name, model.phase.name)
            model.phase = Phase.ASLEEP
            self._fail(model, CannotWake(f"the model {model.name} cannot be had now; the log says why"))
        else:
            model.phase = Phase.AWAKE if is_waking else Phase.ASLEEP
            model.used_s = self._clock()
        self.look()
