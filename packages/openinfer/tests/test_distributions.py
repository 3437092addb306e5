"""Locks hold what is installed, file by file: a difference names the distribution and the file."""

import hashlib
import json
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from openinfer.commands.main import main
from openinfer_core import Refused
from openinfer_core.contracts.installed import (
    LockDiffers,
    LockedDistribution,
    distribution_differences,
    lock_distributions,
)


def install_wheel(site: Path, name: str, files: dict[str, str], *, requires: tuple[str, ...] = ()) -> None:
    """Files, metadata and a RECORD, as an installer leaves them; `name` is also the module's."""
    info = f"{name}-1.0.dist-info"
    required = "".join(f"Requires-Dist: {each}\n" for each in requires)
    contents = files | {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{required}"}
    contents |= {f"{info}/INSTALLER": "uv", f"{info}/direct_url.json": json.dumps({"url": "file:///wheels"})}
    lines: list[str] = []
    for path, content in contents.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(content)
        digest = urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(content)}")
    (site / info / "RECORD").write_text("\n".join([*lines, f"{info}/RECORD,,", f"{name}/__pycache__/x.pyc,,"]) + "\n")


def install_editable(site: Path, name: str, project: Path) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}}))
    (site / f"_{name}.pth").write_text(f"{project / 'src'}\n")
    (info / "RECORD").write_text(f"_{name}.pth,,\n{info.name}/METADATA,,\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def test_wheel_has_one_digest_over_its_record_whoever_installed_it(site: Path) -> None:
    install_wheel(site, "lockedwheel", {"lockedwheel/__init__.py": "x = 1\n"})
    before = lock_distributions(["lockedwheel"])
    assert before["lockedwheel"].version == "1.0"
    assert not before["lockedwheel"].editable
    assert not before["lockedwheel"].files
    (site / "lockedwheel-1.0.dist-info" / "INSTALLER").write_text("pip")
    (site / "lockedwheel-1.0.dist-info" / "direct_url.json").write_text("{}")
    assert lock_distributions(["lockedwheel"]) == before


def test_file_without_a_hash_in_record_is_hashed_all_the_same(site: Path) -> None:
    install_wheel(site, "lockedwheel", {"lockedwheel/__init__.py": "x = 1\n"})
    record = site / "lockedwheel-1.0.dist-info" / "RECORD"
    record.write_text("lockedwheel/__init__.py,,\n")
    before = lock_distributions(["lockedwheel"])
    (site / "lockedwheel" / "__init__.py").write_text("x = 2\n")
    assert lock_distributions(["lockedwheel"]) != before


def test_changed_or_missing_file_of_a_wheel_is_named(site: Path) -> None:
    install_wheel(site, "lockedwheel", {"lockedwheel/__init__.py": "x = 1\n"})
    module = site / "lockedwheel" / "__init__.py"
    module.write_text("x = 2\n")
    with pytest.raises(LockDiffers) as caught:
        lock_distributions(["lockedwheel"])
    assert str(caught.value) == f"lockedwheel 1.0: {module} is not what its RECORD says; reinstall it"
    module.unlink()
    with pytest.raises(LockDiffers, match=r"^lockedwheel 1\.0: .*__init__\.py cannot be read: "):
        lock_distributions(["lockedwheel"])


def test_certificate_bundle_with_an_authority_of_the_machine_is_locked_as_found(site: Path) -> None:
    install_wheel(site, "certifi", {"certifi/__init__.py": "x = 1\n", "certifi/cacert.pem": "shipped\n"})
    shipped = lock_distributions(["certifi"])
    bundle = site / "certifi" / "cacert.pem"
    bundle.write_text("shipped\nthe machine's own\n")
    machines = lock_distributions(["certifi"])
    assert set(machines["certifi"].files) == {"certifi/cacert.pem"}
    difference = ["certifi 1.0 is not the locked one, by certifi/cacert.pem"]
    assert distribution_differences(shipped, machines) == difference
    bundle.write_text("shipped\nanother's\n")
    assert distribution_differences(machines, lock_distributions(["certifi"])) == difference
    (site / "certifi" / "__init__.py").write_text("x = 2\n")
    with pytest.raises(LockDiffers, match="is not what its RECORD says"):
        lock_distributions(["certifi"])


def test_a_bundle_elsewhere_is_held_against_its_record(site: Path) -> None:
    install_wheel(site, "lockedwheel", {"certifi/cacert.pem": "shipped\n"})
    (site / "certifi" / "cacert.pem").write_text("another's\n")
    with pytest.raises(LockDiffers, match="is not what its RECORD says"):
        lock_distributions(["lockedwheel"])


def test_another_build_of_one_version_differs_by_its_record(site: Path) -> None:
    install_wheel(site, "lockedwheel", {"lockedwheel/__init__.py": "x = 1\n"})
    before = lock_distributions(["lockedwheel"])
    install_wheel(site, "lockedwheel", {"lockedwheel/__init__.py": "x = 2\n"})
    assert distribution_differences(before, lock_distributions(["lockedwheel"])) == [
        "lockedwheel 1.0 is not the locked one, by its RECORD: another build of that version is installed"
    ]


def test_editable_install_is_marked_and_hashed_as_a_tree(site: Path, tmp_path: Path) -> None:
    package = tmp_path / "project" / "src" / "lockedtree"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("x = 1\n")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_text("cache")
    install_editable(site, "lockedtree", tmp_path / "project")
    before = lock_distributions(["lockedtree"])
    assert before["lockedtree"].editable
    assert set(before["lockedtree"].files) == {"lockedtree/__init__.py"}
    (package / "__pycache__" / "x.pyc").write_text("another cache")
    assert lock_distributions(["lockedtree"]) == before
    (package / "__init__.py").write_text("x = 2\n")
    (package / "new.py").write_text("y = 1\n")
    assert distribution_differences(before, lock_distributions(["lockedtree"])) == [
        "lockedtree 1.0 is not the locked one, by lockedtree/__init__.py, lockedtree/new.py"
    ]


def test_what_is_required_is_locked_and_what_an_extra_names_is_not(site: Path) -> None:
    install_wheel(site, "lockedlow", {"lockedlow.py": ""})
    install_wheel(site, "lockedside", {"lockedside.py": ""})
    requires = ("lockedlow>=1", 'lockedside; extra == "more"', "lockedabsent; sys_platform == 'plan9'")
    install_wheel(site, "lockedtop", {"lockedtop.py": ""}, requires=requires)
    assert list(lock_distributions(["lockedtop"])) == ["lockedlow", "lockedtop"]


def test_distribution_without_a_record_cannot_be_locked(site: Path) -> None:
    info = site / "lockedbare-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lockedbare\nVersion: 1.0\n")
    with pytest.raises(Refused, match=r"^lockedbare 1\.0 has no RECORD of its files"):
        lock_distributions(["lockedbare"])


