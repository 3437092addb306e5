"""`EngineChild`: the parent's side of an engine process: started, connected to, ended; nothing of it is left behind."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Generator

import msgspec

from openinfer_core.errors import ContractViolation, EngineClosed
from openinfer_core.process.engine_process import Address, Launch, LinkKind, remove_socket_file

_LAST_WORDS_S = 2.0
"""How long a child whose link broke while it was loading may take to end, to be told how."""


class EngineChild:
    """A process that runs `run_engine_process` with `spec`; a client must show `token`."""

    def __init__(
        self, module: str, spec: msgspec.Struct, *, token: str, link: LinkKind, host: str = "127.0.0.1"
    ) -> None:
        self._address: Address | None = None
        self._launch = Launch(token=token, spec=msgspec.Raw(msgspec.json.encode(spec)), link=link, host=host)
        # -P: the working directory is not on the child's import path
        with _without_ctrl_c():
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; negative numbers are signals."""
        return self._process.poll()

    def how_it_ended(self) -> str:
        """For a message about a child that is gone, or about to be: its exit code or the signal that killed it."""
        try:
            code = self._process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return "it still runs"
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def connect(self) -> socket.socket:
        """A new blocking socket to the child, which may still be building its engine; raises as `address`."""
        address = self.address
        try:
            return connect_to(address)
        except EngineClosed as error:  # it died after it had said where it listens: say how, as for later deaths
            raise EngineClosed(f"{error} ({self.how_it_ended()})") from error

    @property
    def address(self) -> Address:
        """Where it listens; waits until it says so.

        Raises:
            EngineClosed: the child died.
            ContractViolation: it said something else than its address.
        """
        if self._address is None:
            self._address = self._ask_address()
        return self._address

    def end(self, *, deadline_s: float) -> None:
        """Waits for the child to end, kills it after `deadline_s` seconds, and removes what it left. Idempotent."""
        if self._process.stdin is not None:
            # The end of its input ends the child, also while it still builds its engine (`_ParentWatch`).
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._address is not None:
            remove_socket_file(self._address)

    def _ask_address(self) -> Address:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ContractViolation("the engine process was started without pipes")
        with contextlib.suppress(BrokenPipeError):  # a dead child says nothing, which is noticed below
            stdin.write(msgspec.json.encode(self._launch) + b"\n")
            stdin.flush()
        line = stdout.readline()
        if not line:
            raise EngineClosed(f"the engine process ended with code {self._process.wait()} before it began to serve")
        try:
            return msgspec.json.decode(line, type=Address)
        except msgspec.MsgspecError as error:
            raise ContractViolation(f"the engine process said {line[:100]!r} instead of its address") from error


@contextlib.contextmanager
def _without_ctrl_c() -> Generator[None]:
    # Blocked in this thread, and so in what it starts: a child ignores SIGINT, but only once it has its imports.
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def connect_to(address: Address) -> socket.socket:
    """A new blocking socket to an engine process; `EngineClosed` if it is gone."""
    try:
        return _connect(address)
    except OSError as error:
        raise EngineClosed(f"the engine process cannot be reached: {error}") from error


def _connect(address: Address) -> socket.socket:
    if address.tcp_port is not None:
        return socket.create_connection((address.tcp_host, address.tcp_port))
    if address.unix_path is None:
        raise ContractViolation("the engine process announced an empty address")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address.unix_path)
    except OSError:
        connection.close()
        raise
    return connection
