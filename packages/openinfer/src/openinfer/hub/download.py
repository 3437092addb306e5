"""A repository of the Hugging Face hub, or what of it the engine reads, into the cache. Nothing of it is executed."""

import errno
import re
import shutil
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi, RepoFile
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.errors import HTTPError as NetworkError  # pyright: ignore[reportPrivateImportUsage] - of httpx in 1.x, of httpx2 in 2.x

from openinfer.hub.cache import CachedRepo, HubName, is_commit
from openinfer.hub.progress import DownloadProgress
from openinfer.hub.transfer import RemoteFile, Source, fetch, missing_bytes
from openinfer_core import Refused

PATTERNS = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "tiktoken.model",
    "merges.txt",
    "vocab.txt",
)
"""The files of a repository's top folder that are downloaded."""

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".onnx")
_WHOLE = ("model.safetensors", "model.safetensors.index.json")
_SECOND_SET = "consolidated*"  # Mistral's repositories have their weights twice, in two layouts
_CONFIG = "config.json"
_WORKERS = 4
_ETAG = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_ASK_S = 10.0
_FREE_BYTES = 1 << 20  # of the disk, for links and folders


def download(
    name: HubName,
    *,
    revision: str,
    cache_dir: Path,
    endpoint: str | None = None,
    accept: Callable[[Path], object] = lambda folder: None,
) -> Path:
    """Brings the cache up to what the hub has, and returns the snapshot's folder, or the one file that was named.

    Args:
        name: the repository, or one file of it.
        revision: a branch, a tag or a commit.
        cache_dir: the Hugging Face cache.
        endpoint: the hub's address; None is huggingface_hub's own.
        accept: called with the snapshot's folder when `config.json` is in it and no weights are; what it raises ends
            the download.

    Raises:
        Refused: the hub, the network or the disk do not allow it; one sentence says which.
    """
    with _in_one_sentence(name, revision, cache_dir):
        api = HfApi(endpoint=endpoint, library_name="openinfer")
        commit = api.model_info(name.repo, revision=revision, timeout=_ASK_S).sha or ""
        if not is_commit(commit):
            raise Refused(f"the hub names no commit for {name.repo} at {revision}; is HF_ENDPOINT a hub's address?")
        listed = [
            _remote(entry)
            for entry in api.list_repo_tree(name.repo, revision=commit, recursive=True)
            if isinstance(entry, RepoFile)
        ]
        files = _wanted(name, listed)
        cached, source = CachedRepo.of(cache_dir, name.repo), Source(name.repo, commit, endpoint)
        _check_room(name, cached, files)
        first = [file for file in files if file.path == _CONFIG]
        _fetch_all(name, source, cached, first, quiet=True)
        if first:
            accept(cached.snapshot(commit))
        _fetch_all(name, source, cached, [file for file in files if file.path != _CONFIG])
        cached.set_revision(revision, commit)
    return cached.snapshot(commit) if name.file is None else cached.snapshot(commit) / name.file


def _remote(entry: RepoFile) -> RemoteFile:
    lfs = entry.lfs
    return RemoteFile(entry.path, entry.size, entry.blob_id if lfs is None else lfs.sha256)


def _wanted(name: HubName, listed: Sequence[RemoteFile]) -> list[RemoteFile]:
    """The files that are read, in the order of the listing; the paths and digests become paths here, so are checked."""
    paths = [file.path for file in listed]
    if name.file is not None:
        wanted = [file for file in listed if file.path == name.file]
        if not wanted:
            raise Refused(f"{name.repo} has no file {name.file}{_that_it_has(paths, '.gguf')}")
    else:
        wanted = [
            file for file in listed if any(fnmatchcase(file.path, each) for each in PATTERNS) and "/" not in file.path
        ]
        if any(path in _WHOLE for path in paths):
            wanted = [file for file in wanted if not fnmatchcase(file.path, _SECOND_SET)]
        if not any(file.path.endswith(".safetensors") for file in wanted):
            files = _that_it_has(paths, *_OTHER_WEIGHTS)
            named = next((path for path in paths if path.endswith(".gguf")), None)
            hint = "" if named is None else f"; name one GGUF file: {name.repo}/{named}"
            raise Refused(f"{name.repo} has no safetensors weights{files}{hint}")
    for file in wanted:
        if _ETAG.fullmatch(file.etag) is None or ".." in file.path or "\\" in file.path or file.path.startswith("/"):
            raise Refused(f"the hub lists {file.path!r} of {name.repo} with the digest {file.etag!r}, which is none")
    return wanted


