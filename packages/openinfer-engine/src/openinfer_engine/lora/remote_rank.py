"""Adapters of ranks that are processes: what the engine has of such a rank, and what serves it there."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from openinfer_core import Refused
from openinfer_engine.errors import GroupBroken
from openinfer_engine.lora.adapter_folder import Adapter
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.worker.messages import AdapterHeld, DropAdapter, HoldAdapter

HOLD_TIMEOUT_S = 120.0
AdapterOrder: TypeAlias = HoldAdapter | DropAdapter


class LocalRank:
    """Implements `OtherRank` for a rank that is a thread of this process: it reads the folder, too, for its share."""

    def __init__(self, adapters: RankAdapters) -> None:
        self._adapters = adapters

    def hold(self, adapter: Adapter, folder: Path) -> int:
        return self._adapters.hold_again(folder, adapter.digest)

    def drop(self, digest: bytes) -> None:
        self._adapters.drop(digest)


class RemoteRank:
    """Implements `OtherRank` for a rank that is a process: it reads the folder by itself, and must find the same."""

    def __init__(self, tell: Callable[[AdapterOrder], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[int]] = {}
        self._given_up: dict[int, bytes] = {}  # digests: what is held too late is dropped
        self._has_ended = False

    def hold(self, adapter: Adapter, folder: Path) -> int:
        answer: Future[int] = Future()
        with self._lock:
            if self._has_ended:
                raise GroupBroken("a rank has died")
            number = next(self._numbers)
            self._waiting[number] = answer
        self._tell(HoldAdapter(number, str(folder), adapter.digest))
        try:
            return answer.result(HOLD_TIMEOUT_S)
        except TimeoutError as error:
            with self._lock:
                if self._waiting.pop(number, None) is not None:
                    self._given_up[number] = adapter.digest
            raise Refused(f"a rank has not read the adapter within {HOLD_TIMEOUT_S:g} s") from error

    def drop(self, digest: bytes) -> None:
        self._tell(DropAdapter(digest))

    def hear(self, message: AdapterHeld) -> None:
        """The rank's answer; called from the thread that reads them."""
        with self._lock:
            answer = self._waiting.pop(message.number, None)
            late = self._given_up.pop(message.number, None)
        if answer is None:
            if late is not None and message.refusal is None:
                self.drop(late)
        elif message.refusal is None:
            answer.set_result(message.num_bytes)
        else:
            answer.set_exception(Refused(message.refusal))

    def end_all(self) -> None:
        """The rank is gone: nothing waits for it any more."""
        with self._lock:
            self._has_ended = True
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(GroupBroken("a rank has died"))


class AdapterService:
    """Obeys the engine in a rank's process; what is read is read in a thread, so that steps go on."""

    def __init__(self, adapters: RankAdapters, *, answer: Callable[[AdapterHeld], None]) -> None:
        self._adapters = adapters
        self._answer = answer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="openinfer-adapters")

    def take(self, order: AdapterOrder) -> None:
        if isinstance(order, DropAdapter):
            self._adapters.drop(order.digest)
        else:
            self._thread.submit(self._hold, order)

    def _hold(self, order: HoldAdapter) -> None:
        num_bytes, refusal = 0, None
        try:
            num_bytes = self._adapters.hold_again(Path(order.folder), order.digest)
        except Refused as error:
            refusal = str(error)
        except Exception as error:  # noqa: BLE001 - of one adapter's files: the rank lives on
            refusal = f"{type(error).__name__}: {error}"
        self._answer(AdapterHeld(order.number, num_bytes, refusal))
        if refusal is None:
            self._adapters.prepare()
