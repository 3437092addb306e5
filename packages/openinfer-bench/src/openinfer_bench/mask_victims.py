"""What one client's dear grammar costs another client's stream: gaps between its tokens, with the attack and without.

The attack is 12 requests with 16 outputs each of one schema of 237 KB, which the compiler accepts: most of its masks
take tens of milliseconds, until a request has used up what its masks may take. The victim streams free text next to it.
The baseline has as many requests without a grammar in place of the attack's. Arms run in the order A-B-A.

Engine and scheduler are those of a server, on the CPU, in one process, without HTTP.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from openinfer_core import (
    Failed,
    Finished,
    GenerateRequest,
    Ledger,
    RequestId,
    SamplingParams,
    TokenEvent,
    Tokens,
    claim,
    list_plugins,
    read_config,
)
from openinfer_core.plugins import MODELS
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_engine.engine_plan import resolve
from openinfer_engine.launch import build_loop
from openinfer_engine.loop import StepLoop
from openinfer_engine.options import EngineOptions
from openinfer_engine.vocabulary import read_eos_token_ids

REQUESTS, OUTPUTS = 12, 16
SCHEMA_CHARACTERS = 237_000
_ALTERNATIVES = 170
_PROMPT_TOKENS = 24
_VICTIM_TOKENS = 400
_WARM_UP_TOKENS = 20
_ATTACK = 1_000_000  # ids of the attack's requests begin here


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """One arm."""

    arm: str
    gaps: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    attack_s: float
    """Until the last of the others had ended, or the victim had its tokens."""
    attack_tokens: int
    attack_failures: int


def schema() -> str:
    """An array of objects, any of many alternatives which all go on after any key."""
    padding = "x" * ((SCHEMA_CHARACTERS - 120 * _ALTERNATIVES) // _ALTERNATIVES)
    alternatives = [
        {"type": "object", "properties": {f"key_{n}": {"type": "integer", "description": padding}}}
        for n in range(_ALTERNATIVES)
    ]
    text = json.dumps({"type": "array", "minItems": 30, "items": {"anyOf": alternatives}})
    return text + " " * (SCHEMA_CHARACTERS - len(text))


def measure(model_dir: Path, *, victim_tokens: int = _VICTIM_TOKENS) -> list[Gaps]:
    """All arms, each with a loop of its own."""
    return [_arm(model_dir, arm, victim_tokens) for arm in ("baseline", "attack", "baseline again")]


def _arm(model_dir: Path, arm: str, victim_tokens: int) -> Gaps:
    family: Any = claim(read_config(model_dir), list_plugins(MODELS))[0]
    options = EngineOptions(
        num_blocks=4096, max_num_seqs=32, max_step_tokens=1024, max_model_tokens=1024, prefix_cache=False
    )
    loop = build_loop(resolve(family.definition, model_dir, options))
    try:
        return _Run(loop, model_dir, arm, victim_tokens).measure()
    finally:
        loop.close()


class _Run:
    def __init__(self, loop: StepLoop, model_dir: Path, arm: str, victim_tokens: int) -> None:
        self._loop = loop
        self._arm = arm
        self._victim_tokens = victim_tokens
        self._eos_token_ids = read_eos_token_ids(model_dir, read_config(model_dir))
        self._grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema()) if arm == "attack" else None
        self._ledger = Ledger()
        self._victim_s: list[float] = []
        self._others_s: list[float] = []
        self._num_tokens = self._num_failures = 0

    def measure(self) -> Gaps:
        if self._grammar is not None:  # the server has seen it: what it costs to compile is not the question
            self._submit(self._other(_ATTACK - 1))
            self._until(lambda: not len(self._ledger))
        self._submit(self._victim())
        self._until(lambda: len(self._victim_s) > _WARM_UP_TOKENS)
        self._num_tokens = self._num_failures = 0
        begin_s, first = time.perf_counter(), len(self._victim_s)
        others = self._others()
        self._until(lambda: RequestId(0) not in self._ledger, others)
        gaps = [
            1e3 * (later - earlier)
            for earlier, later in zip(self._victim_s[first - 1 :], self._victim_s[first:], strict=False)
        ]
        ordered = sorted(gaps)
        return Gaps(
            arm=self._arm,
            gaps=len(gaps),
            p50_ms=statistics.median(gaps),
            p99_ms=ordered[len(ordered) * 99 // 100],
            max_ms=ordered[-1],
            attack_s=max(self._others_s, default=begin_s) - begin_s,
            attack_tokens=self._num_tokens,
            attack_failures=self._num_failures,
        )

    def _until(self, is_over: Callable[[], bool], others: Iterator[GenerateRequest] | None = None) -> None:
        """Steps, with a few of the others' requests before each, as they come from a socket."""
        while not is_over():
            for request in islice(others or (), OUTPUTS):
                self._submit(request)
            self._take(self._loop.step())

    def _submit(self, request: GenerateRequest) -> None:
        self._ledger.open(request)
        self._take(self._loop.submit(request))

    def _take(self, events: Sequence[TokenEvent]) -> None:
        now_s = time.perf_counter()
        for event in self._ledger.record(list(events)):
            if event.request_id == 0:
                if isinstance(event, Tokens):
                    self._victim_s.append(now_s)
            elif isinstance(event, Tokens):
                self._num_tokens += len(event.token_ids)
                self._others_s.append(now_s)
            elif isinstance(event, Failed | Finished):
                self._num_failures += isinstance(event, Failed)
                self._others_s.append(now_s)

    def _victim(self) -> GenerateRequest:
        sampling = SamplingParams(max_tokens=self._victim_tokens + _WARM_UP_TOKENS, seed=0)
        return GenerateRequest(
            request_id=RequestId(0), prompt_token_ids=(1,) * _PROMPT_TOKENS, sampling=sampling, tenant="victim"
        )

    def _others(self) -> Iterator[GenerateRequest]:
        for number in range(REQUESTS * OUTPUTS):
            yield self._other(_ATTACK + number)

    def _other(self, request_id: int) -> GenerateRequest:
        sampling = SamplingParams(
            max_tokens=200, seed=request_id, stop_token_ids=self._eos_token_ids, grammar=self._grammar
        )
        return GenerateRequest(
            request_id=RequestId(request_id),
            prompt_token_ids=(request_id // OUTPUTS % 1000 + 2,) * _PROMPT_TOKENS,
            sampling=sampling,
            tenant="attacker",
        )
