"""`Silence`: how long the other end of a link has said nothing, while this end could have heard it."""

from collections.abc import Callable
from threading import Event, Lock, Thread

# of one limit: so often each end says that it lives, and looks whether the other did
BEATS_PER_LIMIT = 8
# while a rank starts it may keep its interpreter for long: imports from a slow disk, a driver that makes its context
STARTING_LIMIT_S = 120.0


class Silence:
    """Adds up the time since the last frame, in looks; a look that comes late counts no more than two intervals.

    What stops both ends, or this one, is no silence of the other: a debugger, a suspended machine, a busy processor.
    """

    def __init__(self, *, limit_s: float) -> None:
        self._lock = Lock()
        self._limit_s = limit_s
        self._silent_s = 0.0

    @property
    def limit_s(self) -> float:
        return self._limit_s

    @property
    def interval_s(self) -> float:
        """Between two looks."""
        return self._limit_s / BEATS_PER_LIMIT

    def set_limit(self, limit_s: float) -> None:
        with self._lock:
            self._limit_s, self._silent_s = limit_s, 0.0

    def heard(self) -> None:
        with self._lock:
            self._silent_s = 0.0

    def look(self, elapsed_s: float) -> bool:
        """Whether the silence is longer than the limit, `elapsed_s` after the last look."""
        with self._lock:
            self._silent_s += min(elapsed_s, 2 * self.interval_s)
            return self._silent_s > self._limit_s


class Ticker:
    """Calls a function at intervals, in a thread of its own, with the seconds since the call before; until `end`."""

    def __init__(
        self, call: Callable[[float], None], *, interval_s: float, clock: Callable[[], float], name: str
    ) -> None:
        self._call = call
        self._interval_s = interval_s
        self._clock = clock
        self._ended = Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Idempotent, and also from within the call."""
        self._ended.set()

    def join(self) -> None:
        self.end()
        self._thread.join()

    def _run(self) -> None:
        before_s = self._clock()
        while not self._ended.wait(self._interval_s):
            now_s = self._clock()
            elapsed_s, before_s = now_s - before_s, now_s
            self._call(elapsed_s)
