"""The command's options, and what it refuses before anything is started."""

import argparse
import sys
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from openinfer.commands.model_arguments import parse
from openinfer.flags import add_flags, read_flags
from openinfer_core import InvalidRequest, Refused, find_plugin
from openinfer_dynamo.command import run, setup_of
from openinfer_dynamo.dynamo_api import load_dynamo
from openinfer_dynamo.options import DiscoveryBackend, DynamoOptions, EventPlane, RequestPlane, Role
from openinfer_tiny_model import model_dir

linux = pytest.mark.skipif(sys.platform != "linux", reason="a worker of Dynamo needs Linux")
without_dynamo = pytest.mark.skipif(find_spec("dynamo") is not None, reason="Dynamo is installed")


def setup(*flags: str) -> Any:
    def configure(parser: argparse.ArgumentParser) -> None:
        add_flags(parser, DynamoOptions)

    arguments = parse(["tiny", *flags], command="dynamo", description="", configure=configure)
    return setup_of(arguments, read_flags(arguments.namespace, DynamoOptions), folder="/private")


def test_the_command_is_found_by_its_name() -> None:
    assert find_plugin("openinfer.commands", "dynamo").load() is run


@linux
@without_dynamo
def test_without_dynamo_the_command_says_what_is_missing() -> None:
    with pytest.raises(Refused, match="Dynamo is not installed"):
        run(["tiny"])
    with pytest.raises(Refused, match="Dynamo is not installed"):
        load_dynamo()


def test_the_engine_publishes_its_events_in_a_private_folder() -> None:
    found = setup("--max-step-tokens", "512")
    assert found.kv_events == "ipc:///private/kv-events"
    _, options = found.launch.args
    assert options.kv_events == found.kv_events
    assert (found.model_dir, found.served_model_name) == (str(model_dir().resolve()), "tiny")
    assert found.max_step_tokens == 512


def test_a_router_that_is_told_nothing_leaves_the_engine_as_it_is() -> None:
    found = setup("--router-events", "false", "--served-model-name", "paris")
    _, options = found.launch.args
    assert (found.kv_events, options.kv_events, found.served_model_name) == ("", None, "paris")


def test_events_for_others_and_for_dynamo_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="--router-events false"):
        setup("--kv-events", "5557")
    assert setup("--kv-events", "5557", "--router-events", "false").kv_events == ""


def test_events_without_a_prefix_cache_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="prefix_cache is false"):
        setup("--prefix-cache", "false")


@pytest.mark.parametrize(
    "wrong",
    [
        {"namespace": ""},
        {"namespace": "a/b"},
        {"component": "a b"},
        {"endpoint": "a.b"},
        {"load_period_s": 0.0},
        {"load_period_s": float("nan")},
    ],
)
def test_an_option_out_of_range_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        DynamoOptions(**wrong)
    assert refusal.value.field == next(iter(wrong))


def test_prefill_workers_are_a_component_of_their_own() -> None:
    assert DynamoOptions(role=Role.PREFILL).worker_component == "prefill"
    assert DynamoOptions(role=Role.DECODE).worker_component == "backend"
    assert DynamoOptions(role=Role.PREFILL, component="p").worker_component == "p"


def test_names_are_dynamos_own() -> None:
    """Transcribed from ai-dynamo 1.6.1: `common/constants.py`, `common/configuration/groups/runtime_args.py`."""
    assert {str(role) for role in Role} == {"agg", "prefill", "decode"}
    assert {str(each) for each in DiscoveryBackend} == {"kubernetes", "etcd", "file", "mem"}
    assert ({str(each) for each in RequestPlane}, {str(each) for each in EventPlane}) == (
        {"tcp", "nats"},
        {"zmq", "nats"},
    )


def test_the_readme_names_every_option() -> None:
    source = Path(__file__).parents[1] / "README.md"
    text = source.read_text("utf-8") if source.exists() else str(metadata("openinfer-dynamo").get_payload())
    assert "--role" in text
    missing = [name for name in DynamoOptions.__struct_fields__ if f"--{name.replace('_', '-')}" not in text]
    assert missing == []
