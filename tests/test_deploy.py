"""The recipes of deploy/: they parse, name flags and routes that are there, and leave time to drain."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from openinfer.commands.completion import flags_of_commands
from openinfer_server import ServerOptions

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("image/*.Dockerfile"))
CHART = DEPLOY / "chart"
DRAIN_S = ServerOptions().drain_deadline_s
UNIT = (DEPLOY / "systemd" / "openinfer.service").read_text("utf-8")


def documents(path: Path) -> list[Any]:
    text = path.read_text("utf-8")
    return list(yaml.safe_load_all(rendered(text) if path.is_relative_to(CHART / "templates") else text))


def rendered(template: str) -> str:
    """Stand in for helm: every condition holds, every value is `x`; what is left must be YAML."""
    lines = [line for line in template.splitlines() if not re.fullmatch(r"\s*\{\{-? (if|end|range|toYaml).*\}\}", line)]
    return re.sub(r"\{\{.*?\}\}", "x", "\n".join(lines))


def manifests(path: Path) -> dict[str, Any]:
    return {document["kind"]: document for document in documents(path)}


MANIFESTS = [
    DEPLOY / "kubernetes" / "openinfer.yaml",
    DEPLOY / "kserve" / "openinfer.yaml",
    CHART / "templates" / "server.yaml",
]


def pod_of(path: Path) -> dict[str, Any]:
    found = manifests(path)
    if "InferenceService" in found:  # KServe's
        return found["InferenceService"]["spec"]["predictor"]
    return found["Deployment"]["spec"]["template"]["spec"]


def container_of(path: Path) -> dict[str, Any]:
    (container,) = pod_of(path)["containers"]
    return container


def command_lines() -> dict[str, list[str]]:
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text("utf-8"))
    found = {str(path.relative_to(ROOT)): list(map(str, container_of(path)["args"])) for path in MANIFESTS}
    found["compose"] = compose["services"]["openinfer"]["command"]
    found["systemd"] = shlex.split(re.findall(r"^ExecStart=\S+openinfer (.*)$", UNIT, re.MULTILINE)[0])
    for path in DOCKERFILES:
        found[path.name] = yaml.safe_load(re.findall(r"^CMD (\[.*\])$", path.read_text("utf-8"), re.MULTILINE)[-1])
    return found


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_yaml_parses(path: Path) -> None:
    assert all(documents(path))


def test_every_flag_of_a_recipe_is_one_of_the_server() -> None:
    known = flags_of_commands()["serve"]
    lines = command_lines()
    assert len(lines) == len(MANIFESTS) + len(DOCKERFILES) + 2
    for where, words in lines.items():
        assert words[0] == "serve", where
        flags = [word for word in words if word.startswith("--")]
        assert "--model" in flags, where
        assert set(flags) <= known.keys(), where


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.parent.name)
def test_pods_are_probed_where_the_server_answers_and_may_drain(path: Path) -> None:
    container = container_of(path)
    probed = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probed == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    pod = pod_of(path)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    grace = pod["terminationGracePeriodSeconds"]
    pre_stop_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert grace == "x" or grace >= DRAIN_S + pre_stop_s + 10
    assert "add $.Values.drainSeconds 20" in (CHART / "templates" / "server.yaml").read_text("utf-8")


def test_supervisors_leave_time_to_drain() -> None:
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(stop_s) >= DRAIN_S + 10
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text("utf-8"))
    assert int(compose["services"]["openinfer"]["stop_grace_period"].removesuffix("s")) >= DRAIN_S + 10


def test_the_chart_uses_its_values_and_no_others() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    used = set(re.findall(r"\.Values\.([A-Za-z.]+)", (CHART / "templates" / "server.yaml").read_text("utf-8")))
    leaves = {
        f"{name}.{part}" if isinstance(value, dict) else name
        for name, value in values.items()
        for part in (value if isinstance(value, dict) else [""])
    }
    assert used == leaves


def test_the_chart_makes_a_pair_of_the_same_pods_with_names_and_claims_of_their_own() -> None:
    template = (CHART / "templates" / "server.yaml").read_text("utf-8")
    (roles,) = re.findall(r"^\{\{- range \$suffix, \$replicas := (dict .*) \}\}$", template, re.MULTILINE)
    assert roles == 'dict "" $.Values.replicas "-prefill" $.Values.apart.prefill'
    inside = template[: template.index("PersistentVolumeClaim\n")].rpartition("{{- if not")[0]
    # What tells the pods of one role from those of the other: names and selectors, in both objects.
    assert inside.count("name: {{ $.Release.Name }}{{ $suffix }}\n") == 2
    assert inside.count("app.kubernetes.io/instance: {{ $.Release.Name }}{{ $suffix }}\n") == 4
    assert "{{ .Values" not in template, "inside a range `.` is another value"
    assert template.count("{{- end }}") == len(re.findall(r"^\s*\{\{-? (?:if|range)", template, re.MULTILINE))
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    assert values["apart"] == {"prefill": 0, "tier": "", "keySecret": ""}  # off, so that nothing changes


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_images_have_two_stages_no_root_and_flags_of_the_installer(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(re.findall(r"^FROM ", text, re.MULTILINE)) == 2
    assert text.index("\nUSER 10001") < text.index("\nENTRYPOINT")
    last_stage = text[text.rindex("\nFROM ") :]
    assert "COPY" not in last_stage
    (flags,) = re.findall(r"install\.py --into \S+ (.*?) \\$", last_stage, re.MULTILINE)
    source = (ROOT / "tools" / "workspace" / "install.py").read_text("utf-8")
    assert all(f'"{flag.removeprefix("--")}":' in source for flag in flags.split())


def test_files_that_compose_mounts_are_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text("utf-8"))
    mounted = [each for service in compose["services"].values() for each in service.get("volumes", ())]
    files = [each.partition(":")[0] for each in mounted if each.startswith(".")]
    assert len(files) == 4
    assert all((DEPLOY / "compose" / name).is_file() for name in files)
    build = compose["services"]["openinfer"]["build"]
    assert (DEPLOY / "compose" / build["context"] / build["dockerfile"]).resolve().is_file()


def test_the_release_workflow_builds_attests_and_publishes_and_uses_commands_that_are_there() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text("utf-8"))
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    used = [step.get("uses", "").partition("@")[0] for job in (build, publish) for step in job["steps"]]
    assert "actions/attest-build-provenance" in used
    assert used.index("actions/attest-build-provenance") < used.index("pypa/gh-action-pypi-publish")
    assert (publish["needs"], publish["environment"]) == ("build", "release")
    assert workflow["permissions"] == {"contents": "read"}
    commands = "\n".join(step.get("run", "") for step in build["steps"])
    assert "bash .ci/run" in commands
    assert "sha256sum --check SHA256SUMS" in commands
    scripts = (ROOT / "hatch.toml").read_text("utf-8")
    assert all(f"\n{name} = " in scripts for name in re.findall(r"\./run ([a-z-]+)", commands))
