"""`EarlyLaunch`: an engine that begins while the frontend's modules are imported."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from openinfer_core import EngineHandle


class EarlyLaunch:
    """Calls `launch` in a thread, at once. The thread does not keep the process alive, so that Ctrl-C ends it.

    Args:
        launch: starts the engine; may take long.
    """

    def __init__(self, launch: Callable[[], EngineHandle]) -> None:
        self._launch = launch
        self._launched: Future[EngineHandle] = Future()
        self._taken = False
        threading.Thread(target=self._call, name="openinfer-launch", daemon=True).start()

    def result(self) -> EngineHandle:
        """The engine, once it is there; the caller closes it.

        Raises:
            OpenInferError: what `launch` raised.
        """
        self._taken = True
        return self._launched.result()

    def abandon(self) -> None:
        """Closes the engine as soon as it is there, if this process lives so long; not one that `result` gave away."""
        if not self._taken:
            self._launched.add_done_callback(_close)

    def _call(self) -> None:
        try:
            self._launched.set_result(self._launch())
        except BaseException as error:  # noqa: BLE001 - raised where it is asked for
            self._launched.set_exception(error)


def _close(launched: Future[EngineHandle]) -> None:
    if launched.exception() is None:
        asyncio.run(launched.result().close())
