"""Models by name, from a server on loopback that speaks the hub's protocol."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from openinfer.hub import transfer
from openinfer.hub.cache import CachedRepo, HubName
from openinfer.hub.download import download
from openinfer.hub.progress import DownloadProgress
from openinfer.models import find_family, find_model_dir
from openinfer_core.errors import InvalidRequest, OpenInferError, Refused, UnclaimedModel

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = HubName("some/tiny")


@dataclass
class FakeHub:
    """One repository, and what goes wrong with it."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut_after: int | None = None  # bytes of a body, then the connection is lost
    refusal: tuple[int, str] | None = None
    knows_ranges: bool = True
    etags: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    endpoint: str = ""

    def listing(self) -> list[dict[str, object]]:
        return [{"type": "directory", "path": "onnx", "oid": "0" * 40, "size": 0}, *map(self._entry, self.files)]

    def _entry(self, path: str) -> dict[str, object]:
        content = self.files[path]
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, object] = {"type": "file", "path": path, "oid": git, "size": len(content)}
        if path.endswith((".safetensors", ".gguf")):
            sha = self.etags.get(path, hashlib.sha256(content).hexdigest())
            entry["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 134}
        return entry

    def bodies_sent(self, path: str) -> list[str | None]:
        return [range_ for asked, range_ in self.requests if asked.endswith(f"/{path}")]


class Handler(BaseHTTPRequestHandler):
    """Answers for a `FakeHub`."""

    protocol_version = "HTTP/1.1"
    fake: FakeHub

    def do_GET(self) -> None:
        fake, url = self.fake, urlsplit(self.path)
        path = unquote(url.path)
        fake.requests.append((path, self.headers.get("range")))
        fake.tokens.add(self.headers.get("authorization"))
        if fake.refusal is not None:
            status, code = fake.refusal
            self._send(status, b"{}", {"X-Error-Code": code})
        elif path == f"/api/models/{REPO.repo}/revision/main":
            self._send(200, json.dumps({"id": REPO.repo, "sha": COMMIT}).encode())
        elif path == f"/api/models/{REPO.repo}/tree/{COMMIT}":
            assert parse_qs(url.query)["recursive"] == ["true"]
            self._send(200, json.dumps(fake.listing()).encode())
        elif path.startswith(f"/{REPO.repo}/resolve/{COMMIT}/"):
            self._body(fake.files[path.split(f"{COMMIT}/", 1)[1]])
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _body(self, content: bytes) -> None:
        fake = self.fake
        begin = int((self.headers.get("range") or "bytes=0-")[6:-1]) if fake.knows_ranges else 0
        rest = content[begin:]
        headers = {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"} if begin else {}
        cut = fake.cut_after if fake.cut_after is not None and len(rest) > fake.cut_after else None
        self._send(206 if begin else 200, rest, headers, cut=cut)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut])
        self.close_connection = cut is not None

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    fake = FakeHub()
    handler = type("HandlerOfThisTest", (Handler,), {"fake": fake})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        fake.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        server.shutdown()
        thread.join()


@pytest.fixture
def tiny_hub(hub: FakeHub) -> FakeHub:
    folder = find_model_dir("tiny")
    hub.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    hub.files |= {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "onnx/config.json": b"{}"}
    return hub


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BETWEEN_TRIES_S", 0.0)
    monkeypatch.delenv("HF_TOKEN", raising=False)


def pull(hub: FakeHub, cache: Path, name: HubName = REPO, **options: object) -> Path:
    return download(name, revision="main", cache_dir=cache, endpoint=hub.endpoint, **options)


def test_a_repository_is_downloaded_once_and_then_found_without_the_hub(tiny_hub: FakeHub, tmp_path: Path) -> None:
    folder = pull(tiny_hub, tmp_path)
    there = sorted(path.name for path in folder.iterdir())
    assert "model.safetensors" in there
    assert not {"modeling.py", "pytorch_model.bin", "onnx"} & set(there)
    assert all(path.is_symlink() and path.read_bytes() == tiny_hub.files[path.name] for path in folder.iterdir())
    assert find_family(folder)[0].name == "qwen3"
    tiny_hub.requests.clear()
    assert CachedRepo.of(tmp_path, REPO.repo).find("main", None) == folder
    assert CachedRepo.of(tmp_path, REPO.repo).find(COMMIT, None) == folder
    assert not tiny_hub.requests
    pull(tiny_hub, tmp_path)
    assert not tiny_hub.bodies_sent("model.safetensors")


