"""`openinfer bench offline`: the engine alone, without HTTP: prefill rate and time per output token.

For each batch and prompt length, so many requests with random prompts are submitted at once and run to the end, with
the prefix cache off. Prefill is the time until every request has its first token; TPOT is the time from there to the
last token over the tokens after the first. The first run of each size is thrown away.
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

from openinfer_core import (
    Finished,
    GenerateRequest,
    InvalidRequest,
    RequestId,
    SamplingParams,
    TokenEvent,
    Tokens,
    claim,
    list_plugins,
    load_family,
    read_config,
)
from openinfer_core.plugins import MODELS
from openinfer_core.provenance import provenance
from openinfer_engine.composition import resolve
from openinfer_engine.launch import build_loop
from openinfer_engine.loop import StepLoop
from openinfer_engine.trace_summary import summarise_file


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

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens over `prefill_s`."""
        return self.batch * self.prompt_tokens / self.prefill_s


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; `--json FILE` also writes it."""
    arguments = _parser().parse_args(argv)
    model_dir = Path(arguments.model)
    family: Any = claim(read_config(model_dir), map(load_family, list_plugins(MODELS)))
    given = dict(_pair(each) for each in arguments.option)
    if arguments.trace is not None:
        given["trace"] = arguments.trace
    options = msgspec.convert({"prefix_cache": False, **given}, family.options_type, strict=False)
    composition = resolve(family.definition, model_dir, options)
    begin_s = time.perf_counter()
    loop = build_loop(composition)
    load_s = time.perf_counter() - begin_s
    timings = [
        measure_offline(
            loop, batch=batch, prompt_tokens=prompt, output_tokens=arguments.output, repeats=arguments.repeats
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
                "model": msgspec.to_builtins(composition.plan()),
                "options": msgspec.to_builtins(options),
                "load_s": load_s,
            },
            "rows": [_row(timing) for timing in timings],
        }
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measure_offline(
    loop: StepLoop, *, batch: int, prompt_tokens: int, output_tokens: int, repeats: int = 1, seed: int = 0
) -> OfflineTiming:
    """Times one batch; the fastest of `repeats` runs after one that is thrown away.

    Args:
        loop: an engine at rest, which only this function drives.
        batch: requests.
        prompt_tokens: of each, random.
        output_tokens: of each, greedy.
        repeats: runs to time.
        seed: of the prompts.
    """
    rng = np.random.default_rng(seed)
    runs = [
        _run_once(loop, rng, batch=batch, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        for _ in range(repeats + 1)
    ]
    return min(runs[1:], key=lambda timing: timing.tpot_ms)


def _run_once(
    loop: StepLoop, rng: np.random.Generator, *, batch: int, prompt_tokens: int, output_tokens: int
) -> OfflineTiming:
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0)
    first_id = int(rng.integers(0, 2**40))
    events: list[TokenEvent] = []
    begin_s = time.perf_counter()
    for index in range(batch):
        prompt = rng.integers(0, loop.info.num_token_ids, prompt_tokens).tolist()
        request = GenerateRequest(
            request_id=RequestId(first_id + index), prompt_token_ids=tuple(prompt), sampling=sampling
        )
        events += loop.submit(request)
    waiting = {first_id + index for index in range(batch)}
    first_s, generated, finished, steps = begin_s, 0, 0, 0
    while loop.busy:
        events = loop.step()
        steps += 1
        if waiting:
            waiting -= {event.request_id for event in events if isinstance(event, Tokens)}
            first_s = time.perf_counter()
        generated += sum(len(event.token_ids) for event in events if isinstance(event, Tokens))
        finished += sum(isinstance(event, Finished) for event in events)
    end_s = time.perf_counter()
    if generated != batch * output_tokens or finished != batch:
        raise InvalidRequest(f"{generated} tokens came, {batch * output_tokens} were asked for: {events[:1]}")
    return OfflineTiming(
        batch=batch,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefill_s=first_s - begin_s,
        tpot_ms=(end_s - first_s) * 1e3 / max(1, output_tokens - 1),
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
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--size", nargs="+", default=["1x1024", "8x1024"], metavar="BATCHxPROMPT")
    parser.add_argument("--output", type=int, default=129, metavar="N", help="output tokens of each request")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="the fastest of so many runs")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine option: device=cuda, load_format=dummy",
    )
    parser.add_argument("--commit", metavar="ID", help="of the code, where no checkout says")
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
