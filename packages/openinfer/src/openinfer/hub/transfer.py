"""One file of a repository into the cache: resumed where an earlier try ended, and checked against its digest.

huggingface_hub 2 removes the part of a file that it has when a download is interrupted, so that a shard of 5 GB begins
anew, and it compares no digest. Its client, token and errors are used here; the rest is a loop.
"""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import get_session, get_token, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.errors import HTTPError as NetworkError  # pyright: ignore[reportPrivateImportUsage] - of httpx in 1.x, of httpx2 in 2.x
from huggingface_hub.utils import WeakFileLock, hf_raise_for_status

from openinfer.hub.cache import CachedRepo
from openinfer_core import Refused

_CHUNK_BYTES = 1 << 20
_CONNECT_S = 10.0
_READ_S = 30.0
_TRIES = 5  # in a row without a byte
BETWEEN_TRIES_S = 1.0
_PARTIAL_CONTENT = 206
_SHA256_DIGITS = 64


class Cancelled(Exception):
    """Another file failed, or the user ended the download."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub's listing has it."""

    path: str
    num_bytes: int
    etag: str
    """SHA-256 of its content where it is stored with LFS, else the SHA-1 of its Git blob."""


@dataclass(frozen=True, slots=True)
class Source:
    """A repository at a commit, on one server."""

    repo: str
    commit: str
    endpoint: str | None
    """None: huggingface_hub's own, which `HF_ENDPOINT` sets."""


def missing_bytes(cached: CachedRepo, file: RemoteFile) -> int:
    """What of a file's content the cache lacks."""
    if cached.blob(file.etag).exists():
        return 0
    return max(file.num_bytes - _size(_partial(cached, file)), 0)


def fetch(
    source: Source,
    file: RemoteFile,
    cached: CachedRepo,
    *,
    advance: Callable[[int], None],
    cancelled: threading.Event,
) -> None:
    """Puts a file into the cache, unless it is there, and links the snapshot to it.

    Args:
        source: where it is.
        file: which.
        cached: the repository's folder.
        advance: told the bytes that arrived.
        cancelled: ends it soon; what arrived stays for the next try.

    Raises:
        Refused: the content is not what the listing says.
        Cancelled: `cancelled` was set.
        OSError, NetworkError, HfHubHTTPError: the disk's, the network's and the hub's refusals.
    """
    blob = cached.blob(file.etag)
    link = cached.snapshot(source.commit) / file.path
    for folder in (blob.parent, link.parent):
        folder.mkdir(parents=True, exist_ok=True)
    lock = cached.folder.parent / ".locks" / cached.folder.name / f"{file.etag}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not blob.exists():
            partial = _partial(cached, file)
            _fill(partial, source, file, advance=advance, cancelled=cancelled)
            _check(partial, source, file)
            partial.replace(blob)
        if not link.is_symlink() and not link.exists():
            link.symlink_to(Path(*[".."] * len(link.relative_to(cached.folder).parent.parts), "blobs", file.etag))


def _partial(cached: CachedRepo, file: RemoteFile) -> Path:
    return cached.blob(f"{file.etag}.incomplete")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fill(
    partial: Path,
    source: Source,
    file: RemoteFile,
    *,
    advance: Callable[[int], None],
    cancelled: threading.Event,
) -> None:
    if _size(partial) > file.num_bytes:
        partial.unlink()
    partial.touch()
    tries_left = _TRIES
    while (have := _size(partial)) < file.num_bytes:
        try:
            _receive(partial, source, file, have, advance=advance, cancelled=cancelled)
        except (NetworkError, HfHubHTTPError) as error:
            tries_left = _TRIES if _size(partial) > have else tries_left - 1
            if tries_left == 0 or not _may_pass(error):
                raise
            cancelled.wait(BETWEEN_TRIES_S)
        if cancelled.is_set():
            raise Cancelled


def _receive(
    partial: Path,
    source: Source,
    file: RemoteFile,
    have: int,
    *,
    advance: Callable[[int], None],
    cancelled: threading.Event,
) -> None:
    url = hf_hub_url(source.repo, file.path, revision=source.commit, endpoint=source.endpoint)
    # without a coding of its own the server sends the file's bytes, which ranges and sizes count
    headers = {"accept-encoding": "identity", "user-agent": "openinfer"}
    if token := get_token():
        headers["authorization"] = f"Bearer {token}"  # the client takes it off when it is sent to another host
    if have:
        headers["range"] = f"bytes={have}-"
    timeout = (_CONNECT_S, _READ_S, _READ_S, _CONNECT_S)
    with get_session().stream("GET", url, headers=headers, timeout=timeout) as response, partial.open("ab") as out:
        if response.is_error:
            response.read()
        hf_raise_for_status(response)
        if have and response.status_code != _PARTIAL_CONTENT:  # the server sends all of it
            out.truncate(0)
            advance(-have)
            have = 0
        for chunk in response.iter_bytes(_CHUNK_BYTES):
            have += len(chunk)
            if have > file.num_bytes:
                raise Refused(_differs(source, file, f"is longer than the {file.num_bytes} bytes of the hub's listing"))
            out.write(chunk)
            advance(len(chunk))
            if cancelled.is_set():
                return


def _may_pass(error: Exception) -> bool:
    """Whether a later try may go better: a lost connection, an overloaded server."""
    if not isinstance(error, HfHubHTTPError):
        return True
    return error.response.status_code in {408, 429, 500, 502, 503, 504}


def _check(partial: Path, source: Source, file: RemoteFile) -> None:
    if len(file.etag) == _SHA256_DIGITS:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(usedforsecurity=False)  # Git's name for a small file, not a proof of who wrote it
        digest.update(b"blob %d\0" % file.num_bytes)
    with partial.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != file.etag:
        partial.unlink()
        raise Refused(_differs(source, file, "has another digest than the hub's listing says"))


def _differs(source: Source, file: RemoteFile, how: str) -> str:
    return f"{file.path} of {source.repo} as it arrived {how}; nothing of it was kept: try again"