def test_huggingface_hub_finds_what_was_downloaded_in_its_cache(tiny_hub: FakeHub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    folder = pull(tiny_hub, tmp_path)
    assert Path(snapshot_download(REPO.repo, cache_dir=tmp_path, local_files_only=True)) == folder
    assert try_to_load_from_cache(REPO.repo, "config.json", cache_dir=tmp_path) == str(folder / "config.json")


def test_what_huggingface_hub_downloaded_is_found(tiny_hub: FakeHub, tmp_path: Path) -> None:
    folder = pull(tiny_hub, tmp_path / "ours")
    theirs = tmp_path / "theirs" / "models--some--tiny"
    shutil.copytree(folder.parents[1], theirs, symlinks=True)
    found = CachedRepo.of(tmp_path / "theirs", REPO.repo).find("main", None)
    assert found == theirs / "snapshots" / COMMIT


def test_a_lost_connection_is_resumed_where_it_ended(tiny_hub: FakeHub, tmp_path: Path) -> None:
    size = len(tiny_hub.files["model.safetensors"])
    tiny_hub.cut_after = size // 3 + 1
    folder = pull(tiny_hub, tmp_path)
    assert (folder / "model.safetensors").read_bytes() == tiny_hub.files["model.safetensors"]
    asked = tiny_hub.bodies_sent("model.safetensors")
    assert asked[0] is None
    begins = [int(str(range_)[6:-1]) for range_ in asked[1:]]
    assert begins == sorted(set(begins))  # each goes on after the one before
    assert begins[0] > 0


def test_an_interrupted_download_goes_on_in_the_next_process(tiny_hub: FakeHub, tmp_path: Path) -> None:
    weights = tiny_hub.files["model.safetensors"]
    tiny_hub.cut_after, tiny_hub.refusal = len(weights) // 2, None
    received: list[int] = []

    def interrupt(num_bytes: int) -> None:
        received.append(num_bytes)
        if sum(received) >= len(weights) // 2:
            raise KeyboardInterrupt

    cached = CachedRepo.of(tmp_path, REPO.repo)
    digest = hashlib.sha256(weights).hexdigest()
    file = transfer.RemoteFile("model.safetensors", len(weights), digest)
    source = transfer.Source(REPO.repo, COMMIT, tiny_hub.endpoint)
    with pytest.raises(KeyboardInterrupt):
        transfer.fetch(source, file, cached, advance=interrupt, cancelled=threading.Event())
    kept = cached.blob(f"{digest}.incomplete").stat().st_size
    assert 0 < kept < len(weights)
    assert transfer.missing_bytes(cached, file) == len(weights) - kept
    tiny_hub.cut_after = None
    tiny_hub.requests.clear()
    assert (pull(tiny_hub, tmp_path) / "model.safetensors").read_bytes() == weights
    assert tiny_hub.bodies_sent("model.safetensors") == [f"bytes={kept}-"]


def test_a_server_without_ranges_sends_all_of_it_again(tiny_hub: FakeHub, tmp_path: Path) -> None:
    weights = tiny_hub.files["model.safetensors"]
    partial = CachedRepo.of(tmp_path, REPO.repo).blob(f"{hashlib.sha256(weights).hexdigest()}.incomplete")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(weights[:1000])
    tiny_hub.knows_ranges = False
    assert (pull(tiny_hub, tmp_path) / "model.safetensors").read_bytes() == weights


def test_content_that_is_not_what_was_listed_is_refused_and_not_kept(tiny_hub: FakeHub, tmp_path: Path) -> None:
    tiny_hub.etags["model.safetensors"] = "0" * 64
    with pytest.raises(Refused, match=r"model.safetensors of some/tiny as it arrived has another digest"):
        pull(tiny_hub, tmp_path)
    assert not list(tmp_path.rglob("*.incomplete"))
    assert CachedRepo.of(tmp_path, REPO.repo).find("main", None) is None


def test_a_model_that_no_family_serves_is_refused_before_its_weights(tiny_hub: FakeHub, tmp_path: Path) -> None:
    tiny_hub.files["config.json"] = b'{"model_type": "unheard-of"}'
    with pytest.raises(UnclaimedModel, match="unheard-of"):
        pull(tiny_hub, tmp_path, accept=find_family)
    assert not tiny_hub.bodies_sent("model.safetensors")


def test_one_gguf_file_is_downloaded_alone(tiny_hub: FakeHub, tmp_path: Path) -> None:
    tiny_hub.files |= {"sub/a.gguf": b"GGUF", "b.gguf": b"GGUF and more"}
    path = pull(tiny_hub, tmp_path, HubName(REPO.repo, "sub/a.gguf"))
    assert path.read_bytes() == b"GGUF"
    assert [asked for asked, _ in tiny_hub.requests if "/resolve/" in asked] == [
        f"/some/tiny/resolve/{COMMIT}/sub/a.gguf"
    ]
    with pytest.raises(Refused, match=r"no file c\.gguf \(it has sub/a\.gguf, b\.gguf\)"):
        pull(tiny_hub, tmp_path, HubName(REPO.repo, "c.gguf"))


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((403, "GatedRepo"), "is gated: accept its terms on its page of the hub, and set HF_TOKEN"),
        ((401, "RepoNotFound"), "the hub has no repository some/tiny, or it is private and needs HF_TOKEN"),
        ((404, "RevisionNotFound"), "has no revision 'main'"),
        ((403, ""), "its token HF_TOKEN is not accepted"),
        ((500, ""), "the hub answered 500 when it was asked for some/tiny; try again later"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    hub: FakeHub, tmp_path: Path, refusal: tuple[int, str], message: str
) -> None:
    hub.refusal = refusal
    with pytest.raises(Refused, match=message) as caught:
        pull(hub, tmp_path)
    assert "\n" not in str(caught.value)


def test_no_network_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"not in the cache .*, and the hub cannot be reached \(ConnectError\)"):
        download(REPO, revision="main", cache_dir=tmp_path, endpoint="http://127.0.0.1:9")


