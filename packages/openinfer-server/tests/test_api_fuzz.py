"""Schemathesis over the OpenAPI document of a running server: no 500, no hang, no answer that is not documented.

    python packages/openinfer-server/tests/test_api_fuzz.py --cases 20000 --out benchmarks/results/cpu/server-fuzz.json

A third of each operation's cases follow its schema, a third break it, and a third are requests that work with up to
three fields made at random, which reach what is behind the checks. As a test it runs a few hundred.
"""

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from schemathesis.checks import CHECKS
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from openinfer_core.engine import EngineInfo
from openinfer_server import ServerOptions
from openinfer_server.testing import ParrotLoop, ThreadedServer
from openinfer_tiny_model import model_dir

TIMEOUT_S = 20.0
"""An answer that takes longer is a hang."""
CHECKED = [
    *CHECKS.get_by_names(["not_a_server_error"]),
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


FOUND = "no 500, no hang, no answer that is not documented, no body taken that breaks its schema"
REFUSING = CHECKS.get_by_names(["negative_data_rejection"])
"""A body that breaks its schema must be refused; in a query `null` is absent, as everywhere, which is no integer."""
TURNS = [{"role": "user", "content": "stone"}]
WORKING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "stone"},
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/responses": {"input": "stone"},
    "/v1/responses/input_tokens": {"input": "stone"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 20},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/inference/v1/generate": {"token_ids": [5, 6, 7]},
    "/tokenize": {"prompt": "stone"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/completions/render": {"prompt": "a stone"},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "a stone"}]},
}
"""Bodies that are answered with 200."""


class Mode(StrEnum):
    """Where a case comes from."""

    POSITIVE = "positive"
    NEGATIVE = "negative"
    WORKING = "working"

    @property
    def generation(self) -> schemathesis.GenerationMode:
        """Schemathesis' word for it."""
        return schemathesis.GenerationMode(Mode.POSITIVE if self is Mode.WORKING else self)


@dataclasses.dataclass
class Counts:
    """What came of one operation's cases."""

    cases: int = 0
    slowest_s: float = 0.0
    statuses: Counter[int] = dataclasses.field(default_factory=Counter)

    @property
    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        statuses = {str(status): count for status, count in sorted(self.statuses.items())}
        return {"cases": self.cases, "slowest_ms": round(self.slowest_s * 1000, 1), "statuses": statuses}


def serve() -> ThreadedServer:
    """A server of the tiny model's tokenizer and chat template, which knows tools and thinking, and of a parrot."""
    info = EngineInfo(
        model="parrot",
        family="qwen3",
        max_model_tokens=512,
        num_token_ids=2040,
        eos_token_ids=(1,),
        block_size_tokens=16,
        num_blocks=64,
        max_num_seqs=64,
        max_waiting=256,
    )
    return ThreadedServer(ParrotLoop(info), model_dir(), ServerOptions(port=0))


def fuzz(url: str, *, cases: int, seed: int) -> dict[str, Counts]:
    """Asks a server at random.

    Args:
        url: of the server.
        cases: at least so many over all operations, alike for each.
        seed: of the random numbers.

    Raises:
        AssertionError: the answer to a case is a 500, not documented or not of its schema; the case is in the message.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    tallies = {f"{operation.method.upper()} {operation.path}": Counts() for operation in operations}
    each = math.ceil(cases / (len(operations) * len(Mode)))
    for operation, tally in zip(operations, tallies.values(), strict=True):
        for mode in Mode:
            _fill(operation, mode, url, tally, each, seed)
    while (missing := cases - sum(tally.cases for tally in tallies.values())) > 0:  # some have few different cases
        seed += 1000
        for operation, tally in zip(operations, tallies.values(), strict=True):
            if operation.body:
                _fill(operation, Mode.WORKING, url, tally, math.ceil(missing / len(WORKING)), seed)
    return tallies


def _fill(operation: APIOperation, mode: Mode, url: str, tally: Counts, cases: int, seed: int) -> None:
    """Asks so many cases of one kind, or as many as there are; hypothesis ends when it finds no new ones."""
    until = tally.cases + cases
    while tally.cases < until:
        asked = tally.cases
        _run(operation, mode, url, tally, until - tally.cases, seed)
        seed += 1
        if tally.cases == asked:
            return


def _run(operation: APIOperation, mode: Mode, url: str, tally: Counts, cases: int, seed: int) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode.generation), data=st.data())
    def ask(case: schemathesis.Case, data: st.DataObject) -> None:
        if mode is Mode.WORKING:
            _make_work(case, data, url)
        begin_s = time.monotonic()
        response = case.call(timeout=TIMEOUT_S)
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - begin_s)
        tally.cases += 1
        tally.statuses[response.status_code] += 1
        case.validate_response(response, checks=[*CHECKED, *(REFUSING if operation.body else ())])

    try:
        ask()
    except hypothesis.errors.Unsatisfiable:
        return


def _make_work(case: schemathesis.Case, data: st.DataObject, url: str) -> None:
    """Replaces what a case needs by what works; up to three of its other fields stay as they were made."""
    base = WORKING.get(case.operation.path)
    if base is not None and isinstance(case.body, dict):
        names = sorted(set(case.body) - set(base))
        kept = data.draw(st.lists(st.sampled_from(names), max_size=3, unique=True)) if names else []
        case.body = {**base, **{name: case.body[name] for name in kept}}
    if "{response_id}" in case.operation.path:
        background = data.draw(st.booleans())
        made = requests.post(
            f"{url}/v1/responses", json={"input": "stone", "background": background, "max_output_tokens": 5}, timeout=20
        )
        case.path_parameters = {"response_id": made.json()["id"]}
    if "{model}" in case.operation.path:
        case.path_parameters = {"model": "parrot"}


def test_no_case_gives_a_500_a_hang_or_an_undocumented_answer():
    with serve() as server:
        tallies = fuzz(server.url, cases=400, seed=20261121)
    assert sum(tally.cases for tally in tallies.values()) >= 400
    for name in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"):
        assert tallies[f"POST {name}"].statuses[200] >= 3, name
    assert all(tally.slowest_s < TIMEOUT_S for tally in tallies.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Starts a server, fuzzes it, prints and records what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    begin_s = time.monotonic()
    with serve() as server:
        tallies = fuzz(server.url, cases=arguments.cases, seed=arguments.seed)
    wall_s = time.monotonic() - begin_s
    total = sum(tally.cases for tally in tallies.values())
    lines = [_line(name, tally) for name, tally in tallies.items()]
    lines.append(f"{total} cases in {wall_s:.0f} s: {FOUND}\n")
    sys.stdout.write("\n".join(lines))
    if arguments.out is not None:
        record = {
            "command": "python packages/openinfer-server/tests/test_api_fuzz.py " + " ".join(argv or sys.argv[1:]),
            "commit": _commit(),
            "schemathesis": version("schemathesis"),
            "cases": total,
            "seed": arguments.seed,
            "wall_s": round(wall_s, 1),
            "operations": {name: tally.record for name, tally in tallies.items()},
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _line(name: str, tally: Counts) -> str:
    statuses = " ".join(f"{status}:{count}" for status, count in sorted(tally.statuses.items()))
    return f"{name:45} {tally.cases:6}  slowest {tally.slowest_s * 1000:6.1f} ms  {statuses}"


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "packages/openinfer-server/src", "packages/openinfer-core/src")
    return git("rev-parse", "HEAD") + ("+changes" if changed else "")


if __name__ == "__main__":
    raise SystemExit(main())