def _that_it_has(paths: Sequence[str], *suffixes: str) -> str:
    found = [path for path in paths if path.endswith(suffixes)]
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f" (it has {', '.join(found[:4])}{more})" if found else ""


def _check_room(name: HubName, cached: CachedRepo, files: Sequence[RemoteFile]) -> None:
    needed = sum(missing_bytes(cached, file) for file in files)
    cached.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cached.folder).free
    if needed + _FREE_BYTES > free:
        raise Refused(
            f"{name} needs {needed / 1e9:.2f} GB more, and {cached.folder.parent} has {free / 1e9:.2f} GB free; "
            "make room, or set HF_HOME to a folder on another disk"
        )


def _fetch_all(
    name: HubName, source: Source, cached: CachedRepo, files: Sequence[RemoteFile], *, quiet: bool = False
) -> None:
    missing = [missing_bytes(cached, file) for file in files]
    total = sum(file.num_bytes for file, num_bytes in zip(files, missing, strict=True) if num_bytes)
    cancelled = threading.Event()
    with _progress(name, total, total - sum(missing), quiet=quiet or not any(missing)) as advance:
        pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="openinfer-download")
        try:
            work = [
                pool.submit(fetch, source, file, cached, advance=advance, cancelled=cancelled)
                for file in sorted(files, key=lambda file: file.num_bytes)
            ]
            for each in work:
                each.result()
        finally:
            cancelled.set()
            pool.shutdown(cancel_futures=True)


@contextmanager
def _progress(name: HubName, total: int, present: int, *, quiet: bool) -> Generator[Callable[[int], None]]:
    if quiet:
        yield lambda num_bytes: None
        return
    with DownloadProgress(str(name), total, present_bytes=present) as progress:
        yield progress.advance


@contextmanager
def _in_one_sentence(name: HubName, revision: str, cache_dir: Path) -> Generator[None]:
    """Turns what hub, network and disk raise into `Refused`."""
    try:
        yield
    except GatedRepoError as error:
        raise Refused(
            f"{name.repo} is gated: accept its terms on its page of the hub, and set HF_TOKEN to that account's token"
        ) from error
    except RevisionNotFoundError as error:
        raise Refused(f"{name.repo} has no revision {revision!r} (a branch, a tag or a commit)") from error
    except RepositoryNotFoundError as error:
        raise Refused(
            f"the hub has no repository {name.repo}, or it is private and needs HF_TOKEN; there is no folder of this "
            "name here either"
        ) from error
    except EntryNotFoundError as error:
        raise Refused(f"{name.repo} at {revision!r} lists a file that it does not have; try again") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        why = "its token HF_TOKEN is not accepted" if status in {401, 403} else "try again later"
        raise Refused(f"the hub answered {status} when it was asked for {name.repo}; {why}") from error
    except (NetworkError, OfflineModeIsEnabled, ConnectionError, TimeoutError) as error:
        raise Refused(
            f"{name} is not in the cache {cache_dir}, and the hub cannot be reached ({type(error).__name__}); what "
            "arrived is kept: try again, or give the path of a model folder"
        ) from error
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        hint = "; make room and try again, what arrived is kept" if full else ""
        raise Refused(f"{name} cannot be stored in {cache_dir}: {error.strerror or error}{hint}") from error
    except ValueError as error:
        raise Refused(f"the hub's answer about {name} cannot be read: {error}") from error
