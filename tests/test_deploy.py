"""The recipes of deploy/: they parse, name flags and routes that are there, and leave time to drain."""

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from openinfer.commands.completion import flags_of_commands
from openinfer_core import find_plugin
from openinfer_engine.ranks.join_setting import JoinSetting
from openinfer_server import ServerOptions

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("image/*.Dockerfile"))
CHART = DEPLOY / "chart"
RENDERER: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "chart" / "__main__.py"))
RENDERED = sorted((ROOT / "tests" / "fixtures" / "chart").glob("*.yaml"))
PLAIN = sorted(path for path in DEPLOY.rglob("*.yaml") if not path.is_relative_to(CHART / "templates"))
DRAIN_S = ServerOptions().drain_deadline_s
UNIT = (DEPLOY / "systemd" / "openinfer.service").read_text("utf-8")


def documents(path: Path) -> list[Any]:
    return [each for each in yaml.safe_load_all(path.read_text("utf-8")) if each is not None]


MANIFESTS = [DEPLOY / "kubernetes" / "openinfer.yaml", DEPLOY / "kserve" / "openinfer.yaml", *RENDERED]


def pods_of(path: Path) -> list[dict[str, Any]]:
    """The pods that a file makes and that serve, and those that give their GPUs to one that does."""
    found: list[dict[str, Any]] = []
    for document in documents(path):
        spec = document["spec"]
        if document["kind"] == "InferenceService":  # KServe's
            found.append(spec["predictor"])
        elif document["kind"] == "Deployment":
            found.append(spec["template"]["spec"])
        elif document["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            found += [group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]]
    return found


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return container


def arguments_of(pod: dict[str, Any]) -> list[str]:
    return list(map(str, container_of(pod)["args"]))


def command_lines() -> dict[str, list[str]]:
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text("utf-8"))
    found = {
        f"{path.relative_to(ROOT)} {number}": arguments_of(pod)
        for path in MANIFESTS
        for number, pod in enumerate(pods_of(path))
    }
    found["compose"] = compose["services"]["openinfer"]["command"]
    found["systemd"] = shlex.split(re.findall(r"^ExecStart=\S+openinfer (.*)$", UNIT, re.MULTILINE)[0])
    for path in DOCKERFILES:
        found[path.name] = yaml.safe_load(re.findall(r"^CMD (\[.*\])$", path.read_text("utf-8"), re.MULTILINE)[-1])
    return found


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_yaml_parses(path: Path) -> None:
    assert documents(path)


def test_every_flag_of_a_recipe_is_one_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    known = {"serve": set(flags_of_commands()["serve"]), "rank": flags_of_rank(capsys)}
    lines = command_lines()
    assert len(lines) == 2 + 1 + 2 + 2 + len(DOCKERFILES) + 2  # of the chart: one pod, a pair, a group of two
    for where, words in lines.items():
        flags = [word for word in words if word.startswith("--")]
        assert set(flags) <= known[words[0]], where
        assert ("--model" in flags) == (words[0] == "serve"), where


def flags_of_rank(capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        find_plugin("openinfer.commands", "rank").load()(["--help"])
    return set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_pods_are_probed_where_the_server_answers_and_may_drain(path: Path) -> None:
    for pod in pods_of(path):
        container = container_of(pod)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        if container["args"][0] == "rank":
            continue  # which serves nothing: it ends with its engine
        probed = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
        assert probed == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
        pre_stop_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] >= DRAIN_S + pre_stop_s + 10


def test_supervisors_leave_time_to_drain() -> None:
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(stop_s) >= DRAIN_S + 10
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text("utf-8"))
    assert int(compose["services"]["openinfer"]["stop_grace_period"].removesuffix("s")) >= DRAIN_S + 10


def test_the_chart_uses_its_values_and_no_others() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    text = "".join(path.read_text("utf-8") for path in sorted((CHART / "templates").iterdir()))
    named = re.findall(r"(?:\.Values|\$values|(\$apart))\.([A-Za-z.]+)", text)
    used = {f"apart.{name}" if of_apart else name for of_apart, name in named}
    leaves = {
        f"{name}.{part}" if isinstance(value, dict) else name
        for name, value in values.items()
        for part in (value if isinstance(value, dict) else [""])
    }
    assert used - {"apart"} == leaves


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.stem)
def test_what_is_tested_was_rendered_from_the_templates_that_are_there(path: Path) -> None:
    head = path.read_text("utf-8").partition("\n")[0]
    made_from = RENDERER["made_from"](RENDERER["CASES"][path.stem])
    assert head == f"# python -m tools.chart; made from {made_from}", "python -m tools.chart"


