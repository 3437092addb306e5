"""`ChildServer`: the server of one model, a process of its own on loopback, which sleeps and wakes.

One that has died, or was ended because it could not sleep, is started again by the next `wake`, at most once in
`START_AGAIN_S`: loading is dear.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

from openinfer.several.models_file import ServedModel
from openinfer.several.turns import CannotWake
from openinfer.several.upstream import command
from openinfer_core import Refused

logger = logging.getLogger("openinfer.several")

START_TIMEOUT_S = 3600.0
START_AGAIN_S = 30.0
_END_TIMEOUT_S = 30.0
_SERVING = re.compile(r"openinfer: serving .* on http://([0-9.]+):([0-9]+) \(")


class ChildServer:
    """Started by `start`, awake then; `close` ends it.

    Attributes:
        user_key: what requests of clients are sent with.
    """

    def __init__(self, model: ServedModel, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.user_key = secrets.token_urlsafe(32)
        self._clock = clock
        self._may_start_s = 0.0
        self._admin_key = secrets.token_urlsafe(32)
        self._model = model
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._address: tuple[str, int] | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Raises `CannotWake`: it has not started, or has ended."""
        if self._address is None or self.has_ended:
            raise CannotWake(f"the server of the model {self._model.name} has ended; the log says why")
        return self._address

    @property
    def has_ended(self) -> bool:
        """Whether its process, which was started, is gone."""
        return self._process is None or self._process.returncode is not None

    async def start(self) -> None:
        """Loads the model; `Refused` if its server does not start."""
        keys = self._folder / f"{secrets.token_hex(8)}.toml"
        keys.touch(mode=0o600)
        keys.write_text(
            "".join(
                f'[[keys]]\ntenant = "{level}"\nlevel = "{level}"\nkey = "{key}"\n'
                for level, key in (("user", self.user_key), ("admin", self._admin_key))
            )
        )
        flags = ["--host", "127.0.0.1", "--port", "0", "--api-keys-file", str(keys), "--model-name", self._model.name]
        arguments = ["-m", "openinfer.several.model_server", str(os.getpid()), "serve", *self._model.flags, *flags]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
        if self._process.stdout is None:
            raise RuntimeError("a process was started without a pipe")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self._address = await _read_address(self._process.stdout)
        except TimeoutError as error:
            raise Refused(f"the model {self._model.name} was not loaded in {START_TIMEOUT_S:g} s") from error
        if self._address is None:
            code = await self._process.wait()
            raise Refused(f"the server of the model {self._model.name} ended with exit code {code} while it started")
        self._reading = asyncio.create_task(_read_on(self._process.stdout), name=f"openinfer-says-{self._model.name}")

    async def wake(self) -> None:
        if self.has_ended:
            await self._start_again()
        else:
            await self._tell("/wake_up")

    async def _start_again(self) -> None:
        left_s = self._may_start_s - self._clock()
        if left_s > 0:
            raise CannotWake(
                f"the server of the model {self._model.name} has ended; it is started again in {left_s:.0f} s"
            )
        self._may_start_s = self._clock() + START_AGAIN_S
        logger.warning("the server of the model %s has ended, and is started again", self._model.name)
        self._address = None
        try:
            await self.start()
        except (Refused, OSError) as error:
            raise CannotWake(str(error)) from error

    async def sleep(self) -> None:
        """Ends a server that cannot, as where its folder has changed: another model needs the memory that it holds."""
        try:
            await self._tell("/sleep?level=1")
        except CannotWake:
            await self.close()
            raise

    async def _tell(self, target: str) -> None:
        status, body = await command(self.address, target, self._admin_key)
        if status != 200:
            raise CannotWake(f"the model {self._model.name} cannot be had now: {_message(body)}")

    async def close(self) -> None:
        """Ends the process; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._reading is not None:
            await self._reading


async def _read_address(said: asyncio.StreamReader) -> tuple[str, int] | None:
    while line := await said.readline():
        if (match := _SERVING.match(line.decode(errors="replace"))) is not None:
            return match[1], int(match[2])
    return None


async def _read_on(said: asyncio.StreamReader) -> None:
    while await said.read(1 << 12):
        pass


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "its server does not say why"
