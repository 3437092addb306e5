"""The Hugging Face cache, read without a network and without huggingface_hub's client.

    CACHE/models--ORG--NAME/refs/REVISION          the commit that a branch or tag was at
    CACHE/models--ORG--NAME/snapshots/COMMIT/FILE  a symlink to
    CACHE/models--ORG--NAME/blobs/ETAG             its content

The layout is documented at https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

MAIN = "main"

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<file>[\w./-]+\.gguf))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]*")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class HubName:
    """`ORG/NAME`, or `ORG/NAME/FILE.gguf` for one file of a repository."""

    repo: str
    file: str | None = None

    @classmethod
    def parse(cls, model: str) -> "HubName | None":
        found = _NAME.fullmatch(model)
        return None if found is None or ".." in model else cls(found["repo"], found["file"])

    def __str__(self) -> str:
        return self.repo if self.file is None else f"{self.repo}/{self.file}"


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """One repository's folder in the cache, which need not exist."""

    folder: Path

    @classmethod
    def of(cls, cache_dir: Path, repo: str) -> "CachedRepo":
        return cls(cache_dir / f"models--{repo.replace('/', '--')}")

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def blob(self, etag: str) -> Path:
        return self.folder / "blobs" / etag

    def commit_of(self, revision: str) -> str | None:
        """The commit that a branch or tag was at when it was last downloaded; a full commit is itself."""
        if is_commit(revision):
            return revision
        try:
            commit = (self.folder / "refs" / revision).read_text().strip()
        except OSError:
            return None
        return commit if is_commit(commit) else None

    def set_revision(self, revision: str, commit: str) -> None:
        if revision == commit:
            return
        path = self.folder / "refs" / revision
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        new.write_text(commit)
        new.replace(path)  # a reader never sees half a commit

    def find(self, revision: str, file: str | None) -> Path | None:
        """The snapshot with all that is served from it, or the one file asked for; None if something is missing."""
        commit = self.commit_of(revision)
        if commit is None:
            return None
        snapshot = self.snapshot(commit)
        if file is not None:
            return snapshot / file if (snapshot / file).is_file() else None
        return snapshot if is_whole(snapshot) else None


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


def is_revision(revision: str) -> bool:
    """Whether it can be one: it becomes part of a path and of a URL."""
    return _REVISION.fullmatch(revision) is not None and ".." not in revision


def is_whole(snapshot: Path) -> bool:
    """Whether a snapshot has a config, a tokenizer and weights: other programs download parts of a repository."""
    if not (snapshot / "config.json").is_file() or not any((snapshot / name).is_file() for name in _TOKENIZERS):
        return False
    index = snapshot / _INDEX
    if not index.is_file():
        return any(path.is_file() for path in snapshot.glob("*.safetensors"))
    try:
        # What is wrong with an index, the engine says when it reads it; here only absent files matter.
        weight_map = cast("dict[str, Any]", msgspec.json.decode(index.read_bytes())["weight_map"])
        return all((snapshot / str(name)).is_file() for name in set(weight_map.values()))
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return True
