"""Speculation changes no token: thousands of random requests with and without, on a CPU, batch-invariant.

    python tools/speculation_on_off.py [--requests N] [--jobs N] [--seconds S] [--drafters NAME ...] [--json FILE]
    python tools/speculation_on_off.py --plant token|query [--requests N]

Each case is an engine of its own with something scarce, and each drafter answers N requests in it: n-grams by both
rules, scripted drafters that are right, wrong, random and hostile, and every drafter that is a model, with the model
that it is made for (`drafters/folders.py`); of `NAME, spoiled` the drafts are replaced by random ones, of which many
are right, while the drafter computes as ever. Requests mix sampling, penalties, biases, stop tokens, grammars,
restrictions, log-probabilities, predictions and, in one case, adapters; the file says how many had what. Drafters and
cases take turns, `--jobs` batches at a time, each in a process of its own; after `--seconds` no more are begun. Ends
with 1 if an answer differs.

With `--plant` the engines with drafters have a fault (`drafters/planted.py`): it ends with 1 if one of them is not
found.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from drafters.folders import DRAFTED, DraftedModel, make_drafted_model
from drafters.planted import PLANTS, planted

from openinfer_core import GenerateRequest, Grammar, find_plugin
from openinfer_core.provenance import provenance
from openinfer_core.sampling import GrammarKind
from openinfer_engine import EngineOptions, resolve
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.options import KvCacheDtype
from openinfer_engine.testing.drafters import DraftKind, scripted_drafter, with_drafter, with_scripted_drafts
from openinfer_engine.testing.speculation import SpeculationCounts, check_on_is_off, mixed_requests

ROOT = Path(__file__).resolve().parents[1]
ROOMY: dict[str, Any] = {
    "num_blocks": 600,
    "max_num_seqs": 16,
    "max_step_tokens": 256,
    "block_size_tokens": 8,
    "batch_invariant": True,
}
MODELS = {
    "attention": ("qwen3", ROOT / "packages/openinfer-qwen3/tests/fixtures/tied"),
    "states": ("qwen35", ROOT / "packages/openinfer-qwen35/tests/fixtures/text_tied"),
    "text": ("qwen3", None),  # the trained tiny model: it has a tokenizer, which grammars need
}
ADAPTERS = [f"{name}={ROOT / 'packages/openinfer-qwen3/tests/adapters' / name}" for name in ("patterns", "rank_8")]
SCARCE = {"num_blocks": 40, "block_size_tokens": 4, "max_step_tokens": 40}
LENGTHS = {"long": 4, "long, everything": 3}
"""How many times as long prompts and answers of a case are."""
EVERYTHING = {
    "max_step_tokens": 24,
    "block_size_tokens": 4,
    "num_blocks": 70,
    "kv_tier": ["host=16MiB"],
    "tensor_parallel_size": 2,
}
ADAPTIVE = ("adaptive",)
"""Cases in which the pace says how many drafts there are, as by default; else there are as many as there may be."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("attention", {}),
    "chunks": ("attention", {"max_step_tokens": 20, "max_num_seqs": 7}),
    "preemption": ("attention", {"num_blocks": 40, "block_size_tokens": 4, "max_step_tokens": 40}),
    "tiers": ("attention", {"num_blocks": 16, "kv_tier": ["host=16MiB"]}),
    "ranks": ("attention", {"tensor_parallel_size": 2, "num_blocks": 60}),
    "states": ("states", {"num_blocks": 60}),
    "grammars": ("text", {}),
    "grammars, preemption": ("text", {"num_blocks": 60, "block_size_tokens": 4, "max_step_tokens": 40}),
    "fp8": ("attention", {"kv_cache_dtype": KvCacheDtype.FP8, **SCARCE}),
    "adapters": ("attention", {"lora": ADAPTERS, "max_lora_rank": 40, "max_loras": 2, **SCARCE}),
    "states, preemption": ("states", {"num_blocks": 16, "max_step_tokens": 24}),
    "states, tiers": ("states", {"num_blocks": 24, "kv_tier": ["host=16MiB"]}),
    "states, fp8, ranks": ("states", {"kv_cache_dtype": KvCacheDtype.FP8, "tensor_parallel_size": 2, "num_blocks": 40}),
    "long": ("attention", {"num_blocks": 90, "block_size_tokens": 4, "max_step_tokens": 40}),
    "long, everything": ("attention", EVERYTHING),
    "adaptive": ("attention", SCARCE),
}
DRAFTED_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_step_tokens": 20, "max_num_seqs": 7},
    "preemption": SCARCE,
    "tiers": {"num_blocks": 16, "kv_tier": ["host=16MiB"]},
    "ranks": {"tensor_parallel_size": 2, "num_blocks": 60},
    "ranks, preemption": {"tensor_parallel_size": 2, **SCARCE},
    "fp8": {"kv_cache_dtype": KvCacheDtype.FP8, **SCARCE},
    "adapters": {"lora": ADAPTERS, "max_lora_rank": 40, "max_loras": 2, **SCARCE},
    "long": {"num_blocks": 90, "block_size_tokens": 4, "max_step_tokens": 40},
    "long, everything": EVERYTHING,
    "adaptive": SCARCE,
}
"""Of drafters that are models; all have grammars."""
REFUSED = {
    "fp8": ("eagle3", "deepseek-mtp", "deepseek-v4-mtp"),
    "adapters": (
        "eagle3",
        "dspark",
        "mtp",
        "draft-model",
        "draft-model, states",
        "deepseek-mtp",
        "deepseek-v4-mtp",
    ),  # made for another shape
}
"""Cases that a drafter is not run in: the engine refuses it, or the adapters are another model's."""
SPOILED = ", spoiled"
REPLACED = tuple(f"{name}{SPOILED}" for name in ("dflash", "deepseek-mtp", "deepseek-v4-mtp"))
"""Drafters with random weights, whose own drafts are hardly ever right."""
SAME = ("tensor_parallel_size", "kv_cache_dtype", "lora", "max_lora_rank")
"""What has bits of its own: sums over ranks, KV that is rounded, adapters."""
NGRAMS = ("ngram", "ngram,k=7,n_min=1,n_max=3,match=latest")
GRAMMARS = (
    Grammar(kind=GrammarKind.REGEX, text="(ab|cd){3,6}[0-9]{2}"),
    Grammar(kind=GrammarKind.CHOICE, text=json.dumps(["red red red red", "red red blue", "green green"])),
    Grammar(kind=GrammarKind.LARK, text='start: ("one " | "two ")+ "end"'),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests of one drafter in one case."""

    drafter: str
    case: str
    count: int
    seed: int
    plant: str | None
    folders: Mapping[str, DraftedModel] = field(repr=False)

    @property
    def model(self) -> str:
        """The drafter that is a model, or "" for others."""
        name = self.drafter.removesuffix(SPOILED)
        return name if name in DRAFTED else ""


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a batch; `difference` is None where all answers were the same."""

    batch: Batch
    counts: SpeculationCounts
    features: Counter[str]
    seconds: float
    difference: str | None = None


def cases_of(drafter: str) -> list[str]:
    name = drafter.removesuffix(SPOILED)
    if name not in DRAFTED:
        return [*CASES]
    return [case for case in DRAFTED_CASES if name not in REFUSED.get(case, ())]


def engine(batch: Batch, options: Mapping[str, Any]) -> EnginePlan:
    if batch.model:
        drafted = batch.folders[batch.model]
        family, folder = drafted.family, drafted.model_dir
    else:
        family, folder = MODELS[CASES[batch.case][0]]
    definition = find_plugin("openinfer.models", family).load()().definition
    model_dir = folder or find_plugin("openinfer.checkpoints", "tiny").load()()
    return resolve(definition, model_dir, EngineOptions(**ROOMY | dict(options)))


def run_batch(batch: Batch) -> Found:
    options = DRAFTED_CASES[batch.case] if batch.model else CASES[batch.case][1]
    off = engine(batch, {**{key: options[key] for key in SAME if key in options}, "prefix_cache": False})
    has_grammars = off.grammar_compiler is not None
    requests = mixed_requests(
        off.worker_limits.num_token_ids,
        count=batch.count,
        seed=batch.seed,
        grammars=GRAMMARS if has_grammars else (),
        stop_token_id=off.eos_token_ids[0] if off.eos_token_ids else None,
        length=LENGTHS.get(batch.case, 1),
    )
    if "lora" in options:
        names = [None, *(each.partition("=")[0] for each in options["lora"])]
        requests = [msgspec.structs.replace(each, lora=names[place % 3]) for place, each in enumerate(requests)]

    def make_on(outputs: Mapping[int, Sequence[int]]) -> EnginePlan:
        on = drafting(batch, options, outputs)
        return on if batch.plant is None else planted(on, batch.plant)

    features = features_of(requests)
    if not batch.drafter.startswith("ngram"):  # others take no predictions, and are given none
        del features["prediction"]
    begin_s = time.monotonic()
    try:
        counts, difference = check_on_is_off(off, make_on, requests, seed=batch.seed), None
    except AssertionError as error:
        counts, difference = SpeculationCounts(requests=len(requests)), str(error)
    return Found(batch, counts, features, time.monotonic() - begin_s, difference)


def drafting(batch: Batch, options: Mapping[str, Any], outputs: Mapping[int, Sequence[int]]) -> EnginePlan:
    """The engine with the batch's drafter, where requests without are answered `outputs`."""
    adaptive = str(batch.case in ADAPTIVE).lower()
    if batch.drafter in set(DraftKind):
        return with_drafter(
            engine(batch, options), scripted_drafter(DraftKind(batch.drafter), outputs, seed=batch.seed)
        )
    speculative = batch.folders[batch.model].speculative if batch.model else batch.drafter
    found = engine(batch, {**options, "speculative": f"{speculative},adaptive={adaptive}"})
    if not batch.drafter.endswith(SPOILED):
        return found
    return with_scripted_drafts(found, DraftKind.RANDOM, outputs, seed=batch.seed)


def features_of(requests: Sequence[GenerateRequest]) -> Counter[str]:
    """How many requests ask for what."""
    counts: Counter[str] = Counter()
    for request in requests:
        sampling = request.sampling
        counts += Counter(
            {
                "sampled": sampling.temperature > 0,
                "top_p, top_k, min_p": sampling.top_p < 1 or sampling.top_k > 0,
                "penalties": sampling.repetition_penalty != 1 or bool(sampling.presence_penalty),
                "logit_bias": bool(sampling.logit_bias),
                "stop_token_ids": bool(sampling.stop_token_ids),
                "min_tokens": sampling.min_tokens > 0,
                "grammar": sampling.grammar is not None,
                "allowed_token_ids": bool(sampling.allowed_token_ids),
                "bad_words": bool(sampling.bad_words),
                "logprobs": sampling.logprobs is not None,
                "prompt_logprobs": sampling.prompt_logprobs is not None,
                "prediction": bool(request.prediction_token_ids),
                "adapter": request.lora is not None,
            }
        )
    return counts


class Totals:
    """What was found so far: a row for each drafter and case."""

    def __init__(self, *, plant: str | None, json_file: Path | None, commit: str | None) -> None:
        self._plant, self._file = plant, json_file
        self._of_run = msgspec.to_builtins(provenance(commit=commit))
        self._counts: dict[tuple[str, str], SpeculationCounts] = {}
        self._features: dict[tuple[str, str], Counter[str]] = {}
        self.differences: list[dict[str, Any]] = []
        self.num_missed = 0
        """Batches with a planted fault that was not found."""

    def take(self, found: Found) -> None:
        batch = found.batch
        key = batch.drafter, batch.case
        self._counts[key] = self._counts.get(key, SpeculationCounts()) + found.counts
        self._features[key] = self._features.get(key, Counter[str]()) + found.features
        self.num_missed += batch.plant is not None and found.difference is None
        if found.difference is not None:
            of_batch = {"drafter": batch.drafter, "case": batch.case, "seed": batch.seed}
            self.differences.append(of_batch | {"difference": found.difference[:400]})
        ended = "the same" if found.difference is None else f"DIFFERENT: {found.difference[:160]}"
        print(f"{batch.drafter}; {batch.case}; seed {batch.seed}: {ended}, {found.seconds:.0f} s", flush=True)

    def write(self) -> None:
        if self._file is None:
            return
        rows = [
            {"drafter": drafter, "case": case, **asdict(counts), "of_them": dict(self._features[drafter, case])}
            for (drafter, case), counts in sorted(self._counts.items())
        ]
        told: dict[str, Any] = {"differing_batches": self.differences}
        if self._plant is not None:
            told |= {"planted": PLANTS[self._plant], "not_found": self.num_missed}
        report = {**self._of_run, **told, "totals": self.by_drafter(), "rows": rows}
        self._file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def by_drafter(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for drafter in sorted({drafter for drafter, _ in self._counts}):
            mine = [key for key in self._counts if key[0] == drafter]
            counts = sum((self._counts[key] for key in mine), SpeculationCounts())
            features = sum((self._features[key] for key in mine), Counter[str]())
            found[drafter] = {**asdict(counts), "of_them": dict(features)}
        return found


def batches(given: argparse.Namespace, folders: Mapping[str, DraftedModel]) -> list[Batch]:
    """In turns, so that what ends early has of all of them about as many."""
    return [
        Batch(
            drafter=str(drafter),
            case=case,
            count=-(-min(given.batch, given.requests - first) // LENGTHS.get(case, 1)),
            seed=given.seed + first,
            plant=given.plant,
            folders=folders,
        )
        for first in range(0, given.requests, given.batch)
        for drafter in given.drafters
        for case in given.cases or cases_of(drafter)
    ]


def run_all(todo: Sequence[Batch], pool: Executor, totals: Totals, *, jobs: int, until_s: float) -> None:
    waiting, running = list(reversed(todo)), set[Future[Found]]()
    while running or (waiting and time.monotonic() < until_s):
        while waiting and len(running) < jobs and time.monotonic() < until_s:
            running.add(pool.submit(run_batch, waiting.pop()))
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for each in done:
            totals.take(each.result())
        totals.write()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="of each drafter in each case")
    parser.add_argument("--batch", type=int, default=125, help="requests of one engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafters", nargs="+", default=[*NGRAMS, *DraftKind, *DRAFTED, *REPLACED])
    parser.add_argument("--cases", nargs="+", help="by default all that a drafter has")
    parser.add_argument("--jobs", type=int, default=1, help="batches at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no more are begun")
    parser.add_argument("--plant", choices=PLANTS)
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path, help="written after each batch")
    given = parser.parse_args()
    until_s = time.monotonic() + given.seconds
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the processes
    totals = Totals(plant=given.plant, json_file=given.json, commit=given.commit)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="drafted-") as made, ProcessPoolExecutor(given.jobs, context) as pool:
        names = [name for name in DRAFTED if {name, f"{name}{SPOILED}"} & {str(each) for each in given.drafters}]
        for place in range(len(names)):
            (Path(made) / str(place)).mkdir()
        paths = [Path(made) / str(place) for place in range(len(names))]
        folders = dict(zip(names, pool.map(make_drafted_model, names, paths), strict=True))
        run_all(batches(given, folders), pool, totals, jobs=given.jobs, until_s=until_s)
    for drafter, counts in totals.by_drafter().items():
        print(drafter, {name: value for name, value in counts.items() if name != "of_them"})
    for each in totals.differences if given.plant is None else ():
        print("DIFFERENT", each)
    if given.plant is not None:
        print(f"{PLANTS[given.plant]}: found in {len(totals.differences)} batches, not found in {totals.num_missed}")
        return int(totals.num_missed > 0 or not totals.differences)
    return int(bool(totals.differences))


if __name__ == "__main__":
    sys.exit(main())
