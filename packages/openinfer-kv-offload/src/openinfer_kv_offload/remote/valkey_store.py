"""`ValkeyStore`: objects as keys of a Valkey or Redis server; needs the extra `valkey`."""

import errno
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, cast

from valkey import Valkey
from valkey.backoff import NoBackoff
from valkey.exceptions import ConnectionError as ValkeyConnectionError
from valkey.exceptions import OutOfMemoryError, ValkeyError
from valkey.exceptions import TimeoutError as ValkeyTimeoutError
from valkey.retry import Retry

_KEYS_PER_SCAN = 10_000
_GLOB = str.maketrans({each: f"\\{each}" for each in "*?[]\\^"})


class ValkeyStore:
    """Keys of one database of a server; `password` replaces the URL's.

    Args:
        url: `valkey://`, `valkeys://` (TLS), `redis://`, `rediss://` or `unix://`, as valkey-py reads it.
        timeout_s: of connecting, and of each wait for the server.
        ttl_s: after which the server forgets what was put, unless it was put to last; None: never.

    Raises:
        ValueError: the URL is of another kind.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 2.0, ttl_s: float | None = None, password: str | None = None
    ) -> None:
        self.address = _without_secrets(url)
        self._ttl_ms = None if ttl_s is None else max(int(ttl_s * 1000), 1)
        given = {} if password is None else {"password": password}
        # A request is tried once: whether to go on without the server is the breaker's decision.
        from_url = cast("Callable[..., Any]", Valkey.from_url)  # pyright: ignore[reportUnknownMemberType]
        self._client = from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            **given,
        )

    def put(self, key: str, content: memoryview | bytes) -> None:
        with _translated():
            self._client.set(key, content, px=self._ttl_ms)

    def put_lasting(self, key: str, content: memoryview | bytes) -> None:
        with _translated():
            self._client.set(key, content)

    def get(self, key: str) -> bytes | None:
        with _translated():
            return self._client.get(key)

    def has(self, key: str) -> bool:
        with _translated():
            return bool(self._client.exists(key))

    def delete(self, keys: Sequence[str]) -> None:
        # UNLINK, unlike DEL, frees the memory outside the server's main thread.
        with _translated():
            self._client.unlink(*keys)

    def list(self, prefix: str) -> Iterable[str]:
        # SCAN holds up no other client of the server; a key may come twice, and one that is set meanwhile may be left
        # out.
        with _translated():
            for key in self._client.scan_iter(match=prefix.translate(_GLOB) + "*", count=_KEYS_PER_SCAN):
                yield key.decode("utf-8", "replace")

    def close(self) -> None:
        self._client.close()


@contextmanager
def _translated() -> Generator[None]:
    """Raises the errors that a tier tells apart (`failures.classify`)."""
    try:
        yield
    except (ValkeyConnectionError, ValkeyTimeoutError) as error:
        raise ConnectionError(str(error)) from error
    except OutOfMemoryError as error:
        raise OSError(errno.ENOSPC, str(error)) from error
    except ValkeyError as error:
        raise OSError(errno.EIO, str(error)) from error


def _without_secrets(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
