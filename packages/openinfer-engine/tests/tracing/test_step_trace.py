"""Step traces: what is written of a run, and what is not."""

import gzip
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openinfer_core import (
    EngineInfo,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    Refused,
    RequestId,
    SamplingParams,
    find_plugin,
)
from openinfer_core.plugins import QUEUE_POLICIES, SCHEDULERS
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan
from openinfer_core.testing.fake_device import FakeDevice
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.loop import StepLoop
from openinfer_engine.tracing.step_trace import (
    OPEN,
    Abort,
    Add,
    Apply,
    Begin,
    Content,
    Flush,
    Plan,
    StepTrace,
    read_step_trace,
)
from openinfer_engine.worker.runner import DoneStep

CONFIG = SchedulerConfig(
    num_blocks=64, block_size_tokens=4, max_num_seqs=4, max_step_tokens=16, max_model_tokens=64, digest_key=b"k" * 16
)
BEGIN = Begin(scheduler="token-budget", queue_policy="fcfs", config=msgspec.structs.replace(CONFIG, digest_key=None))


class Runner:
    """Computes steps on a `FakeDevice` when they are launched."""

    failure = None

    def __init__(self) -> None:
        self._device = FakeDevice(CONFIG)

    def launch(self, plan: StepPlan) -> DoneStep:
        return DoneStep(self._device.run(plan, num_applied=max(0, plan.step - 1)))

    def close(self) -> None:
        pass


def make_loop(path: Path, **options: Any) -> StepLoop:
    policy = find_plugin(QUEUE_POLICIES, "fcfs").make(QueuePolicyConfig())
    scheduler: Any = find_plugin(SCHEDULERS, "token-budget").make(CONFIG, policy)
    info = EngineInfo(
        model="fake",
        family="fake",
        max_model_tokens=64,
        num_token_ids=2048,
        eos_token_ids=(),
        block_size_tokens=4,
        num_blocks=64,
        max_num_seqs=4,
        max_waiting=8,
    )
    return StepLoop(info=info, scheduler=scheduler, runner=Runner(), step_trace=StepTrace(path, BEGIN, **options))


