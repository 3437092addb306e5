"""`openinfer bench offline`: the engine alone, without HTTP: prefill rate and time per output token.

For each batch and prompt length, so many requests with random prompts are submitted at once, with the prefix cache off.
Prefill is the time until every request has its first token. From there on all of them decode, and TPOT is the mean
time of the steps that follow; a request that began earlier has said more by then, so none ends before the last of
these steps, and the rest is aborted. The first run of each size is thrown away.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from openinfer.models import find_model_dir
from openinfer_bench.trace import summarise_file
from openinfer_core import (
    Failed,
    GenerateRequest,
    InvalidRequest,
    RequestId,
    SamplingParams,
    TokenEvent,
    Tokens,
    claim,
    list_plugins,
    read_config,
)
from openinfer_core.plugins import MODELS
from openinfer_core.process.resident import settle_memory
from openinfer_core.provenance import provenance
from openinfer_engine.engine_plan import resolve
from openinfer_engine.launch import build_loop
from openinfer_engine.loop import StepLoop

OPENINFER_CONTRACT = 1

_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineTiming:
    """One batch and prompt length."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    prefill_s: float
    """Until every request had its first token."""
    tpot_ms: float
    steps: int
    """That TPOT is the mean of."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens over `prefill_s`."""
        return self.batch * self.prompt_tokens / self.prefill_s


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; `--json FILE` also writes it."""
    arguments = _parser().parse_args(argv)
    model_dir = find_model_dir(arguments.model)
    family: Any = claim(read_config(model_dir), list_plugins(MODELS))[0]
    given = dict(_pair(each) for each in arguments.option)
    if arguments.trace is not None:
        given["trace"] = arguments.trace
    options = msgspec.convert({"prefix_cache": False, **given}, family.options_type, strict=False)
    engine_plan = resolve(family.definition, model_dir, options)
    begin_s = time.perf_counter()
    loop = build_loop(engine_plan)
    # As the engine's process does: a collection of what a start leaves would fall into any run.
    settle_memory()
    load_s = time.perf_counter() - begin_s
    timings = [
        measure_offline(
            loop,
            max_step_tokens=options.max_step_tokens,
            batch=batch,
            prompt_tokens=prompt,
            output_tokens=arguments.output,
            repeats=arguments.repeats,
        )
        for batch, prompt in map(_size, arguments.size)
    ]
    loop.close()
    sys.stdout.write(_table(timings))
    if arguments.trace is not None:
        sys.stdout.write(summarise_file(Path(arguments.trace)).table())
    if arguments.json is not None:
        report = {
            **msgspec.to_builtins(provenance(commit=arguments.commit)),
            "set_up": {
                "model": msgspec.to_builtins(engine_plan.plan()),
                "options": msgspec.to_builtins(options),
                "load_s": load_s,
            },
            "rows": [_row(timing) for timing in timings],
        }
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measure_offline(
    loop: StepLoop,
    *,
    max_step_tokens: int,
    batch: int,
    prompt_tokens: int,
    output_tokens: int,
    repeats: int = 1,
    seed: int = 0,
    adapters: Sequence[str] = (),
) -> OfflineTiming:
    """Times one batch; the fastest of `repeats` runs after one that is thrown away.

    Args:
        loop: an engine at rest, which only this function drives.
        max_step_tokens: of the engine: how many tokens a step takes at most.
        batch: requests.
        prompt_tokens: of each, random.
        output_tokens: of each, greedy.
        repeats: runs to time.
        seed: of the prompts.
        adapters: that requests name, one after the other and again; by default none.
    """
    rng = np.random.default_rng(seed)
    head_start = -(-batch * prompt_tokens // max(1, max_step_tokens - batch)) + _STEPS_IN_FLIGHT
    runs = [
        _run_once(
            loop,
            rng,
            batch=batch,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            max_tokens=min(output_tokens + head_start, loop.info.max_model_tokens - prompt_tokens),
            adapters=adapters,
        )
        for _ in range(repeats + 1)
    ]
    return min(runs[1:], key=lambda timing: timing.tpot_ms)


def _count(generated: dict[RequestId, int], events: Sequence[TokenEvent]) -> None:
    for event in events:
        if isinstance(event, Tokens) and event.request_id in generated:
            generated[event.request_id] += len(event.token_ids)
        elif isinstance(event, Failed):
            raise InvalidRequest(f"a request failed: {event.message}")


def _run_once(
    loop: StepLoop,
    rng: np.random.Generator,
    *,
    batch: int,
    prompt_tokens: int,
    output_tokens: int,
    max_tokens: int,
    adapters: Sequence[str],
) -> OfflineTiming:
    first_id = int(rng.integers(0, 2**40))
    generated = {RequestId(first_id + index): 0 for index in range(batch)}
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    begin_s = time.perf_counter()
    for index, request_id in enumerate(generated):
        prompt = tuple(rng.integers(0, loop.info.num_token_ids, prompt_tokens).tolist())
        lora = adapters[index % len(adapters)] if adapters else None
        request = GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, lora=lora)
        _count(generated, loop.submit(request))
    while not all(generated.values()):
        _count(generated, loop.step())
    first_s, before, steps = time.perf_counter(), sum(generated.values()), output_tokens - 1
    for _ in range(steps):
        _count(generated, loop.step())
    end_s = time.perf_counter()
    tokens = sum(generated.values()) - before
    if tokens != batch * steps:
        raise InvalidRequest(f"{steps} steps of {batch} rows gave {tokens} tokens, not one per row and step")
    for request_id in generated:
        loop.abort(request_id)
    while loop.busy:
        loop.step()
    return OfflineTiming(
        batch=batch,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefill_s=first_s - begin_s,
        tpot_ms=(end_s - first_s) * 1e3 / max(1, steps),
        steps=steps,
    )


def _row(timing: OfflineTiming) -> dict[str, Any]:
    """As files of results hold it."""
    return asdict(timing) | {"prefill_tokens_per_s": timing.prefill_tokens_per_s}


def _table(timings: Sequence[OfflineTiming]) -> str:
    lines = [f"{'batch x prompt':>16} {'TPOT ms':>9} {'prefill ms':>11} {'prefill tokens/s':>17}"]
    lines += [
        f"{f'{timing.batch} x {timing.prompt_tokens}':>16} {timing.tpot_ms:>9.3f} "
        f"{timing.prefill_s * 1e3:>11.1f} {timing.prefill_tokens_per_s:>17,.0f}"
        for timing in timings
    ]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer bench offline", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="DIR|NAME", help="a model folder, or the name of a model")
    parser.add_argument(
        "--size",
        nargs="+",
        default=["1x1024", "8x1024"],
        metavar="BATCHxPROMPT",
        help="requests x prompt tokens of each",
    )
    parser.add_argument("--output", type=int, default=129, metavar="N", help="output tokens of each request")
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="timed runs of each size; the fastest is shown"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine option: device=cuda, load_format=dummy",
    )
    parser.add_argument("--commit", metavar="ID", help="commit to record, where the code is in no checkout")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of the runs to FILE, and print what it says")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.replace("-", "_"), value


def _size(text: str) -> tuple[int, int]:
    batch, _, prompt = text.partition("x")
    if not (batch.isdigit() and prompt.isdigit()):
        raise InvalidRequest(f"--size {text!r} is not of the form 8x1024", field="size")
    return int(batch), int(prompt)
