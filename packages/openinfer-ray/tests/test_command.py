"""The command's options, and what it refuses before anything is started."""

import sys
from pathlib import Path

import msgspec
import pytest

from openinfer_core import InvalidRequest, Refused, find_plugin
from openinfer_ray.bundles import Bundle, places_on
from openinfer_ray.command import run
from openinfer_ray.options import RayOptions
from openinfer_ray.replica import launch
from openinfer_ray.replica_spec import ReplicaAddress, ReplicaSpec
from openinfer_ray.serve import bundle_of, shares_asked
from openinfer_tiny_model import model_dir

linux = pytest.mark.skipif(sys.platform != "linux", reason="replicas on Ray need Linux")


class FamilyOptions(msgspec.Struct):
    device: str = "cpu"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1


def spec(**changed: object) -> ReplicaSpec:
    fields: dict[str, object] = {
        "app": "x",
        "family": "qwen3",
        "model_dir": str(model_dir()),
        "options": msgspec.Raw(b"{}"),
        "cpus": 1,
        "token": "t" * 32,
        "token_file": "",
        "drain_deadline_s": 1.0,
        "max_step_age_s": 1.0,
        "timeout_s": 1.0,
    }
    return msgspec.convert(fields | changed, ReplicaSpec)


def test_the_command_is_found_by_its_name() -> None:
    assert find_plugin("openinfer.commands", "ray").load() is run


def test_a_replica_has_a_gpu_for_each_rank_and_none_on_a_cpu() -> None:
    options = RayOptions(replica_cpus=3)
    assert bundle_of(FamilyOptions(device="cuda", tensor_parallel_size=4), options) == Bundle(cpus=3, gpus=(4,))
    assert bundle_of(FamilyOptions(tensor_parallel_size=4), options) == Bundle(cpus=3, gpus=(0,))
    assert bundle_of(FamilyOptions(device="cuda", data_parallel_size=2), options) == Bundle(cpus=3, gpus=(2,))


def test_a_replica_on_several_nodes_has_a_gpu_for_each_rank_there() -> None:
    on_gpus, on_cpus = FamilyOptions(device="cuda", tensor_parallel_size=8), FamilyOptions(tensor_parallel_size=8)
    for asked, shares in (("2", (2, 2, 2, 2)), ("4+3+1", (4, 3, 1))):
        options = RayOptions(replica_cpus=3, ranks_per_node=asked)
        assert shares_asked(on_gpus, options) == shares_asked(on_cpus, options) == shares
        assert bundle_of(on_gpus, options, shares) == Bundle(cpus=3, gpus=shares)
        assert bundle_of(on_cpus, options, shares) == Bundle(cpus=3, gpus=(0,) * len(shares))


def test_room_is_counted_by_whole_replicas_of_one_node() -> None:
    (needs,) = Bundle(cpus=2, gpus=(4,)).resources
    assert places_on({"CPU": 64.0, "GPU": 8.0}, needs) == 2
    assert places_on({"CPU": 64.0, "GPU": 7.0}, needs) == 1
    assert places_on({"CPU": 3.0, "GPU": 8.0}, needs) == 1
    assert places_on({"CPU": 64.0}, needs) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": 0},
        {"replicas": 5000},
        {"replica_cpus": 0},
        {"ranks_per_node": "0"},
        {"ranks_per_node": "5000"},
        {"ranks_per_node": "1000+1000"},
        {"ranks_per_node": "2+"},
        {"ranks_per_node": "-1"},
        {"ranks_per_node": "most"},
        {"replica_health_period_s": float("nan")},
        {"replica_timeout_s": 0.0},
        {"ray_address": ""},
        {"ray_address": "ray://10.0.0.1:10001"},
        {"ray_app": "a/b"},
        {"ray_app": ""},
    ],
)
def test_an_option_out_of_range_is_refused_by_its_name(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        RayOptions(**wrong)
    assert refusal.value.field == next(iter(wrong))


@linux
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--workers", "2"], "--workers 1"),
        (["--rank-host", "join=127.0.0.1:7000,token-file=F"], "leave --rank-host out"),
        (["--ranks-per-node", "1"], "1 ranks are not two or more nodes of 1"),
        (["--ranks-per-node", "2", "--tensor-parallel-size", "2"], "2 ranks are not two or more nodes of 2"),
        (["--ranks-per-node", "2", "--tensor-parallel-size", "3"], "3 ranks are not two or more nodes of 2"),
        (["--ranks-per-node", "2+1", "--tensor-parallel-size", "2"], r"2\+1 are 3 ranks, not 2"),
        (["--ranks-per-node", "1", "--tensor-parallel-size", "2", "--rank-host", "thread"], "ranks in threads"),
        (["--ranks-per-node", "1", "--data-parallel-size", "2"], "data-parallel ranks are on one node"),
        (["--replicas", "0"], "replicas must be in"),
        (["--ray-servers", "257"], "ray_servers must be in"),
        (["--ray-servers", "2"], "--port above 0"),
        (["--ray-servers", "2", "--tls-cert-file", "cert.pem"], "TLS needs a proxy"),
        (["--kv-events", "5557"], "--replica-routing sent"),
        (["--prefix-cache", "false"], "--replica-routing sent"),
        (["--kv-tier", "host=1MiB"], "--kv-key-file"),
        (["--max-replicas", "0"], "max_replicas must be in"),
        (["--replica-token-file", "/nonexistent/token"], "the token file /nonexistent/token"),
    ],
)
def test_what_is_not_there_is_refused_by_name_before_ray_is_started(flags: list[str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        run(["serve", "tiny", "--port", "0", *flags])


@linux
def test_an_application_cannot_be_deleted_from_a_cluster_that_is_started_for_it() -> None:
    with pytest.raises(Refused, match="auto or HOST:PORT"):
        run(["delete", "--ray-address", "local"])


def test_a_node_without_the_model_says_so() -> None:
    with pytest.raises(Refused, match=r"no folder /nonexistent/model: .* OPENINFER_RAY_MODEL_PATHS"):
        launch(spec(model_dir="/nonexistent/model"))


def test_an_engine_in_the_replicas_own_process_is_refused() -> None:
    with pytest.raises(Refused, match="--engine-host process"):
        launch(spec(options=msgspec.Raw(b'{"engine_host":"thread"}')))


def test_the_token_is_the_spec_s_or_a_file_s(tmp_path: Path) -> None:
    assert spec().read_token() == b"t" * 32
    path = tmp_path / "token"
    path.write_bytes(b"f" * 32)
    assert spec(token=None, token_file=str(path)).read_token() == b"f" * 32
    with pytest.raises(InvalidRequest):
        spec(token=None, token_file=str(tmp_path / "absent")).read_token()


@pytest.mark.parametrize("wrong", [{"port": 0}, {"port": 70_000}, {"name": ""}, {"name": "a b"}, {"host": ""}])
def test_an_address_out_of_range_is_not_read(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "a", "host": "10.0.0.1", "port": 7} | wrong, ReplicaAddress)
