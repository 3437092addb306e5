"""What is installed, down to its files: the distributions of a composition, as a lock file holds them.

A distribution from a wheel is its version and a digest over the hashes in its RECORD, and every file that RECORD names
must have the hash that stands there. Bundles of certificate authorities are the exception: administrators add one of
their own in place, so bundles are locked as they are found. An editable distribution has no RECORD of its files: it is
marked, and its tree is hashed file by file. Left out are what installers write for themselves, scripts (whose first
line is the machine's) and caches.
"""

import hashlib
import os
import re
from base64 import urlsafe_b64encode
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import msgspec

from openinfer_core.contracts.releases import OUR_PACKAGES
from openinfer_core.errors import OpenInferError, Refused

_INSTALLERS_OWN = frozenset(("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json", "uv_build.json"))
_CERTIFICATE_BUNDLES = frozenset((("certifi", "certifi/cacert.pem"),))
_MOST_FILES = 20_000  # of one editable tree: more is no package but a folder with environments in it
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class LockDiffers(OpenInferError):
    """What is installed, or composed, is not what was locked; the message has every difference."""


class LockedDistribution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One installed distribution."""

    version: str
    digest: str
    """SHA-256 over names and hashes: of RECORD, or of an editable tree's files."""
    editable: bool = False
    files: dict[str, str] = {}
    """File -> hash, so that a difference has a name: all of an editable tree (SHA-256), and of a wheel the certificate
    bundles that are not what its RECORD says."""


def lock_distributions(names: Iterable[str]) -> dict[str, LockedDistribution]:
    """The named distributions and what they require, each file read and held against its RECORD.

    Raises:
        LockDiffers: a file is gone, or is not what its distribution's RECORD says and no certificate bundle.
        Refused: a distribution has no RECORD, or is an editable tree that cannot be hashed.
    """
    return {name: _lock(found) for name, found in sorted(_with_required(names).items())}


def recorded_digests(names: Iterable[str]) -> dict[str, str]:
    """Version and digest of the named distributions and of what they require, for a comparison at every start.

    Unlike `lock_distributions` it takes a wheel's RECORD for its files, which it does not read: gigabytes on a GPU.

    Raises:
        Refused: an editable tree cannot be hashed.
        LockDiffers: a file of an editable tree cannot be read.
    """
    return {name: _recorded(found) for name, found in sorted(_with_required(names).items())}


def distribution_differences(
    locked: dict[str, LockedDistribution], installed: dict[str, LockedDistribution]
) -> list[str]:
    """A phrase for each distribution that is not the locked one, with the file where one is known."""
    found: list[str] = []
    for name in sorted({*locked, *installed}):
        before, after = locked.get(name), installed.get(name)
        if before is None or after is None:
            version = (after or before or LockedDistribution(version="", digest="")).version
            found.append(f"{name} {version} is {'not locked' if before is None else 'locked, and not a part of it'}")
        elif before.version != after.version:
            found.append(f"{name} is {after.version}, locked {before.version}")
        elif before.editable != after.editable:
            kinds = ("installed from a wheel", "an editable install")
            found.append(f"{name} {after.version} is {kinds[after.editable]}, locked {kinds[before.editable]}")
        elif before.digest != after.digest:
            files = _changed_files(before.files, after.files)
            what = ", ".join(files) if files else "its RECORD: another build of that version is installed"
            found.append(f"{name} {after.version} is not the locked one, by {what}")
    return found


def _changed_files(before: dict[str, str], after: dict[str, str]) -> list[str]:
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    more = [f"and {len(changed) - 3} files more"] if len(changed) > 3 else []
    return [*changed[:3], *more]


# --- which ----------------------------------------------------------------------------------------------------


def _with_required(names: Iterable[str]) -> dict[str, Distribution]:
    """The installed distributions of these names and, from each down, of what they require."""
    found: dict[str, Distribution] = {}
    waiting = sorted(set(names))
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # an extra's, or one for another system: what is needed and not there fails where it is needed
        waiting += [each for each in _required_by(name, found[name]) if each not in found]
    return found


def _required_by(name: str, found: Distribution) -> set[str]:
    """What is required at all, and of our extras the libraries; another family that is installed is no part of it."""
    required: set[str] = set()
    for line in found.requires or ():
        requirement = _REQUIREMENT.match(line)
        if requirement is None:
            continue
        sibling = re.sub(r"[-_.]+", "-", requirement.group()).lower()
        is_of_extra = re.search(r"\bextra\s*==", line) is not None
        if not is_of_extra or (name in OUR_PACKAGES and sibling not in OUR_PACKAGES):
            required.add(sibling)
    return required


