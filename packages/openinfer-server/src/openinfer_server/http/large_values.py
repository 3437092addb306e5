"""What large bodies become: thousands of containers, which must not hold the interpreter when garbage is collected or
they are freed.

The collector looks through all containers that are new or have survived; with those of one body of the largest size it
takes 40 ms, in whichever thread, and every stream waits. Such values have no cycles, die with their request's plan, and
need no collector. Freeing them takes 12 ms in one go.
"""

import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, cast

LONGEST_PAUSE_S = 10.0
_CONTAINERS = (dict, list)


def _num_references_of_a_local() -> int:
    # as the interpreter counts those of an object that one name refers to: not the same in all of its versions
    value: list[Any] = []
    return sys.getrefcount(value)


_ALONE = _num_references_of_a_local()


class CollectorPause:
    """No garbage is collected while any large value lives, for `LONGEST_PAUSE_S` at a time.

    Args:
        clock: seconds.
        collect: looks for garbage among what is new, after a pause as long as that.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, collect: Callable[[], object] = lambda: gc.collect(0)
    ) -> None:
        self._clock = clock
        self._collect = collect
        self._lock = threading.Lock()
        self._num_values = 0
        self._since_s = 0.0
        self._was_enabled = False

    def begin(self) -> None:
        """A large value is about to be made."""
        with self._lock:
            self._num_values += 1
            if self._num_values == 1:
                self._was_enabled, self._since_s = gc.isenabled(), self._clock()
                gc.disable()
                return
            is_long = self._was_enabled and self._clock() - self._since_s >= LONGEST_PAUSE_S
            if is_long:
                self._since_s = self._clock()
        if is_long:
            self._collect()

    def end(self) -> None:
        """A large value has been freed."""
        with self._lock:
            self._num_values -= 1
            if not self._num_values and self._was_enabled:
                gc.enable()


def take_apart(held: list[Any]) -> None:
    """Frees values one container at a time, so that other threads have their turn.

    What anything else refers to is left as it is.

    Args:
        held: values of JSON that nothing but this list refers to, or else they live on; empty afterwards.
    """
    while held:
        value = held.pop()
        if type(value) in _CONTAINERS and sys.getrefcount(value) <= _ALONE:
            container = cast("dict[str, Any] | list[Any]", value)
            held.extend(container.values() if isinstance(container, dict) else container)
            del container
            value.clear()
