"""`./run install` and the installer of a folder of wheels, against an index that offers each of our names at 99.0.

The index is on loopback and has a stub of everything that our packages require, so nothing else is reached.
"""

import hashlib
import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
INSTALLER = ROOT / "tools" / "workspace" / "install.py"
PROJECTS = {path.parent.name: tomllib.loads(path.read_text("utf-8")) for path in ROOT.glob("packages/*/pyproject.toml")}
STRANGER = "99.0"


def load_installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("workspace_install", INSTALLER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_wheel(folder: Path, name: str, version: str, lines: list[str]) -> Path:
    stem = f"{name.replace('-', '_')}-{version}"
    wheel = folder / f"{stem}-py3-none-any.whl"
    files = {
        f"{name.replace('-', '_')}.py": "",
        f"{stem}.dist-info/METADATA": "\n".join(
            ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""]
        ),
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{stem}.dist-info/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{stem}.dist-info/RECORD", record)
    return wheel


def metadata_of(project: dict) -> list[str]:
    """Give the lines of a wheel's METADATA that say what it requires."""
    lines = [f"Requires-Dist: {line}" for line in project.get("dependencies", [])]
    for extra, requirements in project.get("optional-dependencies", {}).items():
        lines.append(f"Provides-Extra: {extra}")
        for line in requirements:
            requirement, _, marker = line.partition(";")
            condition = f"({marker.strip()}) and extra == '{extra}'" if marker else f"extra == '{extra}'"
            lines.append(f"Requires-Dist: {requirement.strip()}; {condition}")
    return lines


def oldest_allowed() -> dict[str, str]:
    """Give each third party that any package may require, at the highest of its lower bounds."""
    lines = [
        line
        for project in PROJECTS.values()
        for part in (
            project["project"].get("dependencies", []),
            *project["project"].get("optional-dependencies", {}).values(),
        )
        for line in part
    ]
    found: dict[str, list[str]] = {}
    for line in lines:
        name, version = re.match(r"([\w.-]+)(?:\[.*?\])?.*?>=([\d.]+)", line).groups()  # type: ignore[union-attr]
        found.setdefault(name, []).append(version)
    return {
        name: max(versions, key=lambda text: [int(part) for part in text.split(".")])
        for name, versions in found.items()
        if name not in PROJECTS
    }


@pytest.fixture(scope="module")
def hostile_index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve every name that is asked for: ours at 99.0, without requirements; third parties as stubs."""
    folder = tmp_path_factory.mktemp("index")
    offered = dict.fromkeys(PROJECTS, STRANGER) | oldest_allowed()
    wheels = {name: write_wheel(folder, name, version, []) for name, version in offered.items()}

    class Simple(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = [part for part in self.path.split("/") if part]
            file = folder / parts[-1]
            if file.suffix == ".whl" and file.exists():
                self.answer(file.read_bytes(), "application/octet-stream")
            elif parts[-1] in wheels:
                page = f'<!DOCTYPE html><html><body><a href="/files/{wheels[parts[-1]].name}">x</a></body></html>'
                self.answer(page.encode(), "text/html")
            else:
                self.send_error(404)

        def answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Simple) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/simple/"
        server.shutdown()
        thread.join()


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Make a folder as `./run wheels` leaves it, with wheels that hold their metadata alone."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    shutil.copy(INSTALLER, folder)
    for name, project in PROJECTS.items():
        write_wheel(folder, name, project["project"]["version"], metadata_of(project["project"]))
    return folder


def environment(index: str, cache: Path, *, with_uv: bool) -> dict[str, str]:
    """Keep nothing of this machine's settings: the index alone is asked, and what it says is not in any cache."""
    here = str(Path(sys.executable).parent)  # where the test environment has uv
    path = [here, *(each for each in os.environ["PATH"].split(os.pathsep) if not (Path(each) / "uv").exists())]
    return {
        "HOME": str(cache),
        "PATH": os.pathsep.join(path if with_uv else path[1:]),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": index,
        "PIP_NO_CACHE_DIR": "1",
        "UV_CACHE_DIR": str(cache / "uv"),
        "UV_DEFAULT_INDEX": index,
        "UV_NO_CONFIG": "1",
    }


def run(*command: str | Path, env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def installed(python: Path, env: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Map each of our distributions to its version and where it came from."""
    code = (
        "import json; from importlib.metadata import distributions\n"
        "print(json.dumps({d.name: (d.version, json.loads(d.read_text('direct_url.json') or '{}').get('url', ''))"
        " for d in distributions() if d.name.startswith('openinfer')}))"
    )
    found: dict[str, tuple[str, str]] = json.loads(run(python, "-I", "-c", code, env=env))
    return found


def test_without_our_installer_the_stranger_wins(hostile_index: str, wheels: Path, tmp_path: Path) -> None:
    """The control: a folder of wheels beside an index is not enough, as the higher version is taken."""
    env = environment(hostile_index, tmp_path / "home", with_uv=True)
    run("uv", "venv", "--python", sys.executable, tmp_path / "venv", env=env)
    python = tmp_path / "venv" / "bin" / "python"
    run("uv", "pip", "install", "--python", python, "--find-links", wheels, "openinfer[qwen3]", env=env)
    assert installed(python, env)["openinfer"][0] == STRANGER


@pytest.mark.parametrize("with_uv", [False, True], ids=["pip", "uv"])
def test_a_folder_of_wheels_installs_no_strangers_package(
    hostile_index: str, wheels: Path, tmp_path: Path, with_uv: bool
) -> None:
    env = environment(hostile_index, tmp_path / "home", with_uv=with_uv)
    into = tmp_path / "it"
    flags = ["--into", into, "--python", sys.executable, "--unlocked", "--cuda13", "--nccl", "--offload", "--otel"]
    run(sys.executable, wheels / "install.py", *flags, env=env)
    found = installed(into / "bin" / "python", env)
    assert {"openinfer", "openinfer-core", "openinfer-kernels", "openinfer-kv-offload"} <= found.keys()
    for name, (version, url) in found.items():
        assert version == PROJECTS[name]["project"]["version"]
        assert url.startswith(wheels.as_uri())
    assert json.loads((into / "chosen-extras.json").read_text("utf-8")) == ["cuda13", "nccl13", "offload", "otel"]
    # a service may have no right to write bytecode there when it starts
    modules, compiled = ([*into.rglob(f"openinfer*{end}")] for end in (".py", ".pyc"))
    assert len(compiled) == len(modules) > 0


def locked(index: str) -> dict[str, str]:
    """Give the lock's entry for each third party that the index has."""
    entries = {}
    for name, version in oldest_allowed().items():
        file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        with urllib.request.urlopen(f"{index}../files/{file}") as answer:
            digest = hashlib.sha256(answer.read()).hexdigest()
        entries[name] = f"{name}=={version} \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{digest}\n"
    return entries


@pytest.mark.parametrize("with_uv", [False, True], ids=["pip", "uv"])
def test_a_third_party_is_installed_only_as_the_lock_has_it(
    hostile_index: str, wheels: Path, tmp_path: Path, with_uv: bool
) -> None:
    env = environment(hostile_index, tmp_path / "home", with_uv=with_uv)
    lock, entries = wheels / "locks" / "workspace.txt", locked(hostile_index)
    lock.parent.mkdir()
    lock.write_text("".join(entries.values()))
    command = [sys.executable, wheels / "install.py", "--into", tmp_path / "it", "--python", sys.executable]
    run(*command, env=env)
    assert "openinfer" in installed(tmp_path / "it" / "bin" / "python", env)
    # the same version from the same index, but not the file that the lock knows
    other = f"msgspec=={oldest_allowed()['msgspec']} \\\n    --hash=sha256:{'0' * 64}\n"
    lock.write_text("".join((entries | {"msgspec": other}).values()))
    done = subprocess.run([*command, "--fresh"], env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "msgspec" in done.stderr
    assert re.search("hash", done.stderr, re.IGNORECASE)


def test_a_checkout_installs_no_strangers_package(hostile_index: str, tmp_path: Path) -> None:
    env = environment(hostile_index, tmp_path / "home", with_uv=True)
    flags = ["--into", tmp_path / "it", "--python", sys.executable, "--unlocked", "--dry-run", "--cuda13", "--offload"]
    example = ROOT / "examples" / "openinfer-shortest-first"
    said = run(sys.executable, INSTALLER, *flags, "--with", example, env=env)
    ours = re.findall(r"\+ (openinfer[\w-]*)(.*)", said)
    assert {"openinfer", "openinfer-core", "openinfer-kv-offload", "openinfer-shortest-first"} <= dict(ours).keys()
    assert all(source.startswith(f" @ {ROOT.as_uri()}") for _, source in ours), said


def test_the_constraints_of_the_wheels_name_every_package_whether_it_is_installed_or_not(wheels: Path) -> None:
    installer = load_installer()
    packages = installer.find_packages(wheels)
    wanted = installer.Wanted()
    wanted.add(packages, "openinfer-kernels", {"cuda13"})
    assert {line.partition(" @ ")[0] for line in installer.bound(packages)} == PROJECTS.keys()
    assert wanted.extras == {"openinfer-kernels": {"", "cuda13"}}


def test_each_flag_of_the_installer_is_explained_and_what_it_brings_is_real() -> None:
    installer = load_installer()
    packages = installer.find_packages(INSTALLER.parent)
    flags = installer.flags_of(packages["openinfer"], packages)
    assert set(flags) == set(installer.HELP)


def test_extras_add_up_and_what_excludes_another_is_refused(tmp_path: Path) -> None:
    installer = load_installer()
    choice = ["cuda12", "cuda13", "nccl", "otel"]
    (tmp_path / installer.CHOSEN).write_text('["cuda13"]')

    def asking(*extras: str, fresh: bool = False) -> set[str]:
        namespace = installer.argparse.Namespace(fresh=fresh, **{extra: extra in extras for extra in choice})
        chosen: set[str] = installer.chosen_extras(namespace, choice, tmp_path)
        return chosen

    assert asking("nccl", "otel") == {"cuda13", "nccl13", "otel"}
    assert asking("cuda12", fresh=True) == {"cuda12"}
    with pytest.raises(installer.Failure, match="exclude each other"):
        asking("cuda12")
    with pytest.raises(installer.Failure, match="give --cuda13 or --cuda12"):
        asking("nccl", fresh=True)


def test_what_the_tests_of_a_package_need_is_its_dependency_group(tmp_path: Path) -> None:
    installer = load_installer()
    assert installer.tests_need(ROOT / "examples" / "openinfer-sqlite-tier") == [
        "hypothesis>=6.150,<7",
        "pytest>=9,<10",
    ]
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "mine"\n')
    assert installer.tests_need(tmp_path) == ["pytest"]
    project.write_text('[dependency-groups]\nall = ["pytest"]\ntest = [{include-group = "all"}]\n')
    with pytest.raises(installer.Failure, match="write its lines out"):
        installer.tests_need(tmp_path)


def test_two_wheels_of_one_package_are_refused(wheels: Path) -> None:
    write_wheel(wheels, "openinfer-core", "0.0.9", [])
    installer = load_installer()
    with pytest.raises(installer.Failure, match="several wheels of openinfer-core"):
        installer.find_packages(wheels)


def test_a_folder_with_something_else_in_it_is_left_alone(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    command = [sys.executable, wheels / "install.py", "--into", tmp_path / "home", "--fresh"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is not empty" in done.stderr
    assert (tmp_path / "home" / "letter").exists()


def test_no_page_and_no_message_installs_our_packages_from_an_index() -> None:
    """They are on none: `pip install openinfer-core` gets whatever a stranger put there."""
    tells_to = re.compile(r"""(?:pip|pipx|uv)\s+(?:add|install)\s+(?:-\S+\s+)*['"`]?openinfer(?![\w./-]*/)""")
    files = [
        path
        for pattern in ("*", "docs/**/*", "deploy/**/*", "packages/**/*", "examples/**/*")
        for path in ROOT.glob(pattern)
    ]
    text_files = {
        path for path in files if path.suffix in {".md", ".py", ".yaml", ".yml", ".toml", ""} and path.is_file()
    }
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in sorted(text_files)
        for match in tells_to.finditer(path.read_text("utf-8", errors="replace"))
        if "test_" not in path.name
    ]
    assert found == []


def test_flags_that_messages_name_are_flags_of_the_installer() -> None:
    installer = load_installer()
    packages = installer.find_packages(INSTALLER.parent)
    known = {f"--{extra}" for extra in installer.flags_of(packages["openinfer"], packages)}
    sources = "\n".join(path.read_text("utf-8") for path in ROOT.glob("packages/*/src/**/*.py"))
    named = set(re.findall(r"""brought_by\(\s*["'](--[a-z0-9-]+)""", sources))
    named |= set(re.findall(r"run install (?:--fresh )?(--[a-z0-9-]+)", sources))
    assert named
    assert named <= known | {"--fresh"}
