"""How many connections the limit of open files leaves room for."""

import json
import resource
import subprocess
import sys

import pytest

from openinfer_core.process.descriptors import open_descriptors, raise_descriptor_limit
from openinfer_server import ServerOptions
from openinfer_server.errors import TooManyConnections
from openinfer_server.limits.descriptors import DescriptorBudget


def test_default_is_what_there_is_room_for_up_to_4096():
    assert DescriptorBudget(limit=256, own=64).connections(None) == 160
    assert DescriptorBudget(limit=2**20, own=64).connections(None) == 4096


def test_more_than_there_is_room_for_is_refused_with_the_numbers():
    budget = DescriptorBudget(limit=256, own=64)
    assert budget.connections(160) == 160
    with pytest.raises(TooManyConnections, match=r"max_connections 161 .* 256 \(ulimit -n\), of which 64 .* 160 conn"):
        budget.connections(161)
    with pytest.raises(TooManyConnections, match=r"one connection .* 0 connections are possible"):
        DescriptorBudget(limit=90, own=64).connections(None)
    assert DescriptorBudget(limit=2**20, own=64).connections(100_000) == 100_000


def test_own_files_are_those_open_now_and_some_more():
    own = DescriptorBudget.of_this_process(ServerOptions(workers=3)).own
    assert own == max(64, open_descriptors() + 48) + 6


def test_process_for_large_requests_has_room_for_the_links_of_each_front():
    options = ServerOptions(workers=2)
    own = DescriptorBudget.of_this_process(options).own
    assert DescriptorBudget.of_this_process(options, takes_large=True).own == own + 80


def test_process_with_less_room_than_was_asked_for_may_take_what_there_is():
    budget = DescriptorBudget(limit=256, own=104)
    assert budget.connections_at_most(160) == 120
    assert budget.connections_at_most(100) == 100
    assert budget.connections_at_most(None) == 120


def test_soft_limit_becomes_the_hard_one():
    code = (
        "import json, resource\n"
        "from openinfer_core.process.descriptors import raise_descriptor_limit\n"
        "print(json.dumps([raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE)]))\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))

    done = subprocess.run([sys.executable, "-c", code], preexec_fn=limit, capture_output=True, check=True)
    assert json.loads(done.stdout) == [300, 300, 300]
    assert raise_descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