def by_kind(case: str) -> dict[tuple[str, str], dict[str, Any]]:
    path = ROOT / "tests" / "fixtures" / "chart" / f"{case}.yaml"
    return {(document["kind"], document["metadata"]["name"]): document for document in documents(path)}


def test_one_server_of_the_chart_has_a_claim_and_keys() -> None:
    found = by_kind("plain")
    assert found.keys() == {("Deployment", "demo"), ("Service", "demo"), ("PersistentVolumeClaim", "demo-models")}
    spec = found["Deployment", "demo"]["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate")
    pod = spec["template"]["spec"]
    words = arguments_of(pod)
    assert words[words.index("--api-keys-file") + 1] == "/etc/openinfer/keys.toml"
    assert "--kv-transfer" not in words
    assert {volume["name"] for volume in pod["volumes"]} == {"models", "tmp", "shm", "keys"}


def test_the_chart_makes_a_pair_of_the_same_pods_with_names_and_selectors_of_their_own() -> None:
    found = by_kind("apart")
    names = ("demo", "demo-prefill")
    assert found.keys() == {(kind, name) for kind in ("Deployment", "Service") for name in names}
    decode, prefill = (found["Deployment", name]["spec"] for name in names)
    assert (decode["replicas"], prefill["replicas"]) == (2, 3)
    assert decode["template"]["spec"] == prefill["template"]["spec"]
    words = arguments_of(decode["template"]["spec"])
    assert words[words.index("--kv-transfer") + 1] == "valkey"
    for name, role in zip(names, ("decode", "prefill"), strict=True):
        labels = found["Deployment", name]["spec"]["template"]["metadata"]["labels"]
        selector = {"app.kubernetes.io/instance": name}
        assert labels == {"app.kubernetes.io/name": "openinfer", "llm-d.ai/role": role, **selector}
        assert found["Deployment", name]["spec"]["selector"]["matchLabels"] == selector
        assert found["Service", name]["spec"]["selector"] == selector


def test_an_engine_of_the_chart_over_several_nodes_is_a_group_whose_leader_serves() -> None:
    found = by_kind("nodes")
    spec = found["LeaderWorkerSet", "demo"]["spec"]
    group = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], group["size"], group["restartPolicy"]) == (2, 2, "RecreateGroupOnPodRestart")
    leader, worker = group["leaderTemplate"], group["workerTemplate"]
    words, joining = arguments_of(leader["spec"]), arguments_of(worker["spec"])
    assert words[words.index("--tensor-parallel-size") + 1] == "16"
    setting = words[words.index("--rank-host") + 1].replace("$(POD_IP)", "10.0.0.1")
    joined = JoinSetting.parse(setting.removeprefix("join="))
    assert (joined.port, joined.local, joined.token_file) == (7000, 8, Path("/etc/openinfer-ranks/token"))
    assert joining[joining.index("--join") + 1] == "$(LWS_LEADER_ADDRESS):7000"
    assert joining[joining.index("--ranks") + 1] == "8"
    for pod in (leader["spec"], worker["spec"]):
        assert container_of(pod)["resources"]["limits"]["nvidia.com/gpu"] == 8
        variables = {each["name"] for each in container_of(pod)["env"]}
        assert variables == {"HOME", "POD_IP", "POD_NAME"}  # LWS_LEADER_ADDRESS is its controller's
        (mount,) = (each for each in container_of(pod)["volumeMounts"] if each["name"] == "ranks")
        assert joined.token_file.is_relative_to(mount["mountPath"])
    selector = found["Service", "demo"]["spec"]["selector"]
    assert selector.items() <= leader["metadata"]["labels"].items()
    assert not selector.items() <= worker["metadata"]["labels"].items(), "clients would reach a pod that does not serve"


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
