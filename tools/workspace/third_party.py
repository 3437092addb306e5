"""What our packages install of others: which distributions, what each requires in turn, and under which licence.

    ./run licences      # on Linux, and the last step of ./run lock: asks the index for each distribution's metadata

third_party.json              requirements and licences, of which wheels get their SBOMs: tools/workspace/sbom.py
docs/reference/licences.md    the same as a page

tests/test_third_party.py fails where either is behind the locks, and for a licence that is not in `ALLOWED`.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import install
import uv
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "reference" / "licences.md"
LOCKS = ("workspace", "cuda12")
PYTHON_OF_METADATA = "3.13"  # whose wheels are asked for their metadata
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = (("linux", "Linux", "posix"), ("darwin", "Darwin", "posix"), ("win32", "Windows", "nt"))
MACHINES = ("x86_64", "aarch64", "arm64", "AMD64")

# Licences that the Apache License 2.0 can be distributed beside, SPDX's names. MPL-2.0 binds its own files only, which
# we neither change nor copy.
ALLOWED = frozenset(
    {
        "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0",
        "Zlib",
    }
)  # fmt: skip
# Not open, hence never in an install without extras: users who choose CUDA get them from NVIDIA, not from us.
ALLOWED_BY_EXTRAS = frozenset({"LicenseRef-NVIDIA-Proprietary"})
OF_CLASSIFIER = {
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
# Read in the distribution's own licence file, where its metadata has no name of SPDX's.
OF_FILE = {
    "colorama": "BSD-3-Clause",
    "contourpy": "BSD-3-Clause",
    "cuda-toolkit": "LicenseRef-NVIDIA-Proprietary",  # a list of NVIDIA's packages, with no file of its own
    "cycler": "BSD-3-Clause",
    "jinja2": "BSD-3-Clause",
    "kiwisolver": "BSD-3-Clause",
    "nvidia-curand-cu12": "LicenseRef-NVIDIA-Proprietary",
    "protobuf": "BSD-3-Clause",
}

Node = tuple[str, str]  # normalised name, version


@dataclass(frozen=True)
class Distribution:
    """What a distribution's metadata says of it; `licence` is an SPDX expression, or empty if it says nothing."""

    name: str
    version: str
    licence: str
    requires: list[str]

    @property
    def node(self) -> Node:
        return self.name, self.version

    def extras(self) -> list[str]:
        return sorted({extra for line in self.requires for extra in install.OF_EXTRA.findall(line)})


@dataclass(frozen=True)
class Pin:
    """An entry of a lock: when it is installed, if not always, and the SHA-256 of each of its files."""

    marker: str
    hashes: list[str]


class Failure(Exception):
    """The locks, or what an index says, do not fit our packages; the message says where."""


def main() -> int:
    refresh()
    return 0


def refresh() -> None:
    """Write the table and the page from the locks and what the index says of each distribution."""
    ours, pins = our_packages(), locked()
    known: dict[Node, Distribution] = {}
    while missing := sorted(reached(ours, known, pins) - known.keys() - {each.node for each in ours.values()}):
        known |= {each.node: each for each in fetched(missing)}
    table = [asdict(known[node]) for node in sorted(known)]
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(ours, known, pins), encoding="utf-8")
    print(f"licences: {TABLE.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}, {len(table)} distributions")


def our_packages() -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        lines = list(project.get("dependencies", []))
        for extra, each in project.get("optional-dependencies", {}).items():
            lines += [_with_extra(line, extra) for line in each]
        found[project["name"]] = Distribution(project["name"], project["version"], project["license"], lines)
    return found


def _with_extra(line: str, extra: str) -> str:
    requirement = Requirement(line)
    also = f"({requirement.marker}) and " if requirement.marker else ""
    requirement.marker = Marker(f'{also}extra == "{extra}"')
    return str(requirement)


def known_distributions() -> dict[Node, Distribution]:
    entries = [Distribution(**each) for each in json.loads(TABLE.read_text(encoding="utf-8"))]
    return {each.node: each for each in entries}


def locked() -> dict[Node, Pin]:
    """Return what is in the locks, CUDA 12 beside CUDA 13."""
    found: dict[Node, Pin] = {}
    for lock in LOCKS:
        text = (install.LOCKS / f"{lock}.txt").read_text(encoding="utf-8")
        for entry in install.PINNED.finditer(text):
            name, version, rest = entry.groups()
            found[name, version] = Pin(rest.partition("\\")[0].strip(" ;"), sorted(install.HASH.findall(rest)))
    return found


def reached(
    ours: dict[str, Distribution], known: dict[Node, Distribution], pins: dict[Node, Pin], *, extras: bool = True
) -> set[Node]:
    """Return all that our packages install, of ours and of others; without `extras` what they do when none is named."""
    starts = [(each.node, extra) for each in ours.values() for extra in ("", *(each.extras() if extras else ()))]
    return set(graph(starts, ours, known, pins))


