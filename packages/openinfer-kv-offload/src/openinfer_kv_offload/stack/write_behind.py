"""`WriteBehindWorker`: copies what the first tier of a stack has stored to the others, after the save.

So a save is over when the fastest tier has it, and a slow disk or a server holds up no caller. Bytes are copied
from the first tier, which has them anyway; what it has evicted before its turn came is not handed down.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from openinfer_kv_cache import CopyingTier, Digest, KvTier, Transfer

_log = logging.getLogger(__name__)
_CHUNK_BLOCKS = 16
# Digests alone wait, 16 bytes each; beyond so many the oldest are forgotten, and stay in the upper tier only.
_MOST_WAITING = 1 << 20


class WriteBehindWorker:
    """Threads that copy from the first tier of a stack, `upper`, to each of `lowers` in turn."""

    def __init__(self, upper: CopyingTier, lowers: Sequence[KvTier], *, timeout_s: float, num_threads: int = 2) -> None:
        self._upper = upper
        self._lowers = lowers
        self._timeout_s = timeout_s
        self._waiting: deque[Digest] = deque(maxlen=_MOST_WAITING)
        self._num_busy = 0
        self._saves: dict[int, Transfer] = {}  # of each thread, what it waits for
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"kv-tier-behind-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def enqueue(self, digests: Sequence[Digest]) -> None:
        with self._changed:
            self._waiting.extend(digests)
            self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits at most `timeout_s` until the queue is empty; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._num_busy, timeout_s)

    def close(self, flush_s: float, timeout_s: float) -> bool:
        """Hands down what it can in `flush_s`, gives up the rest, and ends its threads within `timeout_s` in all.

        Returns:
            Whether they have ended; one that hangs in a tier ends after that, and asks no tier for anything more.
        """
        until_s = time.monotonic() + timeout_s
        is_flushed = self.flush(min(flush_s, timeout_s))
        with self._changed:
            if not is_flushed:
                _log.warning("%d KV blocks were not handed down from %s in time", len(self._waiting), self._upper.name)
            self._is_closed = True
            self._waiting.clear()
            saves = list(self._saves.values())
            self._changed.notify_all()
        for save in saves:
            save.cancel()
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, number: int) -> None:
        size = self._upper.layout.block_bytes
        scratch = memoryview(bytearray(_CHUNK_BLOCKS * size))
        buffers = [scratch[begin : begin + size] for begin in range(0, len(scratch), size)]
        while (chunk := self._take()) is not None:
            try:
                self._hand_down(chunk, buffers, number)
            except Exception:  # noqa: BLE001 -- the thread lives; a tier that raises here is broken, and says so elsewhere
                _log.exception("KV blocks could not be handed down from %s", self._upper.name)
            finally:
                with self._changed:
                    self._num_busy -= 1
                    self._changed.notify_all()

    def _take(self) -> list[Digest] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            self._num_busy += 1
            return [self._waiting.popleft() for _ in range(min(_CHUNK_BLOCKS, len(self._waiting)))]

    def _hand_down(self, chunk: Sequence[Digest], buffers: Sequence[memoryview], number: int) -> None:
        digests: list[Digest] = []
        for digest in chunk:
            if self._is_closed:  # and so may be the tiers
                return
            if self._upper.copy_block(digest, buffers[len(digests)]):
                digests.append(digest)
        content = [buffer.toreadonly() for buffer in buffers[: len(digests)]]
        for tier in self._lowers if digests else ():
            if self._is_closed:
                return
            save = tier.save(digests, content, timeout_s=self._timeout_s)
            with self._changed:
                self._saves[number] = save
                is_closed = self._is_closed
            if is_closed:
                save.cancel()
            save.wait()
