"""`openinfer bench grammars`: what structured output costs the engine, with a model's own vocabulary.

For each grammar: the time to compile it the first time (guard process, worker thread, first mask) and again, and
processor time per token (`fill` and `accept`) along outputs of random allowed tokens. Random tokens are dearer than a
model's: each leads into a part of the grammar that no mask has been made for.

With `--victim`, what such grammars cost another client's stream (`mask_victims.py`).
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.models import find_model_dir
from openinfer_bench.mask_victims import Gaps, measure
from openinfer_core import GenerateRequest, Refused, RequestId, SamplingParams, read_config
from openinfer_core.grammars import GrammarCompiler, TokenMatcher, Vocabulary, mask_words
from openinfer_core.provenance import provenance
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_engine.grammars.choice import LLGUIDANCE, choose_grammar_compiler, make_grammar_compiler
from openinfer_engine.vocabulary import read_eos_token_ids, read_num_token_ids

OPENINFER_CONTRACT = 1

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "home": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string"}}},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "home", "tags"],
    "additionalProperties": False,
}
GRAMMARS: Mapping[str, Grammar] = {
    "JSON of a schema": Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(_PERSON)),
    "any JSON object": Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "object"}'),
    "date and time": Grammar(kind=GrammarKind.REGEX, text=r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z"),
    "choice of 100": Grammar(kind=GrammarKind.CHOICE, text=json.dumps([f"the answer {n}" for n in range(100)])),
    "free text": Grammar(kind=GrammarKind.REGEX, text=r"(.|\n)*"),
}
_COMPILE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarTiming:
    """What one grammar costs."""

    grammar: str
    first_ms: float
    """To compile it; of the clock."""
    again_ms: float
    tokens: int
    mean_us: float
    """Per token, of processor time, as what follows."""
    p50_us: float
    p99_us: float
    max_us: float


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; `--json FILE` also writes it."""
    arguments = _parser().parse_args(argv)
    if arguments.victim:
        gaps = measure(find_model_dir(arguments.model))
        _print_gaps(gaps)
        _write(arguments.json, {"rows": [asdict(arm) for arm in gaps]})
        return 0
    vocabulary = _vocabulary(arguments.model)
    begin_s = time.perf_counter()
    compiler = make_grammar_compiler(
        choose_grammar_compiler(arguments.grammar_compiler, vocabulary.model_dir), vocabulary
    )
    if compiler is None:
        raise Refused(f"grammar_compiler is {arguments.grammar_compiler}: there is nothing to measure")
    _compile(compiler, Grammar(kind=GrammarKind.REGEX, text="ready"), vocabulary)
    ready_s = time.perf_counter() - begin_s
    timings = [_measure(compiler, name, vocabulary, arguments.tokens) for name in GRAMMARS]
    compiler.close()
    _print(timings, vocabulary, ready_s)
    rows = [asdict(timing) for timing in timings]
    _write(arguments.json, {"num_token_ids": vocabulary.num_token_ids, "ready_s": ready_s, "rows": rows})
    return 0


def _write(file: str | None, report: dict[str, Any]) -> None:
    if file is not None:
        made_of = provenance()
        described = {name: getattr(made_of, name) for name in made_of.__struct_fields__}
        Path(file).write_text(json.dumps({**described, **report}, indent=2) + "\n")


def _print_gaps(arms: Sequence[Gaps]) -> None:
    lines = ["arm              gaps   p50 ms   p99 ms   max ms   others' s  tokens  failed"]
    for arm in arms:
        times = f"{arm.arm:<14} {arm.gaps:>6} {arm.p50_ms:>8.1f} {arm.p99_ms:>8.1f} {arm.max_ms:>8.1f}"
        lines.append(f"{times} {arm.attack_s:>11.1f} {arm.attack_tokens:>7} {arm.attack_failures:>7}")
    sys.stdout.write("\n".join(lines) + "\n")


