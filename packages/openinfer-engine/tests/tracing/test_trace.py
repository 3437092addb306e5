"""Traces: what is written, and that memory is bounded."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openinfer_core import (
    Finished,
    FinishReason,
    GenerateRequest,
    Refused,
    RequestId,
    SamplingParams,
    Scheduled,
    Tokens,
    find_plugin,
)
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.tracing.trace import DEVICE, LOOP, NoTrace, Span, Trace


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_request(request_id: int, *, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=prompt, sampling=sampling)


def spans_of(events: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Name, begin and duration, in microseconds, of the engine's spans."""
    return [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]


def test_spans_have_the_times_of_their_blocks_and_the_details(tmp_path: Path) -> None:
    clock = Clock()
    trace = Trace(tmp_path / "trace.json", clock=clock)
    clock.now_s = 1.0
    with trace.span(LOOP, "plan", step=7):
        clock.now_s = 1.5
    trace.add(Span(DEVICE, "step", 2.0, 2.25, {"rows": 3}))
    assert spans_of(trace.events()) == [("plan", 1e6, 5e5), ("step", 2e6, 2.5e5)]
    assert [event["args"] for event in trace.events() if event["ph"] == "X"] == [{"step": 7}, {"rows": 3}]
    trace.close()


def test_a_request_goes_through_queue_prefill_and_decode(tmp_path: Path) -> None:
    clock = Clock()
    trace = Trace(tmp_path / "trace.json", clock=clock)
    clock.now_s = 1.0
    trace.submitted(make_request(5))
    clock.now_s = 4.0
    trace.told([Scheduled(RequestId(5), 0, 2.0), Tokens(RequestId(5), (9,))])
    clock.now_s = 6.0
    trace.told([Tokens(RequestId(5), (8,)), Finished(RequestId(5), FinishReason.LENGTH, 3, 2, 0)])
    phases = [(event["name"], event["ph"], event["ts"]) for event in trace.events() if event.get("cat") == "request"]
    assert phases == [
        ("queue", "b", 1e6),
        ("queue", "e", 3e6),
        ("prefill", "b", 3e6),
        ("prefill", "e", 4e6),
        ("decode", "b", 4e6),
        ("decode", "e", 6e6),
    ]


def test_a_requests_phases_name_the_span_they_belong_to_elsewhere(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", clock=Clock())
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for request in (make_request(1), msgspec.structs.replace(make_request(2), trace_parent=parent)):
        trace.submitted(request)
        trace.told([Scheduled(request.request_id, 0, 0.0)])
    begun = [event for event in trace.events() if event["ph"] == "b"]
    assert [event["args"].get("trace_parent") for event in begun] == [None, parent]


def test_the_last_spans_are_kept_and_no_more(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", clock=Clock(), max_spans=3)
    for step in range(10):
        trace.add(Span(DEVICE, "step", step, step + 1, {}))
    assert [begin for _, begin, _ in spans_of(trace.events())] == [7e6, 8e6, 9e6]


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        Trace(tmp_path / "missing" / "trace.json")


def test_no_trace_does_nothing() -> None:
    with NoTrace().span(LOOP, "plan"):
        pass
    NoTrace().close()


def test_an_engine_on_the_cpu_writes_every_step_and_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    family = find_plugin("openinfer.models", "qwen3").load()()
    model_dir = find_plugin("openinfer.checkpoints", "tiny").load()()
    options = EngineOptions(num_blocks=64, max_num_seqs=4, max_step_tokens=64, trace=str(path))
    loop = build_loop(resolve(family.definition, model_dir, options))
    for request_id in range(3):
        loop.submit(make_request(request_id))
    while loop.busy:
        loop.step()
    steps = loop.stats().steps
    loop.close()
    events = json.loads(path.read_text())["traceEvents"]
    names = [name for name, _, _ in spans_of(events)]
    assert names.count("step") == names.count("launch") == names.count("apply") == names.count("wait") == steps
    assert names.count("plan") >= steps
    decodes = [event for event in events if event["name"] == "decode" and event["ph"] == "b"]
    assert [event["args"]["output_tokens"] for event in decodes] == [4, 4, 4]


def test_an_engine_whose_trace_cannot_be_written_is_refused(tmp_path: Path) -> None:
    family = find_plugin("openinfer.models", "qwen3").load()()
    model_dir = find_plugin("openinfer.checkpoints", "tiny").load()()
    options = EngineOptions(num_blocks=64, trace=str(tmp_path / "missing" / "trace.json"))
    with pytest.raises(Refused, match=r"--trace .*trace\.json cannot be written: No such file"):
        build_loop(resolve(family.definition, model_dir, options))
