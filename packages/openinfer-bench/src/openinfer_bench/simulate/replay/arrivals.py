"""Arrival traces of real servers as a phase of requests: when each came, how long its prompt and its answer were.

    step trace   what `--step-trace` wrote: `add` and `content`; prompts share what they shared
    Mooncake     JSON lines: timestamp (ms), input_length, output_length, hash_ids of blocks of 512 tokens
    Azure        CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens

Prompts are made up: of each block's number, so that equal prefixes are equal, and of numbers of their own where a trace
has no blocks.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from openinfer_bench.serve.messages import Job
from openinfer_bench.serve.workloads import Phase
from openinfer_core import InvalidRequest
from openinfer_engine.tracing.step_trace import Add, Begin, Content, read_step_trace

_MOONCAKE_BLOCK_TOKENS = 512
_FIRST_ID, _NUM_IDS = 200, 150_000
_MOST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()
    """Numbers of the prompt's full blocks."""
    block_tokens: int = 1


def phase_of_file(path: Path, *, most_requests: int | None = None) -> Phase:
    """The requests of a trace, the first `most_requests` of them, at their times after the first one's.

    Raises:
        InvalidRequest: the file is no arrival trace, or has no request.
    """
    arrivals = sorted(read_arrivals(path), key=lambda each: each.at_s)[:most_requests]
    if not arrivals:
        raise InvalidRequest(f"{path} has no request", field="arrivals")
    first_s = arrivals[0].at_s
    jobs = [
        Job(
            prompt=_prompt_of(arrival, number),
            output_tokens=arrival.output_tokens,
            at_s=arrival.at_s - first_s,
        )
        for number, arrival in enumerate(arrivals)
    ]
    return Phase(name=path.name, jobs=jobs, places=len(jobs))


def read_arrivals(path: Path) -> list[Arrival]:
    """All requests of a trace that have an answer, in the file's order; raises as `phase_of_file`."""
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
        if first.startswith('{"record":"begin"'):
            return [*_of_steps(path)]
        if first.startswith("{"):
            return [_of_mooncake(json.loads(line)) for line in path.read_text("utf-8").splitlines() if line.strip()]
        with path.open(encoding="utf-8", newline="") as file:
            return [_of_azure(row) for row in csv.DictReader(file)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is no arrival trace that is known here: {error!r}", field="arrivals") from error


def _of_steps(path: Path) -> Iterator[Arrival]:
    added: dict[int, Add] = {}
    block_tokens = 1
    for record in read_step_trace(path):
        if isinstance(record, Begin):
            block_tokens = record.config.block_size_tokens
        elif isinstance(record, Add):
            added[record.request] = record
        elif isinstance(record, Content) and (add := added.pop(record.request, None)) is not None:
            output_tokens = record.num_tokens - add.prompt_tokens
            if output_tokens > 0:
                blocks = record.blocks[: add.prompt_tokens // block_tokens]
                yield Arrival(
                    at_s=add.at_s,
                    prompt_tokens=add.prompt_tokens,
                    output_tokens=output_tokens,
                    blocks=blocks,
                    block_tokens=block_tokens,
                )


def _of_mooncake(record: Any) -> Arrival:
    prompt_tokens = _count(record["input_length"])
    return Arrival(
        at_s=float(record["timestamp"]) / 1e3,
        prompt_tokens=prompt_tokens,
        output_tokens=_count(record["output_length"]),
        blocks=[int(each) for each in record.get("hash_ids", ())][: prompt_tokens // _MOONCAKE_BLOCK_TOKENS],
        block_tokens=_MOONCAKE_BLOCK_TOKENS,
    )


def _of_azure(row: dict[str, str]) -> Arrival:
    text = row["TIMESTAMP"].strip()
    # Seven digits of a second in these files; Python reads six.
    seconds, _, fraction = text.partition(".")
    digits = fraction.removesuffix("+00:00")
    at_s = datetime.fromisoformat(f"{seconds}+00:00").timestamp() + (float(f"0.{digits}") if digits else 0.0)
    return Arrival(at_s=at_s, prompt_tokens=_count(row["ContextTokens"]), output_tokens=_count(row["GeneratedTokens"]))


def _count(value: Any) -> int:
    count = int(value)
    if not 1 <= count <= _MOST_TOKENS:
        raise ValueError(f"{count} tokens; a request has 1 to {_MOST_TOKENS}")
    return count


def _prompt_of(arrival: Arrival, number: int) -> bytes:
    """Ids of a prompt, int32: a block's by its number alone, the rest by the request's."""
    blocks = [_ids((0, block), arrival.block_tokens) for block in arrival.blocks]
    rest = arrival.prompt_tokens - len(arrival.blocks) * arrival.block_tokens
    return np.concatenate([*blocks, _ids((1, number), rest)]).astype(np.int32).tobytes()


def _ids(seed: Iterable[int], count: int) -> Any:
    return np.random.default_rng([*seed]).integers(_FIRST_ID, _NUM_IDS, count)