def test_weights_of_another_format_are_named(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"", "x.Q4_0.gguf": b""}
    with pytest.raises(
        Refused, match=r"no safetensors weights \(it has .*\); name one GGUF file: some/tiny/x.Q4_0.gguf"
    ):
        pull(hub, tmp_path)


def test_a_second_set_of_the_same_weights_is_left_out(tiny_hub: FakeHub, tmp_path: Path) -> None:
    tiny_hub.files["consolidated.safetensors"] = b"twice"
    assert not (pull(tiny_hub, tmp_path) / "consolidated.safetensors").exists()


@pytest.mark.parametrize("path", ["../a.gguf", "/a.gguf", "..\\a.gguf"])
def test_a_listing_cannot_name_a_path_outside_the_cache(hub: FakeHub, tmp_path: Path, path: str) -> None:
    hub.files = {path: b""}
    with pytest.raises(Refused, match="which is none"):
        pull(hub, tmp_path, HubName(REPO.repo, path))


def test_a_listing_cannot_name_a_digest_that_is_a_path(tiny_hub: FakeHub, tmp_path: Path) -> None:
    tiny_hub.etags["model.safetensors"] = "../../x"
    with pytest.raises(Refused, match="which is none"):
        pull(tiny_hub, tmp_path)


def test_too_little_room_is_said_before_anything_is_fetched(
    tiny_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(Refused, match=r"needs .* GB more, and .* has 0.00 GB free; make room, or set HF_HOME"):
        pull(tiny_hub, tmp_path)
    assert not tiny_hub.bodies_sent("config.json")


def test_a_disk_that_gets_full_is_one_sentence_and_what_arrived_is_kept(
    tiny_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(Refused, match=r"cannot be stored in .*: No space left on device; make room and try again"):
        pull(tiny_hub, tmp_path)
    assert list(tmp_path.rglob("*.incomplete"))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_part_of_a_repository_in_the_cache_is_completed(tiny_hub: FakeHub, tmp_path: Path, missing: str) -> None:
    folder = pull(tiny_hub, tmp_path)
    (folder / missing).unlink()
    assert CachedRepo.of(tmp_path, REPO.repo).find("main", None) is None
    assert (pull(tiny_hub, tmp_path) / missing).exists()


def test_a_shard_of_the_index_that_is_missing_is_seen(tmp_path: Path) -> None:
    cached = CachedRepo.of(tmp_path, "some/shards")
    snapshot = cached.snapshot(COMMIT)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model-1.safetensors"):
        (snapshot / name).touch()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert cached.find(COMMIT, None) is None
    (snapshot / "model-2.safetensors").touch()
    assert cached.find(COMMIT, None) == snapshot


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-4B", HubName("Qwen/Qwen3-4B")),
        ("a/b.c/d/e.gguf", HubName("a/b.c", "d/e.gguf")),
        ("tiny", None),
        ("/models/x", None),
        ("./a/b", None),
        ("../a", None),
        ("a/b/c", None),
        ("a/..", None),
        ("a/b/../c.gguf", None),
    ],
)
def test_names_of_repositories(model: str, name: HubName | None) -> None:
    assert HubName.parse(model) == name