def _measure(compiler: GrammarCompiler, name: str, vocabulary: Vocabulary, num_tokens: int) -> GrammarTiming:
    first_ms = _compile_ms(compiler, GRAMMARS[name], vocabulary)
    again_ms = _compile_ms(compiler, GRAMMARS[name], vocabulary)
    rng, taken_s = random.Random(0), list[float]()  # noqa: S311 - the same tokens each time
    while len(taken_s) < num_tokens:
        taken_s += _walk(_compile(compiler, GRAMMARS[name], vocabulary), vocabulary, rng)
    ordered = sorted(seconds * 1e6 for seconds in taken_s)
    return GrammarTiming(
        grammar=name,
        first_ms=first_ms,
        again_ms=again_ms,
        tokens=len(ordered),
        mean_us=statistics.fmean(ordered),
        p50_us=ordered[len(ordered) // 2],
        p99_us=ordered[len(ordered) * 99 // 100],
        max_us=ordered[-1],
    )


def _walk(matcher: TokenMatcher, vocabulary: Vocabulary, rng: random.Random, *, max_tokens: int = 200) -> list[float]:
    """Seconds that each token of one output takes."""
    words, taken_s = np.empty(mask_words(vocabulary.num_token_ids), np.uint32), list[float]()
    for _ in range(max_tokens):
        begin_s = time.thread_time()
        matcher.fill(words)
        filled_s = time.thread_time()
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        token_id = int(rng.choice(allowed))
        if token_id in vocabulary.eos_token_ids:
            break
        accept_s = time.thread_time()
        matcher.accept(token_id)
        taken_s.append(filled_s - begin_s + time.thread_time() - accept_s)
    return taken_s


def _compile(compiler: GrammarCompiler, grammar: Grammar, vocabulary: Vocabulary) -> TokenMatcher:
    sampling = SamplingParams(max_tokens=1, stop_token_ids=vocabulary.eos_token_ids, grammar=grammar)
    request = GenerateRequest(request_id=RequestId(1), prompt_token_ids=(0,), sampling=sampling)
    return compiler.compile(request).result(_COMPILE_S)


def _compile_ms(compiler: GrammarCompiler, grammar: Grammar, vocabulary: Vocabulary) -> float:
    begin_s = time.perf_counter()
    _compile(compiler, grammar, vocabulary)
    return (time.perf_counter() - begin_s) * 1e3


def _vocabulary(model: str) -> Vocabulary:
    model_dir = find_model_dir(model)
    return Vocabulary(
        model_dir=model_dir,
        num_token_ids=read_num_token_ids(model_dir, vocab_size=2**24),
        eos_token_ids=read_eos_token_ids(model_dir, read_config(model_dir)),
    )


def _print(timings: Sequence[GrammarTiming], vocabulary: Vocabulary, ready_s: float) -> None:
    lines = [f"{vocabulary.num_token_ids} token ids; the compiler was ready after {ready_s:.2f} s"]
    lines.append("grammar               first ms  again ms  tokens  mean us   p50 us   p99 us   max us")
    for each in timings:
        compiled = f"{each.grammar:<20} {each.first_ms:>9.1f} {each.again_ms:>9.2f} {each.tokens:>7}"
        lines.append(f"{compiled} {each.mean_us:>8.0f} {each.p50_us:>8.0f} {each.p99_us:>8.0f} {each.max_us:>8.0f}")
    sys.stdout.write("\n".join(lines) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer bench grammars", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="tiny", metavar="DIR|NAME", help="a model folder, or the name of a model")
    parser.add_argument(
        "--grammar-compiler", default=LLGUIDANCE, metavar="NAME", help="the grammar compiler to measure"
    )
    parser.add_argument("--tokens", type=int, default=3000, metavar="N", help="least number of tokens per grammar")
    parser.add_argument(
        "--victim", action="store_true", help="measure another client's gaps next to 12 requests of 16 outputs each"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    return parser
