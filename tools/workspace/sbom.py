"""Write beside each wheel what it is and what it brings: an SBOM in CycloneDX 1.6 (https://cyclonedx.org), as JSON.

`./run wheels` calls it. `NAME-VERSION.cdx.json` has the wheel with its hash, and of what it requires, in turn, each
version of the locks with its licence and the hash of each of its files: scope `required` for what every install gets,
`optional` for what an extra brings. The same wheels and locks give the same bytes. A time is in it only if
SOURCE_DATE_EPOCH is set, as a release's build does.
"""

import hashlib
import json
import os
import uuid
from datetime import UTC, datetime
from pathlib import Path

import third_party
from third_party import Distribution, Node, Pin

SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"


def write_sboms(folder: Path) -> list[Path]:
    """Write the SBOM of each of our packages; the wheels of all are in the folder.

    Raises:
        third_party.Failure: the locks or third_party.json are behind the packages.
    """
    ours, known, pins = third_party.our_packages(), third_party.known_distributions(), third_party.locked()
    hashes = {each.node: hashlib.sha256(wheel_of(each, folder).read_bytes()).hexdigest() for each in ours.values()}
    pins |= {node: Pin("", [digest]) for node, digest in hashes.items()}
    written: list[Path] = []
    for package in ours.values():
        file = folder / f"{package.name.replace('-', '_')}-{package.version}.cdx.json"
        text = json.dumps(sbom(package, ours, known, pins), indent=1, ensure_ascii=False) + "\n"
        file.write_text(text, encoding="utf-8")
        written.append(file)
    return written


def wheel_of(package: Distribution, folder: Path) -> Path:
    return folder / f"{package.name.replace('-', '_')}-{package.version}-py3-none-any.whl"


def sbom(
    package: Distribution, ours: dict[str, Distribution], known: dict[Node, Distribution], pins: dict[Node, Pin]
) -> dict[str, object]:
    """Return a package's SBOM; `pins` also has our own wheels."""
    always = third_party.graph([(package.node, "")], ours, known, pins)
    edges = third_party.graph([(package.node, extra) for extra in ("", *package.extras())], ours, known, pins)
    described = known | {each.node: each for each in ours.values()}
    if behind := sorted(edges.keys() - described.keys()):
        raise third_party.Failure(f"third_party.json does not have {behind}: ./run licences")
    subject = component(package, pins[package.node])
    metadata: dict[str, object] = {"component": subject}
    if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
        metadata = {"timestamp": datetime.fromtimestamp(int(epoch), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), **metadata}
    components = [
        component(described[node], pins[node]) | {"scope": "required" if node in always else "optional"}
        for node in sorted(edges.keys() - {package.node})
    ]
    content = {
        "metadata": metadata,
        "components": components,
        "dependencies": [
            {"ref": purl(node), "dependsOn": [purl(each) for each in sorted(edges[node])]} for node in sorted(edges)
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{purl(package.node)}#{json.dumps(content, sort_keys=True)}")
    head = {"$schema": SCHEMA, "bomFormat": "CycloneDX", "specVersion": "1.6"}
    return {**head, "serialNumber": f"urn:uuid:{serial}", "version": 1, **content}


def component(distribution: Distribution, pin: Pin) -> dict[str, object]:
    found: dict[str, object] = {
        "type": "library",
        "bom-ref": purl(distribution.node),
        "name": distribution.name,
        "version": distribution.version,
        "purl": purl(distribution.node),
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in pin.hashes],
        "licenses": [{"expression": distribution.licence}],
    }
    if pin.marker:
        found["properties"] = [{"name": "openinfer:environment-marker", "value": pin.marker}]
    return found


def purl(node: Node) -> str:
    return f"pkg:pypi/{node[0]}@{node[1]}"
