"""`StoreWatch`: what is removed from under an open store by others is noticed, and the store begins anew.

    in place ── its folder, or the lock in it, is another or none ──► left: all its blocks are forgotten
    left ── opened as at a start, with the same key ──► in place, empty or with what is there now
    left ── cannot be opened ──► lost: loads miss, saves are refused (`GONE`); tried again every `retry_s`

A segment that is gone alone takes only its own blocks with it; manifest and key are written again. Deleted files are
closed once no hit holds them, so their space returns. Each change is said once in the log.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from openinfer_core.errors import OpenInferError
from openinfer_kv_offload.disk.segments import SegmentIndex
from openinfer_kv_offload.disk.store import StoreFolder

_log = logging.getLogger(__name__)


class Seen(NamedTuple):
    """What a look has found."""

    gone_blocks: int = 0
    bad_records: int = 0


class StoreWatch:
    """Looks at a store for its tier, one thread at a time; the tier's lock is held while its index changes.

    Args:
        reopen: opens the store that has the place of the one before.
        warns_of_segments: whether no other process may delete segments: this one writes.
    """

    def __init__(
        self,
        store: StoreFolder,
        index: SegmentIndex,
        lock: threading.Lock,
        *,
        reopen: Callable[[StoreFolder], StoreFolder],
        warns_of_segments: bool,
        name: str,
        clock: Callable[[], float],
        retry_s: float,
    ) -> None:
        self._store = store
        self._index = index
        self._lock = lock
        self._reopen = reopen
        self._warns_of_segments = warns_of_segments
        self._name = name
        self._clock = clock
        self._retry_s = retry_s
        self._retry_at_s = 0.0
        self._is_closed = False
        self._said = ""
        self.is_lost = False

    @property
    def digest_key(self) -> bytes | None:
        return self._store.digest_key

    def is_in_place(self) -> bool:
        """Whether a record may be appended, as far as a few system calls tell."""
        return not self.is_lost and self._index.is_in_place()

    def read_in(self) -> Seen:
        """Reads what is new in the folder, and forgets the segments that are gone.

        Raises:
            OSError: it cannot be read.
        """
        # Headers are read without the lock, so that finds go on meanwhile; nothing is found of them before `adopt`.
        discovery = self._index.discover()
        with self._lock:
            gone_blocks = self._index.adopt(discovery)
        if discovery.vanished and self._warns_of_segments:
            self._warn(f"{len(discovery.vanished)} segments with {gone_blocks} blocks were removed from outside")
        return Seen(gone_blocks, discovery.bad_records)

    def look(self) -> Seen:
        """As `read_in`, after beginning anew in a folder that is another, or none, or mending it."""
        left_blocks = 0
        try:
            if not self.is_lost and not self._store.is_current():
                left_blocks = self._leave()
            if self.is_lost and not self._begin_anew():
                return Seen(left_blocks)
            self._restore()
            seen = self.read_in()
        except OSError as error:
            self._say(f"{self._store.folder} cannot be read: {error}")
            return Seen(left_blocks)
        self._said = ""
        return Seen(left_blocks + seen.gone_blocks, seen.bad_records)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):  # a medium that fails is left as it is
            if not self.is_lost and self._store.is_current():
                self._restore()
        self._store.close()

    def _restore(self) -> None:
        if restored := self._store.restore():
            self._warn(f"{' and '.join(restored)} of {self._store.folder} had been removed: written again")

    def _leave(self) -> int:
        with self._lock:
            gone_blocks = self._index.forget_all()
        self._store.close()
        self.is_lost = True
        self._retry_at_s = self._clock()
        self._warn(f"{self._store.folder} was removed or replaced from outside: its {gone_blocks} blocks are lost")
        return gone_blocks

    def _begin_anew(self) -> bool:
        if self._is_closed or self._clock() < self._retry_at_s:
            return False
        self._retry_at_s = self._clock() + self._retry_s
        try:
            store = self._reopen(self._store)
        except (OpenInferError, OSError) as error:
            self._say(f"it cannot begin anew, and tries again every {self._retry_s:g} s: {error}")
            return False
        with self._lock:
            self._index.move_to(store)
        self._store = store
        self.is_lost = False
        self._warn(f"it goes on in {store.folder}")
        return True

    def _say(self, sentence: str) -> None:
        """Once, until something else is to be said or all is well."""
        if sentence != self._said:
            self._said = sentence
            self._warn(sentence)

    def _warn(self, sentence: str) -> None:
        _log.warning("tier %s: %s", self._name, sentence)
