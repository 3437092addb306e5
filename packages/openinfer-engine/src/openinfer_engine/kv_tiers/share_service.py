"""`ShareService`: what a rank in a process of its own does with its share of blocks and slots when rank 0 asks.

A thread of its own loads and saves through the rank's port, and says what has ended. An order counts after the steps
that came before it: their last writes are waited for (`Worker.fence`), as rank 0 may be ahead of this rank.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from openinfer_engine.kv_events.recorder import TierChanges
from openinfer_engine.kv_tiers.port import PoolTierPort
from openinfer_engine.kv_tiers.share import unpack_digests
from openinfer_engine.worker.messages import (
    CancelTransfer,
    LoadShare,
    LookShare,
    PrefetchShare,
    SaveShare,
    TiersChanged,
    TransferEnded,
)
from openinfer_kv_cache import Digest, TellingTier, TierMedium, TierTransfer

ShareOrder: TypeAlias = LoadShare | SaveShare | PrefetchShare | LookShare | CancelTransfer
_POLL_S = 0.001
_TOLD_BLOCKS = 1 << 16  # of one message: a disk may hold millions


class ShareService:
    """Runs until it is closed, on the rank's port, which it closes.

    `answer` sends rank 0 a message; `fail` is told what ends the rank, a transfer that raised; `enter_thread` is called
    first by the thread. Of a `telling` tier, the port's, all that it holds is answered at once, and each change.
    """

    def __init__(
        self,
        port: PoolTierPort,
        *,
        answer: Callable[[TransferEnded | TiersChanged], None],
        fail: Callable[[BaseException], None],
        enter_thread: Callable[[], None],
        telling: TellingTier | None = None,
    ) -> None:
        self._port = port
        self._answer = answer
        self._fail = fail
        self._enter_thread = enter_thread
        self._orders: queue.SimpleQueue[tuple[ShareOrder, Callable[[], None]] | _Changes | None] = queue.SimpleQueue()
        self._transfers: dict[int, TierTransfer] = {}
        self._changes = _Changes(self._orders.put)
        if telling is not None:
            answer(TiersChanged(b"", is_stored=True))  # that they do tell
            telling.listen(self._changes)
            self._tell()
        self._thread = threading.Thread(target=self._run, name="openinfer-kv-share", daemon=True)
        self._thread.start()

    def take(self, order: ShareOrder, fence: Callable[[], None]) -> None:
        self._orders.put((order, fence))

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()
        self._port.close()

    def _run(self) -> None:
        try:
            self._enter_thread()
            while (order := self._next()) is not None:
                if not isinstance(order, _Changes):
                    self._do(*order)
                elif not self._transfers:  # else when one of them ends: a save changes a block at a time
                    self._tell()
        except BaseException as error:  # noqa: BLE001 -- handed on: it ends the rank
            self._fail(error)

    def _next(self) -> "tuple[ShareOrder, Callable[[], None]] | _Changes | None":
        """Waits for the next order, and meanwhile for what is on its way."""
        while self._transfers:
            try:
                return self._orders.get(timeout=_POLL_S)
            except queue.Empty:
                self._report()
        return self._orders.get()

    def _do(self, order: ShareOrder, fence: Callable[[], None]) -> None:
        # These copy nothing of the pool: they need not wait for the steps before them.
        if isinstance(order, CancelTransfer):
            if order.number in self._transfers:
                self._transfers[order.number].cancel()
            return
        if isinstance(order, PrefetchShare):
            self._keep(order.number, self._port.prefetch(unpack_digests(order.digests)).transfer)
            return
        if isinstance(order, LookShare):
            self._port.find([Digest(order.digest)]).close()  # a tier that misses a block looks for news, in its threads
            return
        fence()
        digests, places = _unpacked(order)
        if isinstance(order, LoadShare):
            transfer = self._port.load(self._port.find_looking_up(digests), places)
        else:
            transfer = self._port.save(digests, places)
        self._keep(order.number, transfer)

    def _keep(self, number: int, transfer: TierTransfer | None) -> None:
        if transfer is None:
            self._end(number, 0)
        else:
            self._transfers[number] = transfer

    def _report(self) -> None:
        ended = [(number, transfer) for number, transfer in self._transfers.items() if transfer.is_over()]
        if ended:
            self._tell()  # what was saved can be found once its save has ended
        for number, transfer in ended:
            del self._transfers[number]
            self._end(number, transfer.completed_blocks)
        self._port.settle()

    def _tell(self) -> None:
        for digests, is_stored in self._changes.take():
            for begin in range(0, len(digests), _TOLD_BLOCKS):
                self._answer(TiersChanged(b"".join(digests[begin : begin + _TOLD_BLOCKS]), is_stored=is_stored))

    def _end(self, number: int, completed_blocks: int) -> None:
        self._answer(TransferEnded(number, completed_blocks, self._port.faults, self._port.stats()))


class _Changes:
    """A `TierListener` that says once, until they are taken, that there are changes."""

    def __init__(self, wake: "Callable[[_Changes], None]") -> None:
        self._heard = TierChanges()
        self._wake = wake
        self._has_woken = False

    def stored(self, digests: Sequence[Digest], medium: TierMedium) -> None:
        self._heard.stored(digests, medium)
        self._say()

    def removed(self, digests: Sequence[Digest], medium: TierMedium) -> None:
        self._heard.removed(digests, medium)
        self._say()

    def take(self) -> list[tuple[Sequence[Digest], bool]]:
        """What was heard since the last time, in order, and whether it was stored."""
        self._has_woken = False  # first: what is heard meanwhile may be taken with the rest, or the next time
        return [(change.digests, change.is_stored) for change in self._heard.take()]

    def _say(self) -> None:
        if not self._has_woken:
            self._has_woken = True
            self._wake(self)


def _unpacked(order: LoadShare | SaveShare) -> tuple[Sequence[Digest], Sequence[int]]:
    places: list[int] = np.frombuffer(order.places, np.int32).tolist()
    return unpack_digests(order.digests), places
