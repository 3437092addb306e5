"""`RemoteShare`: the share of a rank in a process of its own, over the pipes that bring it its steps."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from openinfer_core.engine import KvTierStats
from openinfer_engine.kv_tiers.contents import TierContents
from openinfer_engine.kv_tiers.share import unpack_digests
from openinfer_engine.worker.messages import (
    CancelTransfer,
    LoadShare,
    LookShare,
    PrefetchShare,
    SaveShare,
    TiersChanged,
    ToRank,
    TransferEnded,
)
from openinfer_kv_cache import Digest, TierTransfer


class RemoteShare:
    """Loads and saves that the rank answers when they have ended.

    Args:
        tell: sends the rank a message.
    """

    def __init__(self, tell: Callable[[ToRank], None]) -> None:
        self._tell = tell
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._transfers: dict[int, _RemoteTransfer] = {}
        self._is_gone = False
        self._last: TransferEnded | None = None
        self.contents: TierContents | None = None

    def load(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer:
        transfer = self._begin(len(digests))
        self._tell(LoadShare(transfer.number, b"".join(digests), _packed(places)))
        return transfer

    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer:
        transfer = self._begin(len(digests))
        self._tell(SaveShare(transfer.number, b"".join(digests), _packed(places)))
        return transfer

    def prefetch(self, digests: Sequence[Digest]) -> None:
        self._tell(PrefetchShare(next(self._numbers), b"".join(digests)))

    def look(self, digest: Digest) -> None:
        self._tell(LookShare(digest))

    @property
    def faults(self) -> int:
        """As the rank has told last."""
        return 0 if self._last is None else self._last.faults

    def stats(self) -> tuple[KvTierStats, ...]:
        """As the rank has told last."""
        return () if self._last is None else self._last.stats

    def close(self) -> None:
        """The rank closes its tiers when it leaves."""

    def hear(self, message: TransferEnded) -> None:
        """The rank has ended what it was told to move; by the thread that listens to it."""
        self._last = message
        with self._lock:
            transfer = self._transfers.pop(message.number, None)
        if transfer is not None:
            transfer.end(message.completed_blocks)

    def hear_of_tiers(self, message: TiersChanged) -> None:
        """What the rank's tiers hold has changed; first, before it is ready, that they tell."""
        if self.contents is None:
            self.contents = TierContents()
        change = self.contents.stored if message.is_stored else self.contents.removed
        change(unpack_digests(message.digests))

    def end_all(self) -> None:
        """The rank is gone, and with it whatever it copied; by the thread that listened to it."""
        with self._lock:
            self._is_gone = True
            transfers, self._transfers = list(self._transfers.values()), {}
        for transfer in transfers:
            transfer.end(0)

    def _begin(self, num_blocks: int) -> "_RemoteTransfer":
        transfer = _RemoteTransfer(next(self._numbers), self._tell, num_blocks=num_blocks)
        with self._lock:
            if not self._is_gone:
                self._transfers[transfer.number] = transfer
                return transfer
        transfer.end(0)
        return transfer


class _RemoteTransfer:
    def __init__(self, number: int, tell: Callable[[ToRank], None], *, num_blocks: int) -> None:
        self.number = number
        self.num_blocks = num_blocks
        self.begin_s = time.monotonic()
        self.completed_blocks = 0
        self._tell = tell
        self._over = threading.Event()
        self._is_cancelled = False

    def is_over(self) -> bool:
        return self._over.is_set()

    def cancel(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            self._tell(CancelTransfer(self.number))

    def wait(self, timeout_s: float) -> None:
        self._over.wait(timeout_s)

    def end(self, completed_blocks: int) -> None:
        self.completed_blocks = completed_blocks
        self._over.set()


def _packed(places: Sequence[int]) -> bytes:
    return np.asarray(places, np.int32).tobytes()
