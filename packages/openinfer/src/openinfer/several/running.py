"""`openinfer serve --models FILE`: the servers of several models, and the one that clients ask."""

import asyncio
import contextlib
import logging
import signal
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

from openinfer.several.child import ChildServer
from openinfer.several.front import Front
from openinfer.several.models_file import ModelsFile
from openinfer.several.turns import CannotWake, Turns
from openinfer_core import Refused

logger = logging.getLogger("openinfer.several")


async def serve_models(
    file: ModelsFile,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    on_ready: Callable[[str], None] = lambda url: None,
    stop: asyncio.Event | None = None,
) -> int:
    """Starts each model and sends it to sleep, one after the other, then serves all until a signal, or `stop`.

    Raises:
        Refused: a model does not start, or cannot sleep.
        OSError: the address cannot be had.
    """
    stopping = stop or asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="openinfer-models-") as folder, _signals(stopping):
        servers = {model.name: ChildServer(model, Path(folder)) for model in file.models}
        turns = Turns(servers, max_awake=file.max_awake, max_waiting=file.max_waiting, turn_s=file.turn_s)
        front = Front(servers, turns, wait_s=file.wait_s)
        try:
            for name, server in servers.items():
                if await _started(server, stopping):
                    return 0
                await _sleep_first(name, server)
            address = await front.listen(host, port)
            on_ready(f"http://{address[0]}:{address[1]}")
            await stopping.wait()
        finally:
            await front.close()
            await turns.close()
            await asyncio.gather(*(server.close() for server in servers.values()))
    return 0


async def _started(server: ChildServer, stopping: asyncio.Event) -> bool:
    """Whether the end was asked for before the server had started."""
    starting, ending = asyncio.create_task(server.start()), asyncio.create_task(stopping.wait())
    await asyncio.wait((starting, ending), return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    if starting.done():
        starting.result()
        return False
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    return True


async def _sleep_first(name: str, server: ChildServer) -> None:
    try:
        await server.sleep()
    except CannotWake as error:
        raise Refused(f"models that take turns must be able to sleep: {error}") from error
    logger.info("the model %s is loaded, and asleep", name)


@contextlib.contextmanager
def _signals(stopping: asyncio.Event) -> Generator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    try:
        for number in numbers:
            loop.add_signal_handler(number, stopping.set)
    except (NotImplementedError, RuntimeError, ValueError):  # not in the main thread
        numbers = ()
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
