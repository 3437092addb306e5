"""`Lifecycle`: what an engine does about commands that stop it for a while.

    serving ◄── Resume ── paused           a step in flight was applied; requests keep slots and KV
       │ ▲
       │ └── Wake ─────── asleep           weights and KV are given back; requests are parked, without slots and KV
       │                    │ nothing to read weights from
       └─ Update ─► without weights        parked requests have failed; only a complete update helps

Commands are obeyed between two steps, by the loop's thread, which waits meanwhile: so nothing ever runs on weights of
two kinds. An update first opens and checks the new weights on all ranks; whatever is wrong up to there changes nothing.
Then requests are parked and copies of KV end, the old weights go, the new ones are read. Only after that is the KV
cache renewed, under a version that is the caller's hash of all bytes, or a number that is never drawn again.
"""

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from openinfer_core import EngineCapability, EngineStats, Refused
from openinfer_core.control import ControlCommand, InFlight, Pause, Resume, Sleep, UpdateWeights, Wake
from openinfer_core.engine import EngineState
from openinfer_engine.errors import GroupBroken
from openinfer_engine.lifecycle.folders import Identity, folder_below, identity_of
from openinfer_engine.lifecycle.memory import CAN_GIVE_BACK
from openinfer_engine.lifecycle.orders import (
    CloseWeights,
    DropWeights,
    GiveBack,
    KeepWeights,
    LoadWeights,
    ObeysOrders,
    OpenWeights,
    TakeBack,
    WeightsSource,
)

logger = logging.getLogger("openinfer.engine")

PARK_TIMEOUT_S = 30.0  # for copies of KV to end, before a command is refused
_TIER_WAIT_S = 0.005

ASLEEP = "the engine is asleep; wake it first"
WITHOUT_WEIGHTS = "the engine has no weights: its last update failed, or nothing could be read after a sleep"


class Parks(Protocol):
    """The requests of an engine, as its loop has them; no step is in flight."""

    def park(self) -> bool:
        """As `ChangesWeights.park`; ends copies of KV that have come to their end."""
        ...

    def renew_cache(self, kv_version: str) -> None:
        """As `ChangesWeights.renew_cache`."""
        ...

    def end_all(self, failure: str | None) -> None:
        """Ends all requests: as aborted, or with `UNAVAILABLE` and a reason."""
        ...

    def wait_for_copies(self, timeout_s: float) -> None:
        """Waits until a copy between pool and tiers has come further."""
        ...


class WeightsInUse:
    """Where the weights of an engine come from, and under which version their KV is known.

    Args:
        source: of the weights that the engine began with.
        root: below which folders of updates lie; None where there are none.
        on_device: whether they are in memory of a device, so that a sleep can keep them in the host's.
    """

    def __init__(self, source: WeightsSource, *, root: str | None, on_device: bool = False) -> None:
        self.root = root
        self.on_device = on_device
        self.source = source
        self.version = ""
        self.identity = _identity(source)

    def are_unchanged(self) -> bool:
        """Whether they can be read again from where they came from, to the byte."""
        return not self.source.is_gone and _identity(self.source) == self.identity

    def replace(self, source: WeightsSource, version: str, identity: Identity | None) -> None:
        self.source, self.version, self.identity = source, version, identity