def graph(
    starts: Iterable[tuple[Node, str]],
    ours: dict[str, Distribution],
    known: dict[Node, Distribution],
    pins: dict[Node, Pin],
) -> dict[Node, set[Node]]:
    """Return what follows from `starts`, distributions each with one of their extras or "", and what requires what.

    A distribution that is not in `known` requires nothing yet.

    Raises:
        Failure: the locks have no version that a requirement allows.
    """
    versions: dict[str, list[Node]] = {}
    for name, version in [*pins, *(each.node for each in ours.values())]:
        versions.setdefault(name, []).append((name, version))
    by_node = known | {each.node: each for each in ours.values()}
    edges: dict[Node, set[Node]] = {}
    todo = list(starts)
    seen = set(todo)
    while todo:
        node, extra = todo.pop()
        targets = edges.setdefault(node, set())
        for requirement in required(by_node[node], extra) if node in by_node else ():
            name = canonicalize_name(requirement.name)
            fitting = [each for each in versions.get(name, []) if requirement.specifier.contains(each[1], True)]
            if not fitting:
                raise Failure(
                    f"{node[0]} {node[1]} requires {requirement}, for which no lock has a version: ./run lock"
                )
            targets |= {each for each in fitting if each != node}
            new = {(each, wanted) for each in fitting for wanted in ("", *requirement.extras)} - seen
            seen |= new
            todo += sorted(new)
    return edges


def required(distribution: Distribution, extra: str) -> Iterator[Requirement]:
    """Yield what a distribution requires somewhere with this extra, or without any if it is ""."""
    for line in distribution.requires:
        requirement, marker = parsed(line)
        if not marker or holds_somewhere(marker, extra):
            yield requirement


@cache
def parsed(line: str) -> tuple[Requirement, str]:
    requirement = Requirement(line)
    return requirement, str(requirement.marker or "")


@cache
def holds_somewhere(marker: str, extra: str) -> bool:
    """Return whether a marker holds on a platform and a Python that the locks are for, the same on every machine."""
    parsed = Marker(marker)
    return any(parsed.evaluate(environment | {"extra": extra}) for environment in environments())


@cache
def environments() -> list[dict[str, str]]:
    return [
        {
            "implementation_name": "cpython",
            "implementation_version": f"{python}.0",
            "os_name": os_name,
            "platform_machine": machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": system,
            "platform_version": "",
            "python_full_version": f"{python}.0",
            "python_version": python,
            "sys_platform": platform,
        }
        for python, (platform, system, os_name), machine in product(PYTHONS, PLATFORMS, MACHINES)
    ]


def fetched(nodes: list[Node]) -> Iterator[Distribution]:
    """Ask the index for the metadata of these versions; pip asks for no more than that where an index has it apart."""
    while nodes:
        once = dict(reversed(nodes))  # two versions of one distribution are for two calls
        yield from _fetched_once(once)
        nodes = [node for node in nodes if node not in once.items()]


def _fetched_once(versions: dict[str, str]) -> Iterator[Distribution]:
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [uv.find_uv_bin(), "tool", "run", "--quiet", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--only-binary", ":all:", "--python-version", PYTHON_OF_METADATA]
        command += ["--target", scratch, "--report", str(report)]
        subprocess.run([*command, *(f"{name}=={version}" for name, version in versions.items())], check=True)
        for each in json.loads(report.read_text(encoding="utf-8"))["install"]:
            metadata = each["metadata"]
            name = canonicalize_name(metadata["name"])
            yield Distribution(name, versions[name], licence(name, metadata), metadata.get("requires_dist", []))


def licence(name: str, metadata: dict[str, Any]) -> str:
    """Return the SPDX expression that a distribution's metadata gives, or its file as someone read it."""
    for given in filter(None, (metadata.get("license_expression"), metadata.get("license"))):
        with suppress(InvalidLicenseExpression):
            return canonicalize_license_expression(given)
    classified = {
        line.rpartition(" :: ")[2] for line in metadata.get("classifier", []) if line.startswith("License ::")
    }
    if classified and classified <= OF_CLASSIFIER.keys():
        return " AND ".join(sorted(OF_CLASSIFIER[each] for each in classified))
    return OF_FILE.get(name, "")


def is_allowed(expression: str, allowed: frozenset[str]) -> bool:
    """Return whether an SPDX expression leaves a choice of which all is allowed; of parentheses all has to be."""
    if "(" in expression:
        expression = expression.replace("(", "").replace(")", "").replace(" OR ", " AND ")
    return any(set(choice.split(" AND ")) <= allowed for choice in expression.split(" OR "))


def refused(ours: dict[str, Distribution], known: dict[Node, Distribution], pins: dict[Node, Pin]) -> list[str]:
    """Name each distribution whose licence is missing, or not allowed where it is installed."""
    always = reached(ours, known, pins, extras=False)
    return [
        f"{each.name} {each.version}: {each.licence or 'no licence is named'}"
        for each in known.values()
        if not is_allowed(each.licence, ALLOWED if each.node in always else ALLOWED | ALLOWED_BY_EXTRAS)
    ]


def page(ours: dict[str, Distribution], known: dict[Node, Distribution], pins: dict[Node, Pin]) -> str:
    always = reached(ours, known, pins, extras=False)
    rows = "".join(
        f"| {each.name} | {each.version} | {each.licence} | {'always' if each.node in always else 'with an extra'} |\n"
        for each in (known[node] for node in sorted(known))
    )
    return f"""# Licences of third parties

openinfer is under the Apache License 2.0. These distributions are installed beside its wheels, in the versions of the
locks, on some platform and Python; licences are SPDX expressions, from each one's own metadata. `./run lock` writes
this page.

Allowed are {", ".join(sorted(ALLOWED))};
and for what comes only with an extra, as CUDA does, {", ".join(sorted(ALLOWED_BY_EXTRAS))}: users get it
from NVIDIA under NVIDIA's terms. A test refuses any other.

| distribution | version | licence | installed |
|---|---|---|---|
{rows}"""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"FAILED: {failure}")
