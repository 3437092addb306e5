"""A line per request, and a line of the whole where there is traffic."""

import asyncio
import logging

import pytest

from openinfer_core.engine import EngineStats
from openinfer_server import ServerOptions
from openinfer_server.observability.metrics import ServerMetrics
from openinfer_server.observability.request_log import LogTotals, level_of, log_stats, stats_fields
from openinfer_server.output.engine_link import EngineLink
from openinfer_server.testing import ParrotLoop, wait_until

COMPLETION = {"model": "parrot", "prompt": "stone", "max_tokens": 4}


class Lines(logging.Handler):
    """The records of requests and of the whole."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.of: dict[str, list[logging.LogRecord]] = {"request": [], "stats": []}

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg in self.of:
            self.of[record.msg].append(record)


@pytest.fixture
def lines():
    logger, handler = logging.getLogger("openinfer.server"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler.of
    logger.setLevel(level)
    logger.removeHandler(handler)


def last(lines, number: int):
    wait_until(lambda: len(lines["request"]) == number, "the request's line")
    record = lines["request"][-1]
    return record.levelname, record.fields


@pytest.mark.parametrize("stream", [False, True])
def test_an_answered_request_has_tokens_and_times(start, info, call, lines, stream):
    server = start(ParrotLoop(info))
    status, headers, _ = call(server, "POST", "/v1/completions", COMPLETION | {"stream": stream, "n": 2})
    assert status == 200
    level, fields = last(lines, 1)
    assert level == "INFO"
    prompt_tokens = sum(len(request.prompt_token_ids) for request in server.engine.submitted)
    assert fields.pop("ttft_ms") <= fields.pop("ms")
    assert fields == {
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "id": headers["x-request-id"],
        "in": prompt_tokens,
        "out": 8,
        "cached": 2,  # one of each choice, as the parrot says
    }


def test_a_refusal_is_a_warning_with_code_and_param_and_without_what_the_client_sent(start, info, call, lines):
    server = start(ParrotLoop(info))
    call(server, "POST", "/v1/completions", COMPLETION | {"temperature": "my-secret"})
    level, fields = last(lines, 1)
    assert level == "WARNING"
    assert fields["status"] == 400
    assert fields["param"] == "temperature"
    assert "my-secret" not in str(fields)
    call(server, "POST", "/nowhere", {})
    _, fields = last(lines, 2)
    assert (fields["status"], fields["route"]) == (404, "(none)")


def test_reads_are_debug_unless_they_fail():
    assert level_of("GET", 200) == logging.DEBUG
    assert level_of("GET", 404) == logging.WARNING
    assert level_of("POST", 200) == logging.INFO
    assert level_of("POST", 429) == logging.WARNING
    assert level_of("POST", 503) == logging.ERROR


def test_a_tenant_is_named(start, info, call, lines, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nkey = "0123456789abcdef0123456789abcdef"\ntenant = "gold"\n')
    server = start(ParrotLoop(info), ServerOptions(port=0, api_keys_file=str(keys)))
    call(server, "POST", "/v1/completions", COMPLETION)
    level, fields = last(lines, 1)
    assert (level, fields["status"]) == ("WARNING", 401)
    assert "tenant" not in fields


def test_the_whole_is_logged_where_there_was_traffic_and_only_there(info, lines):
    class Quiet:
        async def stats(self) -> EngineStats:
            return EngineStats(running=2, waiting=1, blocks_used=16, blocks_total=64, preemptions=3)

    async def main() -> None:
        link = EngineLink(Quiet(), ServerMetrics(max_model_tokens=64))
        task = asyncio.create_task(log_stats(link, period_s=0.001))
        await asyncio.sleep(0.05)
        assert lines["stats"] == []
        link.metrics.ended["stop"] += 1
        async with asyncio.timeout(20):
            while not lines["stats"]:  # noqa: ASYNC110 - the line is what is waited for
                await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(main())
    (record,) = lines["stats"]
    assert record.fields["ended"] == 1
    assert (record.fields["running"], record.fields["kv"], record.fields["preemptions"]) == (2, "25%", 3)


def test_rates_are_of_the_period():
    before = LogTotals(prompt_tokens=100, cached_tokens=50, generated_tokens=10, ended=1, failed=0, time_s=0.0)
    now = LogTotals(prompt_tokens=300, cached_tokens=100, generated_tokens=60, ended=5, failed=1, time_s=10.0)
    assert stats_fields(before, now, None, num_open=7) == {
        "open": 7,
        "ended": 4,
        "failed": 1,
        "prompt_tokens_per_s": 20.0,
        "generated_tokens_per_s": 5.0,
        "cached": "25%",
    }
