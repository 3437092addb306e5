"""`CircuitBreaker`: leaves a tier alone after repeated failures, and tries it again after a while."""

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Counts failures in a row; safe to use from several threads.

    A breaker that wraps calls, as libraries have, does not fit: a transfer ends in another thread than it began in, or
    by its deadline, and `find` asks `is_open` without using up the trial.

        closed ── num_failures in a row ──► open ── cooldown_s ──► one trial ── success ──► closed
                                             ▲                        │
                                             └──────── failure ───────┘
    """

    def __init__(self, *, num_failures: int, cooldown_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_failures = num_failures
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failed_in_row = 0
        self._next_trial_s = 0.0

    @property
    def is_open(self) -> bool:
        with self._lock:
            return self._is_open()

    @property
    def is_tripped(self) -> bool:
        """Whether the last transfers failed, so many in a row; until one succeeds."""
        with self._lock:
            return self._failed_in_row >= self._num_failures

    def admit(self) -> bool:
        """Whether a transfer may begin; of those that ask after a cooldown, one is the trial."""
        with self._lock:
            if self._is_open():
                return False
            if self._failed_in_row >= self._num_failures:
                self._next_trial_s = self._clock() + self._cooldown_s
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failed_in_row = 0

    def failed(self) -> None:
        with self._lock:
            self._failed_in_row += 1
            self._next_trial_s = self._clock() + self._cooldown_s

    def _is_open(self) -> bool:
        return self._failed_in_row >= self._num_failures and self._clock() < self._next_trial_s
