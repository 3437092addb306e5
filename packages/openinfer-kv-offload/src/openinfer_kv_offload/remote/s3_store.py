"""`S3Store`: objects in a bucket of any service that speaks S3; needs the extra `s3`."""

import errno
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError, GenericError
from obstore.store import S3Store as Bucket

if TYPE_CHECKING:
    from obstore.store import S3Config

_STATUS = "non-2xx status code: "


class S3Store:
    """Objects of one bucket; `endpoint` is that of a service that is not AWS, as in `http://10.0.0.7:8333`.

    Credentials and region come from where every S3 client looks for them: `AWS_ACCESS_KEY_ID` and its companions in
    the environment, else the machine's role. `timeout_s` is of each request, from its beginning to the last byte.
    """

    def __init__(
        self, bucket: str, *, endpoint: str | None = None, region: str | None = None, timeout_s: float = 10.0
    ) -> None:
        self.address = f"s3://{bucket}" + (f" at {endpoint}" if endpoint else "")
        timeout = timedelta(seconds=timeout_s)
        config: S3Config = {}
        if endpoint is not None:
            config["endpoint"] = endpoint
        if region is not None:
            config["region"] = region
        self._bucket = Bucket(
            bucket,
            config=config,
            client_options={
                "allow_http": endpoint is not None and endpoint.startswith("http://"),
                "timeout": timeout,
                "connect_timeout": timeout,
            },
            # A request is tried once: whether to go on without the server is the breaker's decision.
            retry_config={"max_retries": 0},
        )

    def put(self, key: str, content: memoryview | bytes) -> None:
        with _translated():
            obstore.put(self._bucket, key, content, use_multipart=False)

    def get(self, key: str) -> memoryview | None:
        try:
            with _translated():
                return memoryview(obstore.get(self._bucket, key).bytes())
        except FileNotFoundError:
            return None

    def has(self, key: str) -> bool:
        try:
            with _translated():
                obstore.head(self._bucket, key)
        except FileNotFoundError:
            return False
        return True

    def delete(self, keys: Sequence[str]) -> None:
        with _translated():
            obstore.delete(self._bucket, keys)

    def list(self, prefix: str) -> Iterable[str]:
        folder = prefix.rstrip("/")
        with _translated():
            pages = obstore.list(self._bucket, folder, return_arrow=False)  # pyright: ignore[reportUnknownMemberType]
            for page in pages:
                yield from (each["path"] for each in page)

    def close(self) -> None:
        """Nothing: its connections end with the object."""


@contextmanager
def _translated() -> Generator[None]:
    """Raises the errors that a tier tells apart (`failures.classify`)."""
    try:
        yield
    except FileNotFoundError:
        raise
    except GenericError as error:
        message = str(error).partition("\n")[0]
        _, has_status, status = message.partition(_STATUS)
        if not has_status:
            raise ConnectionError(message) from error
        raise OSError(errno.ENOSPC if status.startswith("507") else errno.EIO, message) from error
    except BaseError as error:
        raise OSError(errno.EACCES, str(error).partition("\n")[0]) from error
