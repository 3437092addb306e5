"""`EarlyLaunch`: an engine that begins while the frontend does something else, such as importing its modules."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from openinfer_core.engine import EngineHandle


class EarlyLaunch:
    """Calls `launch`, which may take long, in a thread, at once."""

    def __init__(self, launch: Callable[[], EngineHandle]) -> None:
        self._launch = launch
        self._launched: Future[EngineHandle] = Future()
        self._is_settled = False  # whether the engine was given away, or is not wanted any more
        # A daemon: it does not keep the process alive, so that Ctrl-C ends it.
        threading.Thread(target=self._call, name="openinfer-launch", daemon=True).start()

    def result(self) -> EngineHandle:
        """The engine, once it is there; the caller closes it. Raises what `launch` raised."""
        engine = self._launched.result()
        self._is_settled = True
        return engine

    async def ready(self) -> EngineHandle:
        """`result` for an event loop, which goes on meanwhile."""
        # A caller that is cancelled must not cancel the launch: `abandon` still has to close the engine.
        engine = await asyncio.shield(asyncio.wrap_future(self._launched))
        self._is_settled = True
        return engine

    def abandon(self, *, wait_s: float = 0.0) -> None:
        """Closes the engine as soon as it is there, if this process lives so long; not one that `result` gave away.

        Waits `wait_s` for an engine that is not there yet. Not for a thread with an event loop, because the engine may
        be closed in this thread.
        """
        if self._is_settled:
            return
        self._is_settled = True
        wait((self._launched,), timeout=wait_s)
        self._launched.add_done_callback(_close)

    def _call(self) -> None:
        try:
            self._launched.set_result(self._launch())
        except BaseException as error:  # noqa: BLE001 - raised where it is asked for
            self._launched.set_exception(error)


def _close(launched: Future[EngineHandle]) -> None:
    if launched.exception() is None:
        asyncio.run(launched.result().close())
