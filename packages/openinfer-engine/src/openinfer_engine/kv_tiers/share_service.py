"""`ShareService`: what a rank in a process of its own does with its share of blocks and slots when rank 0 asks.

A thread of its own loads and saves through the rank's port, and says what has ended. An order counts after the steps
that came before it: their last writes are waited for (`Worker.fence`), as rank 0 may be ahead of this rank.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from openinfer_engine.kv_tiers.port import PoolTierPort
from openinfer_engine.worker.messages import CancelTransfer, LoadShare, PrefetchShare, SaveShare, TransferEnded
from openinfer_kv_cache import Digest, TierTransfer
from openinfer_kv_cache.digest import DIGEST_BYTES

ShareOrder: TypeAlias = LoadShare | SaveShare | PrefetchShare | CancelTransfer
_POLL_S = 0.001


class ShareService:
    """Runs until it is closed, on the rank's port, which it closes.

    `answer` sends rank 0 a message; `fail` is told what ends the rank, a transfer that raised; `enter_thread` is called
    first by the thread.
    """

    def __init__(
        self,
        port: PoolTierPort,
        *,
        answer: Callable[[TransferEnded], None],
        fail: Callable[[BaseException], None],
        enter_thread: Callable[[], None],
    ) -> None:
        self._port = port
        self._answer = answer
        self._fail = fail
        self._enter_thread = enter_thread
        self._orders: queue.SimpleQueue[tuple[ShareOrder, Callable[[], None]] | None] = queue.SimpleQueue()
        self._transfers: dict[int, TierTransfer] = {}
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
                self._do(*order)
        except BaseException as error:  # noqa: BLE001 -- handed on: it ends the rank
            self._fail(error)

    def _next(self) -> "tuple[ShareOrder, Callable[[], None]] | None":
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
            self._keep(order.number, self._port.prefetch(_digests(order.digests)).transfer)
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
        for number, transfer in list(self._transfers.items()):
            if transfer.is_over():
                del self._transfers[number]
                self._end(number, transfer.completed_blocks)
        self._port.settle()

    def _end(self, number: int, completed_blocks: int) -> None:
        self._answer(TransferEnded(number, completed_blocks, self._port.faults, self._port.stats()))


def _unpacked(order: LoadShare | SaveShare) -> tuple[Sequence[Digest], Sequence[int]]:
    places: list[int] = np.frombuffer(order.places, np.int32).tolist()
    return _digests(order.digests), places


def _digests(packed: bytes) -> Sequence[Digest]:
    return [Digest(packed[begin : begin + DIGEST_BYTES]) for begin in range(0, len(packed), DIGEST_BYTES)]
