"""Each third party of the product has a licence that is allowed, and each wheel an SBOM that is right."""

import hashlib
import json
import re
import sys
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools" / "workspace"


@pytest.fixture(scope="module")
def third_party() -> ModuleType:
    return imported("third_party")


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    return imported("sbom")


def imported(name: str) -> ModuleType:
    sys.path.insert(0, str(TOOLS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture
def dist(tmp_path: Path, third_party: ModuleType) -> Path:
    """A folder with a wheel of each package, of which an SBOM asks for nothing but the bytes."""
    for package in third_party.our_packages().values():
        name = f"{package.name.replace('-', '_')}-{package.version}-py3-none-any.whl"
        (tmp_path / name).write_bytes(package.name.encode())
    return tmp_path


def sboms(folder: Path) -> dict[str, dict[str, Any]]:
    return {file.name: json.loads(file.read_text("utf-8")) for file in folder.glob("*.cdx.json")}


def names(found: dict[str, Any], scope: str) -> set[str]:
    return {each["name"] for each in found["components"] if each["scope"] == scope}


def test_table_and_page_have_what_the_locks_have(third_party: ModuleType) -> None:
    ours, known, pins = third_party.our_packages(), third_party.known_distributions(), third_party.locked()
    reached = third_party.reached(ours, known, pins) - {each.node for each in ours.values()}
    assert reached == known.keys(), "run ./run licences"
    assert third_party.PAGE.read_text("utf-8") == third_party.page(ours, known, pins), "run ./run licences"


def test_each_licence_is_allowed(third_party: ModuleType) -> None:
    given = third_party.our_packages(), third_party.known_distributions(), third_party.locked()
    assert third_party.refused(*given) == []


def test_a_licence_that_is_missing_copyleft_or_closed_in_every_install_is_refused(third_party: ModuleType) -> None:
    ours, known, pins = third_party.our_packages(), third_party.known_distributions(), third_party.locked()
    (numpy, *_), (cupy, *_) = ([node for node in known if node[0] == name] for name in ("numpy", "cupy-cuda13x"))
    closed, gpl = "LicenseRef-NVIDIA-Proprietary", "MIT AND GPL-3.0-only"
    for node, licence, is_refused in [
        (numpy, "", True),
        (numpy, closed, True),
        (cupy, closed, False),
        (cupy, gpl, True),
    ]:
        changed = known | {node: third_party.Distribution(*node, licence, known[node].requires)}
        assert bool(third_party.refused(ours, changed, pins)) == is_refused, (node, licence)


@pytest.mark.parametrize(
    ("expression", "is_allowed"),
    [
        ("MIT", True),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("GPL-3.0-only OR MIT AND Zlib", True),
        ("(MIT OR Zlib) AND Apache-2.0", True),
        ("(MIT OR GPL-3.0-only) AND LGPL-2.1-only", False),
    ],
)
def test_expression_is_allowed_if_some_choice_of_it_is(
    third_party: ModuleType, expression: str, is_allowed: bool
) -> None:
    assert third_party.is_allowed(expression, third_party.ALLOWED) == is_allowed


def test_licence_is_the_expression_then_the_classifier_and_never_a_guess(third_party: ModuleType) -> None:
    classified = {"license": "see the file", "classifier": ["License :: OSI Approved :: MIT License"]}
    assert third_party.licence("a", {"license_expression": "mit or apache-2.0", **classified}) == "MIT OR Apache-2.0"
    assert third_party.licence("a", classified) == "MIT"
    assert third_party.licence("a", {"classifier": ["License :: OSI Approved :: BSD License"]}) == ""
    assert third_party.licence("a", {}) == ""


def test_markers_are_read_for_every_platform_and_only_for_extras_that_are_asked_for(third_party: ModuleType) -> None:
    assert third_party.holds_somewhere("sys_platform == 'win32'", "")
    assert not third_party.holds_somewhere("python_version < '3.11'", "")
    assert not third_party.holds_somewhere("extra == 'kv-events'", "")
    assert third_party.holds_somewhere("extra == 'kv-events' and sys_platform != 'win32'", "kv-events")


def test_a_requirement_that_no_lock_has_is_refused_by_name(third_party: ModuleType) -> None:
    ours = {"a": third_party.Distribution("a", "1", "MIT", ["numpy>=99"])}
    with pytest.raises(third_party.Failure, match="a 1 requires numpy>=99"):
        third_party.reached(ours, {}, third_party.locked())


def test_each_wheel_gets_an_sbom_with_its_hash_and_what_it_requires(
    dist: Path, sbom: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert len(sbom.write_sboms(dist)) == len(list(dist.glob("*.whl")))
    for name, found in sboms(dist).items():
        assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.6", 1)
        assert uuid.UUID(found["serialNumber"].removeprefix("urn:uuid:"))
        assert found["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
        subject = found["metadata"]["component"]
        wheel = dist / name.replace(".cdx.json", "-py3-none-any.whl")
        assert subject["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
        each_one = [subject, *found["components"]]
        refs = [each["bom-ref"] for each in each_one]
        assert len(set(refs)) == len(refs)
        assert sorted(refs) == sorted(each["ref"] for each in found["dependencies"])
        assert {ref for each in found["dependencies"] for ref in each["dependsOn"]} <= set(refs)
        for each in each_one:
            assert each["type"] == "library"
            assert each["purl"] == f"pkg:pypi/{each['name']}@{each['version']}"
            assert each["hashes"]
            assert all(re.fullmatch("[0-9a-f]{64}", digest["content"]) for digest in each["hashes"])
            assert each["licenses"][0]["expression"]


def test_sbom_has_what_a_package_requires_in_turn_and_nothing_else(dist: Path, sbom: ModuleType) -> None:
    sbom.write_sboms(dist)
    found = sboms(dist)
    core = found["openinfer_core-0.1.0.cdx.json"]
    assert (names(core, "required"), names(core, "optional")) == ({"msgspec", "numpy"}, {"greenlet"})
    kernels = found["openinfer_kernels-0.1.0.cdx.json"]
    assert names(kernels, "required") == {"numpy"}
    assert {"cupy-cuda12x", "cupy-cuda13x", "nvidia-cublas", "nvidia-nccl-cu12"} <= names(kernels, "optional")
    whole = found["openinfer-0.1.0.cdx.json"]
    assert {"openinfer-core", "openinfer-server", "huggingface-hub", "idna"} <= names(whole, "required")
    assert "openinfer-kernels" in names(whole, "optional")
    assert not {"pytest", "hatchling"} & {each["name"] for each in whole["components"]}


def test_same_wheels_give_the_same_bytes_and_another_wheel_another_sbom(
    dist: Path, sbom: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    first, again = ([file.read_bytes() for file in sbom.write_sboms(dist)] for _ in range(2))
    assert first == again
    assert "timestamp" not in json.loads(first[0])["metadata"]
    serials = {each["serialNumber"] for each in sboms(dist).values()}
    next(dist.glob("openinfer_core-*.whl")).write_bytes(b"changed")
    sbom.write_sboms(dist)
    assert serials.isdisjoint({sboms(dist)["openinfer_core-0.1.0.cdx.json"]["serialNumber"]})