class Lifecycle:
    """One engine's. Called by the loop's thread, but for `told_in`.

    Args:
        ranks: obey orders about weights.
        requests: of the engine.
        weights: that it began with.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        ranks: ObeysOrders,
        requests: Parks,
        weights: WeightsInUse,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = ranks
        self._requests = requests
        self._weights = weights
        self._clock = clock
        self._is_paused = False
        self._asleep: Sleep | None = None
        self._has_weights = True
        self._updates = self._failed_updates = self._sleeps = 0

    @property
    def capabilities(self) -> tuple[EngineCapability, ...]:
        sleep = (EngineCapability.SLEEP,) if CAN_GIVE_BACK else ()
        return (EngineCapability.PAUSE, *sleep, EngineCapability.UPDATE_WEIGHTS)

    @property
    def state(self) -> EngineState:
        if self._asleep is not None:
            return EngineState.ASLEEP
        if not self._has_weights:
            return EngineState.WITHOUT_WEIGHTS
        return EngineState.PAUSED if self._is_paused else EngineState.SERVING

    @property
    def refusal(self) -> str | None:
        """Why no request is taken; None if they are."""
        return {EngineState.ASLEEP: ASLEEP, EngineState.WITHOUT_WEIGHTS: WITHOUT_WEIGHTS}.get(self.state)

    def told_in(self, stats: EngineStats) -> EngineStats:
        return msgspec.structs.replace(
            stats,
            state=self.state,
            weights_version=self._weights.version,
            weight_updates=self._updates,
            failed_weight_updates=self._failed_updates,
            sleeps=self._sleeps,
        )

    def obey(self, command: ControlCommand) -> None:
        """No step is in flight.

        Raises:
            Refused: it cannot, or not now; what has changed all the same, `state` says.
            GroupBroken: a rank is gone.
        """
        match command:
            case Pause(requests=requests):
                self._is_paused = True
                if requests is InFlight.ABORT:
                    self._requests.end_all(None)
            case Resume():
                self._is_paused = False
            case UpdateWeights():
                self._update(command)
            case Sleep() if self._asleep is None:
                self._sleep(command)
            case Sleep(requests=InFlight.ABORT):  # all that is left to do of it
                self._requests.end_all(None)
            case Wake() if self._asleep is not None:
                self._wake(self._asleep)
            case _:
                pass

    # --- weights ----------------------------------------------------------------------------------------

    def _update(self, command: UpdateWeights) -> None:
        if self._asleep is not None:
            raise Refused(ASLEEP)
        source = self._source_of(command)
        identity = _identity(source)  # before the folder is opened: what is written to it later counts as a change
        self._ranks.obey(OpenWeights(source))
        try:
            self._park(command.requests)
        except BaseException:
            self._ranks.obey(CloseWeights())
            raise
        if not self._read(source):
            self._failed_updates += 1
            self._lose_weights()
            raise Refused(f"{WITHOUT_WEIGHTS}; the log says why. A complete update brings it back")
        version = _drawn() if command.content_hash is None else f"content {command.content_hash}"
        self._weights.replace(source, version, identity)
        self._requests.renew_cache(version)
        self._has_weights = True
        self._updates += 1
        logger.info("weights are those of %s; KV is known as %r", source.described, version)

    def _source_of(self, command: UpdateWeights) -> WeightsSource:
        root = self._weights.root
        resolved = None if root is None else str(Path(root).resolve())
        if command.path is None:
            source = WeightsSource(segments=command.segments, tensors=command.tensors)
        else:
            source = WeightsSource(folder=str(folder_below(root, command.path)), root=resolved)
        if command.drafter_path is None:
            drafter_folder, drafter_root = self._weights.source.drafter_folder, self._weights.source.drafter_root
        else:
            drafter_folder, drafter_root = str(folder_below(root, command.drafter_path)), resolved
        return msgspec.structs.replace(source, drafter_folder=drafter_folder, drafter_root=drafter_root)

    def _read(self, source: WeightsSource) -> bool:
        """Replaces the weights by what is open, which is closed then; if that fails, there are none."""
        self._has_weights = False
        try:
            self._ranks.obey(DropWeights())
            self._ranks.obey(LoadWeights())
        except GroupBroken:
            raise
        except Exception:
            logger.exception("the weights of %s could not be read", source.described)
            self._ranks.obey(DropWeights())
            return False
        finally:
            self._ranks.obey(CloseWeights())
        return True

    def _lose_weights(self) -> None:
        self._requests.end_all(WITHOUT_WEIGHTS)
        # No KV of the lost weights is of use, and a version is never shared by two.
        self._weights.replace(self._weights.source, _drawn(), None)
        self._requests.renew_cache(self._weights.version)

    # --- sleep ------------------------------------------------------------------------------------------

    def _sleep(self, command: Sleep) -> None:
        if command.keeps_weights and self._has_weights:
            self._keep()
        try:
            self._park(command.requests)
        except BaseException:
            self._ranks.obey(CloseWeights())
            raise
        self._requests.renew_cache(self._weights.version)
        self._asleep = command
        if not self._kept_on_host(command):
            self._ranks.obey(DropWeights())
        self._ranks.obey(GiveBack())
        self._sleeps += 1
        logger.info("the engine is asleep")

    def _kept_on_host(self, asleep: Sleep) -> bool:
        return asleep.keeps_weights and self._weights.on_device and self._has_weights

    def _keep(self) -> None:
        """Copies weights off a device, or opens the files that they came from: they stay, whatever their names do."""
        if self._weights.on_device:
            self._ranks.obey(KeepWeights())
            return
        if self._weights.source.is_gone:
            raise Refused(
                "the weights came from memory of another process and are in no file, so that this sleep cannot keep "
                "them; sleep without keeping them (level 2), and update them after waking"
            )
        self._check_unchanged()
        self._ranks.obey(OpenWeights(self._weights.source))
        try:
            self._check_unchanged()  # what is open now is what it was
        except Refused:
            self._ranks.obey(CloseWeights())
            raise

    def _check_unchanged(self) -> None:
        if not self._weights.are_unchanged():
            raise Refused(
                f"{self._weights.source.described} has changed since its weights were read, so that this sleep cannot "
                "keep them; sleep without keeping them (level 2)"
            )

    def _wake(self, asleep: Sleep) -> None:
        if self._kept_on_host(asleep):
            self._take_back()
            self._asleep = None
            logger.info("the engine is awake")
            return
        if not self._has_weights or (self._weights.source.is_gone and not asleep.keeps_weights):
            self._take_back()
            self._asleep, self._has_weights = None, False
            self._lose_weights()
            return
        identity = _identity(self._weights.source)
        if not asleep.keeps_weights:
            self._ranks.obey(OpenWeights(self._weights.source))
        self._take_back()
        self._load_asleep(asleep)
        self._asleep = None
        self._ranks.obey(CloseWeights())
        # What was held open is the same, whatever has become of its folder.
        if not asleep.keeps_weights and not (self._weights.are_unchanged() and identity == self._weights.identity):
            logger.warning("%s has changed while the engine slept", self._weights.source.described)
            self._weights.replace(self._weights.source, _drawn(), identity)
            self._requests.renew_cache(self._weights.version)
        logger.info("the engine is awake")

    def _take_back(self) -> None:
        """A failure leaves all ranks without the memory."""
        try:
            self._ranks.obey(TakeBack())
        except GroupBroken:
            raise
        except Exception as error:
            self._ranks.obey(GiveBack())
            raise Refused(f"the engine stays asleep: {error}") from error

    def _load_asleep(self, asleep: Sleep) -> None:
        """A failure leaves the engine as it was, asleep, unless what it held open was written to."""
        try:
            self._ranks.obey(LoadWeights())
        except GroupBroken:
            raise
        except Exception as error:
            logger.exception("the weights could not be read after a sleep")
            self._ranks.obey(DropWeights())
            if asleep.keeps_weights and not self._weights.are_unchanged():
                self._ranks.obey(CloseWeights())
                self._asleep, self._has_weights = None, False
                self._lose_weights()
                raise Refused(
                    f"{self._weights.source.described} was written to while the engine slept; {WITHOUT_WEIGHTS}"
                ) from error
            self._ranks.obey(GiveBack())
            raise Refused("the weights could not be read; the engine stays asleep, and its log says why") from error

    # --- requests ---------------------------------------------------------------------------------------

    def _park(self, requests: InFlight) -> None:
        """Takes all requests off the device; `Refused` if copies of their KV do not end."""
        until_s = self._clock() + PARK_TIMEOUT_S
        while not self._requests.park():
            if self._clock() > until_s:
                raise Refused("copies of KV are still under way; try again")
            self._requests.wait_for_copies(_TIER_WAIT_S)
        if requests is InFlight.ABORT:
            self._requests.end_all(None)


def _identity(source: WeightsSource) -> Identity | None:
    return None if source.folder is None else identity_of(Path(source.folder))


def _drawn() -> str:
    """A number that is never drawn again, by any engine."""
    return f"drawn {secrets.token_hex(16)}"