# --- one distribution -----------------------------------------------------------------------------------------


def _lock(found: Distribution) -> LockedDistribution:
    root = _editable_root(found)
    if root is not None:
        files = _tree(found, root)
        return LockedDistribution(version=found.version, digest=_digest(files), editable=True, files=files)
    recorded = {str(file): file.hash for file in found.files or () if _is_content(PurePosixPath(file))}
    if not recorded:
        raise Refused(f"{found.name} {found.version} has no RECORD of its files, so it cannot be locked; reinstall it")
    hashes: dict[str, str] = {}
    changed_bundles: dict[str, str] = {}
    for name, recorded_hash in recorded.items():
        algorithm = "sha256" if recorded_hash is None else recorded_hash.mode
        path = Path(str(found.locate_file(name)))
        value = _hash_file(path, algorithm, found)
        hashes[name] = f"{algorithm}={value}"
        if recorded_hash is None or recorded_hash.value == value:
            continue
        if (found.name, name) not in _CERTIFICATE_BUNDLES:
            raise LockDiffers(f"{found.name} {found.version}: {path} is not what its RECORD says; reinstall it")
        changed_bundles[name] = hashes[name]
    return LockedDistribution(version=found.version, digest=_digest(hashes), files=changed_bundles)


def _recorded(found: Distribution) -> str:
    root = _editable_root(found)
    if root is None:
        recorded = {str(file): file.hash for file in found.files or () if _is_content(PurePosixPath(file))}
        hashes = {name: "" if each is None else f"{each.mode}={each.value}" for name, each in recorded.items()}
    else:
        hashes = _tree(found, root)
    return f"{found.version} {_digest(hashes)[:16]}"


def _is_content(file: PurePosixPath) -> bool:
    is_outside = ".." in file.parts or file.is_absolute()
    is_installers = file.parent.name.endswith(".dist-info") and file.name in _INSTALLERS_OWN
    return not (is_outside or is_installers or file.suffix == ".pyc")


def _digest(hashes: dict[str, str]) -> str:
    whole = hashlib.sha256()
    for name in sorted(hashes):
        whole.update(f"{name}\0{hashes[name]}\n".encode())
    return whole.hexdigest()


def _hash_file(path: Path, algorithm: str, found: Distribution) -> str:
    """As RECORD has it: base64 of the digest, for URLs and without padding."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, algorithm).digest()
    except (OSError, ValueError) as error:
        raise LockDiffers(f"{found.name} {found.version}: {path} cannot be read: {error}") from error
    return urlsafe_b64encode(digest).rstrip(b"=").decode()


# --- editable trees -------------------------------------------------------------------------------------------


class _DirInfo(msgspec.Struct, frozen=True):
    editable: bool = False


class _DirectUrl(msgspec.Struct, frozen=True):
    url: str = ""
    dir_info: _DirInfo = _DirInfo()


def _editable_root(found: Distribution) -> Path | None:
    """The folder of the project that an editable install points to; None for another install."""
    text = found.read_text("direct_url.json")
    if text is None:
        return None
    try:
        origin = msgspec.json.decode(text, type=_DirectUrl)
    except msgspec.MsgspecError as error:
        raise Refused(f"{found.name} {found.version} has an unreadable direct_url.json: {error}") from error
    if not origin.dir_info.editable:
        return None
    path = unquote(urlsplit(origin.url).path)
    return Path(path.removeprefix("/") if os.name == "nt" else path)  # file:///C:/folder


def _tree(found: Distribution, project: Path) -> dict[str, str]:
    """Every file that the install puts on the path: below the folders of its `.pth`, or the project's `src`."""
    folders = _pth_folders(found) or [project / "src" if (project / "src").is_dir() else project]
    hashes: dict[str, str] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            is_hidden = any(part.startswith(".") or part == "__pycache__" for part in inside.parts)
            if is_hidden or path.suffix == ".pyc" or not path.is_file():
                continue
            hashes[inside.as_posix()] = _hash_file(path, "sha256", found)
            if len(hashes) > _MOST_FILES:
                raise Refused(f"{found.name} {found.version} is an editable tree of more than {_MOST_FILES} files")
    if not hashes:
        raise Refused(f"{found.name} {found.version} is an editable install of {project}, which has no files")
    return hashes


def _pth_folders(found: Distribution) -> list[Path]:
    files = [Path(str(found.locate_file(file))) for file in found.files or () if file.suffix == ".pth"]
    lines = [line.strip() for file in files if file.is_file() for line in file.read_text("utf-8").splitlines()]
    return [Path(line) for line in lines if line and not line.startswith(("#", "import ")) and Path(line).is_dir()]
