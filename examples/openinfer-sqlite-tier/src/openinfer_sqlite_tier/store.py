"""`SqliteStore`: objects as rows of a table."""

import errno
import sqlite3
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

from openinfer_kv_cache import KvLayout
from openinfer_kv_offload import RemoteTier, RemoteTierOptions, TierConfigError, parse_size

_TABLE = "CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, content BLOB NOT NULL) WITHOUT ROWID"


class SqliteStore:
    """Rows of one file; a connection for each thread.

    Args:
        path: of the file, which is made if it is not there. timeout_s: of waiting for another process that writes.
    """

    def __init__(self, path: str, *, timeout_s: float = 2.0) -> None:
        self.address = f"SQLite file {path}"
        self._path = path
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._opened: list[sqlite3.Connection] = []
        with self._connected() as connection:
            connection.execute("PRAGMA journal_mode = WAL")  # a commit need not wait for the disk: losing is a miss
            connection.execute(_TABLE)

    def put(self, key: str, content: memoryview | bytes) -> None:
        """Stores bytes under a key, instead of what was there."""
        with self._connected() as connection:
            connection.execute("INSERT OR REPLACE INTO objects VALUES (?, ?)", (key, content))

    def get(self, key: str) -> bytes | None:
        """The bytes under a key; None if there are none."""
        with self._connected() as connection:
            row = connection.execute("SELECT content FROM objects WHERE key = ?", (key,)).fetchone()
            return None if row is None else row[0]

    def delete(self, keys: Sequence[str]) -> None:
        """Removes keys; those that are not there are no error."""
        with self._connected() as connection:
            connection.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key in keys])

    def list(self, prefix: str) -> Iterable[str]:
        """The keys that begin with `prefix`."""
        with self._connected() as connection:
            query = "SELECT key FROM objects WHERE substr(key, 1, ?) = ?"
            return [key for (key,) in connection.execute(query, (len(prefix), prefix))]

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._opened:
            connection.close()

    @contextmanager
    def _connected(self) -> Generator[sqlite3.Connection]:
        """This thread's connection, with the errors that a tier tells apart; commits at the end."""
        try:
            connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
            if connection is None:
                connection = sqlite3.connect(self._path, timeout=self._timeout_s, check_same_thread=False)
                connection.execute("PRAGMA synchronous = NORMAL")
                self._local.connection = connection
                self._opened.append(connection)
            with connection:
                yield connection
        except sqlite3.Error as error:
            is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
            raise OSError(errno.ENOSPC if is_full else errno.EIO, str(error)) from error


def open_sqlite(layout: KvLayout, setting: str) -> RemoteTier:
    """Opens `FILE,SIZE`.

    Raises:
        TierConfigError: it is not of that form.
        LayoutMismatchError, StoreError: the file is not for this process.
    """
    path, comma, size = setting.partition(",")
    if not (path and comma):
        raise TierConfigError(f"sqlite={setting}: write FILE,SIZE, as in sqlite=/var/cache/kv.db,20GiB")
    options = RemoteTierOptions(budget_bytes=parse_size(size), connections=2)
    return RemoteTier(layout, SqliteStore(path), options, name="sqlite")