def test_differences_name_versions_kinds_and_what_came_or_went() -> None:
    wheel = LockedDistribution(version="1.0", digest="a")
    assert distribution_differences({"p": wheel}, {"p": LockedDistribution(version="2.0", digest="a")}) == [
        "p is 2.0, locked 1.0"
    ]
    tree = LockedDistribution(version="1.0", digest="a", editable=True)
    assert distribution_differences({"p": wheel}, {"p": tree}) == [
        "p 1.0 is an editable install, locked installed from a wheel"
    ]
    assert distribution_differences({"p": wheel}, {}) == ["p 1.0 is locked, and not a part of it"]
    assert distribution_differences({}, {"p": wheel}) == ["p 1.0 is not locked"]
    files = {f"{name}.py": name for name in "abcde"}
    many = LockedDistribution(version="1.0", digest="b", editable=True, files=files)
    assert distribution_differences({"p": tree}, {"p": many}) == [
        "p 1.0 is not the locked one, by a.py, b.py, c.py, and 2 files more"
    ]


def test_serve_locked_refuses_a_file_that_changed(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "OPENINFER_CONTRACT = 1\nfrom openinfer_core.queue_policies import FirstComeFirstServed as Policy\n"
    install_wheel(site, "lockedpolicy", {"lockedpolicy.py": source}, requires=("openinfer-core",))
    (site / "lockedpolicy-1.0.dist-info" / "entry_points.txt").write_text(
        "[openinfer.queue_policies]\nlocked = lockedpolicy:Policy\n"
    )
    lock, flags = tmp_path / "lock.json", ["--model", "tiny", "--queue-policy", "locked"]
    assert main(["plan", *flags, "--lock", str(lock)]) == 0
    locked = json.loads(lock.read_text())["distributions"]
    assert {"openinfer", "openinfer-engine", "openinfer-qwen3", "openinfer-server", "lockedpolicy", "numpy"} <= set(
        locked
    )
    assert "openinfer-kimi-k2" not in locked
    capsys.readouterr()
    (site / "lockedpolicy.py").write_text(source + "\n")
    assert main(["serve", *flags, "--locked", str(lock)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert (
        said
        == f"openinfer serve: lockedpolicy 1.0: {site / 'lockedpolicy.py'} is not what its RECORD says; reinstall it"
    )


def test_serve_locked_refuses_a_lock_of_another_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "lock.json"
    assert main(["plan", "--model", "tiny", "--lock", str(lock)]) == 0
    lock.write_text(lock.read_text().replace('"format": 2', '"format": 1'))
    assert main(["serve", "--model", "tiny", "--locked", str(lock)]) == 2
    assert "has format 1, and this release reads 2: write it again" in capsys.readouterr().err