@pytest.mark.parametrize("revision", ["../main", "a b", "-x", ""])
def test_a_revision_cannot_be_a_path(revision: str) -> None:
    if revision:
        with pytest.raises(InvalidRequest, match="cannot be a branch"):
            find_model_dir("some/tiny", revision=revision)
    with pytest.raises(InvalidRequest, match="is of a repository"):
        find_model_dir("tiny", revision="main")


def test_the_token_is_sent_to_the_hub(tiny_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    pull(tiny_hub, tmp_path)
    assert tiny_hub.tokens == {"Bearer hf_x"}


def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_log() -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    times = iter(range(100))
    for stream in (Terminal(), StringIO()):
        with DownloadProgress(
            "a/b", 4_000_000_000, present_bytes=10**9, stream=stream, clock=lambda: next(times)
        ) as bar:
            bar.advance(10**9)
        assert "a/b [############------------] 2.00 of 4.00 GB" in stream.getvalue()
        assert ("\r" in stream.getvalue()) is stream.isatty()


def command(hub: FakeHub, cache: Path, *argv: str, **env: str) -> "subprocess.CompletedProcess[str]":
    settings = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_ENDPOINT": hub.endpoint, **env}
    return subprocess.run(
        [sys.executable, "-m", "openinfer.commands.main", *argv],
        env=settings,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_commands_and_llm_take_a_name_and_work_offline_afterwards(tiny_hub: FakeHub, tmp_path: Path) -> None:
    missing = command(tiny_hub, tmp_path, "plan", REPO.repo, "--offline")
    assert missing.returncode == 2
    assert "--offline forbids to download it: run openinfer pull some/tiny" in missing.stderr
    assert not tiny_hub.requests
    pulled = command(tiny_hub, tmp_path, "pull", REPO.repo)
    assert (pulled.returncode, pulled.stdout.strip()) == (
        0,
        str(CachedRepo.of(tmp_path, REPO.repo).snapshot(COMMIT)),
    ), pulled.stderr
    assert "some/tiny [########################]" in pulled.stderr
    tiny_hub.requests.clear()
    planned = command(tiny_hub, tmp_path, "plan", REPO.repo, "--revision", "main", "--json", HF_HUB_OFFLINE="1")
    assert json.loads(planned.stdout)["model"] == REPO.repo, planned.stderr
    code = "from openinfer import LLM\nwith LLM('some/tiny', offline=True) as llm: print(llm.generate(['The'])[0].text)"
    settings = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": tiny_hub.endpoint}
    assert subprocess.run([sys.executable, "-c", code], env=settings, check=True, capture_output=True).stdout.strip()
    generated = command(tiny_hub, tmp_path, "generate", "--model", REPO.repo, "The capital of", "--max-tokens", "2")
    assert generated.returncode == 0, generated.stderr
    assert not tiny_hub.requests


def test_the_model_is_the_first_argument_or_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    from openinfer.commands.main import main

    assert main(["plan", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "tiny"
    assert main(["plan", "tiny", "--model", "tiny"]) == 2
    assert "the model is given twice" in capsys.readouterr().err
    with pytest.raises(OpenInferError):
        find_model_dir("nothing")