def request_of(number: int, prompt: tuple[int, ...], max_tokens: int = 3, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateRequest(request_id=RequestId(number), prompt_token_ids=prompt, sampling=sampling, **fields)


def run(loop: StepLoop) -> None:
    while loop.busy:
        loop.step()


def records_of(path: Path, kind: type[Any]) -> list[Any]:
    return [record for record in read_step_trace(path) if type(record) is kind]


def test_each_call_is_a_line_in_order(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "steps")
    loop.submit(request_of(1, (7, 8, 9, 10, 11), tenant="a"))
    run(loop)
    loop.close()
    begin, add, *others, content = read_step_trace(tmp_path / "steps")
    assert begin == BEGIN
    assert isinstance(add, Add)
    assert (add.request, add.prompt_tokens, add.max_tokens, add.tenant, add.refusal) == (1, 5, 3, "a", "")
    plans: list[Any] = [record for record in others if isinstance(record, Plan) and record.step is not None]
    assert [plan.rows for plan in plans] == [[(1, 0, 5, 1)], [(1, 5, 1, 1)], [(1, 6, 1, 1)]]
    applied: list[Any] = [record for record in others if isinstance(record, Apply)]
    assert [each.outcomes for each in applied] == [[(1, 1, "")], [(1, 1, "")], [(1, 1, ""), (1, 0, "length")]]
    assert [each.new_counts for each in applied] == [[1], [1], [1]]
    # 5 prompt tokens and 3 of output are two full blocks of 4
    assert content == Content(request=1, num_tokens=8, blocks=[0, 1], end=FinishReason.LENGTH)


def test_equal_prefixes_have_equal_numbers_and_salts_part_them(tmp_path: Path) -> None:
    loop, prompt = make_loop(tmp_path / "steps"), tuple(range(8))
    loop.submit(request_of(1, prompt, max_tokens=1))
    loop.submit(request_of(2, (*prompt, 5), max_tokens=1))
    loop.submit(request_of(3, prompt, max_tokens=1, cache_salt="s"))
    loop.submit(request_of(4, (*range(4, 8), *range(4)), max_tokens=1))  # the same blocks in another order
    run(loop)
    loop.close()
    blocks = {content.request: content.blocks for content in records_of(tmp_path / "steps", Content)}
    assert blocks[1] == blocks[2]
    assert not {*blocks[1]} & {*blocks[3]}
    assert not {*blocks[1]} & {*blocks[4]}


def test_no_prompt_no_output_and_no_key_is_in_the_file(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "steps")
    prompt = tuple(range(1501, 1510))
    loop.submit(request_of(1, prompt, cache_salt="a-salt"))
    run(loop)
    loop.close()
    text = re.sub(r'"at_s":[^,}]+', "", (tmp_path / "steps").read_text())  # digits of a clock may be any
    assert not [token for token in prompt if str(token) in text]
    assert "a-salt" not in text
    (begin,) = records_of(tmp_path / "steps", Begin)
    assert begin.config.digest_key is None


def test_aborts_flushes_refusals_and_what_is_open_are_told(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "steps")
    loop.submit(request_of(1, (1, 2, 3), max_tokens=40))
    loop.submit(request_of(2, (1, 2, 3), max_tokens=40))
    loop.submit(request_of(3, tuple(range(100))))
    loop.step()
    loop.abort(RequestId(1))
    loop.close()
    assert [abort.request for abort in records_of(tmp_path / "steps", Abort)] == [1]
    assert [add.refusal for add in records_of(tmp_path / "steps", Add)] == ["", "", "invalid"]
    ends = {content.request: content.end for content in records_of(tmp_path / "steps", Content)}
    assert ends == {1: "abort", 2: OPEN, 3: "invalid"}
    trace = StepTrace(tmp_path / "other", BEGIN)
    trace.flushed()
    trace.close()
    assert len(records_of(tmp_path / "other", Flush)) == 1


def test_a_file_ends_after_so_many_steps_and_the_run_goes_on(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "steps", max_steps=2)
    loop.submit(request_of(1, (1, 2, 3), max_tokens=6))
    run(loop)
    loop.close()
    assert [record.step for record in records_of(tmp_path / "steps", Apply)] == [0, 1]
    assert records_of(tmp_path / "steps", Content)[0].end == OPEN


def test_a_line_that_was_cut_off_ends_the_trace(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "steps")
    loop.submit(request_of(1, (1, 2, 3)))
    run(loop)
    loop.close()
    whole = [*read_step_trace(tmp_path / "steps")]
    data = (tmp_path / "steps").read_bytes()
    (tmp_path / "steps.gz").write_bytes(gzip.compress(data))
    assert [*read_step_trace(tmp_path / "steps.gz")] == whole
    (tmp_path / "steps").write_bytes(data[:-3])
    assert [*read_step_trace(tmp_path / "steps")] == whole[:-1]


@pytest.mark.parametrize("text", ["{}\n", '{"record":"abort","request":1}\n', "not JSON\n", '{"record":"none"}\n'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other").write_text(text)
    with pytest.raises(InvalidRequest, match="step trace"):
        [*read_step_trace(tmp_path / "other")]


def test_an_engine_on_the_cpu_writes_every_step(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    family = find_plugin("openinfer.models", "qwen3").load()()
    model_dir = find_plugin("openinfer.checkpoints", "tiny").load()()
    options = EngineOptions(num_blocks=64, max_num_seqs=4, max_step_tokens=64, step_trace=str(path))
    loop = build_loop(resolve(family.definition, model_dir, options))
    for number in range(3):
        loop.submit(request_of(number, (1, 2, 3)))
    run(loop)
    steps = loop.stats().steps
    loop.close()
    (begin,) = records_of(path, Begin)
    assert (begin.scheduler, begin.queue_policy, begin.config.num_blocks) == ("token-budget", "fair-share", 64)
    assert [apply.step for apply in records_of(path, Apply)] == [*range(steps)]


def test_an_engine_whose_step_trace_cannot_be_written_is_refused(tmp_path: Path) -> None:
    family = find_plugin("openinfer.models", "qwen3").load()()
    model_dir = find_plugin("openinfer.checkpoints", "tiny").load()()
    options = EngineOptions(num_blocks=64, step_trace=str(tmp_path / "missing" / "steps"))
    with pytest.raises(Refused, match=r"--step-trace .*steps cannot be written: No such file"):
        build_loop(resolve(family.definition, model_dir, options))


@pytest.mark.parametrize("beside", [{"kv_tier": ["host=1MiB"]}, {"speculative": "prompt-lookup"}])
def test_what_could_not_be_repeated_is_refused(beside: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="could not be repeated"):
        EngineOptions(step_trace="steps", **beside)
