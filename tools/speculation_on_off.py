"""Speculation changes no token: thousands of random requests with and without, on a CPU, batch-invariant.

    python tools/speculation_on_off.py [--requests N] [--drafters NAME ...] [--json FILE]

Each case is an engine of its own with something scarce, and each drafter answers N requests in it: n-grams by both
rules, scripted drafters that are right, wrong, random and hostile, and every drafter that is a model, with the model
that it is made for (`drafters/folders.py`). Requests mix sampling, penalties, biases, stop tokens, grammars,
restrictions, log-probabilities, predictions and, in one case, adapters; the file says how many had what. Ends with 1
if an answer differs.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from drafters.folders import DRAFTED, DraftedModel, make_drafted_model

from openinfer_core import GenerateRequest, Grammar, find_plugin
from openinfer_core.provenance import provenance
from openinfer_core.sampling import GrammarKind
from openinfer_engine import EngineOptions, resolve
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.options import KvCacheDtype
from openinfer_engine.testing.drafters import DraftKind, scripted_drafter, with_drafter
from openinfer_engine.testing.speculation import SpeculationCounts, check_on_is_off, mixed_requests

ROOT = Path(__file__).resolve().parents[1]
ROOMY = {"num_blocks": 600, "max_num_seqs": 16, "max_step_tokens": 256, "block_size_tokens": 8, "batch_invariant": True}
MODELS = {
    "attention": ("qwen3", ROOT / "packages/openinfer-qwen3/tests/fixtures/tied"),
    "states": ("qwen35", ROOT / "packages/openinfer-qwen35/tests/fixtures/text_tied"),
    "text": ("qwen3", None),  # the trained tiny model: it has a tokenizer, which grammars need
}
ADAPTERS = [f"{name}={ROOT / 'packages/openinfer-qwen3/tests/adapters' / name}" for name in ("patterns", "rank_8")]
SCARCE = {"num_blocks": 40, "block_size_tokens": 4, "max_step_tokens": 40}
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
}
"""Of drafters that are models; all have grammars."""
REFUSED = {
    "fp8": ("eagle3", "deepseek-mtp"),
    "adapters": (
        "eagle3",
        "dspark",
        "mtp",
        "draft-model",
        "draft-model, states",
        "deepseek-mtp",
    ),  # made for another shape
}
"""Cases that a drafter is not run in: the engine refuses it, or the adapters are another model's."""
SAME = ("tensor_parallel_size", "kv_cache_dtype", "lora", "max_lora_rank")
"""What has bits of its own: sums over ranks, KV that is rounded, adapters."""
NGRAMS = ("ngram", "ngram,k=7,n_min=1,n_max=3,match=latest")
GRAMMARS = (
    Grammar(kind=GrammarKind.REGEX, text="(ab|cd){3,6}[0-9]{2}"),
    Grammar(kind=GrammarKind.CHOICE, text=json.dumps(["red red red red", "red red blue", "green green"])),
    Grammar(kind=GrammarKind.LARK, text='start: ("one " | "two ")+ "end"'),
)


@cache
def drafted_model(drafter: str) -> DraftedModel:
    return make_drafted_model(drafter, Path(tempfile.mkdtemp(prefix="drafted-")))


def cases_of(drafter: str) -> list[str]:
    if drafter not in DRAFTED:
        return [*CASES]
    return [name for name in DRAFTED_CASES if drafter not in REFUSED.get(name, ())]


def engine(model: str, options: Mapping[str, Any]) -> EnginePlan:
    if model in DRAFTED:
        drafted = drafted_model(model)
        family, folder = drafted.family, drafted.model_dir
    else:
        family, folder = MODELS[model]
    definition = find_plugin("openinfer.models", family).load()().definition
    model_dir = folder or find_plugin("openinfer.checkpoints", "tiny").load()()
    return resolve(definition, model_dir, EngineOptions(**ROOMY | dict(options)))


def run_case(name: str, drafter: str, *, count: int, seed: int) -> tuple[SpeculationCounts, Counter[str]]:
    model, options = (drafter, DRAFTED_CASES[name]) if drafter in DRAFTED else CASES[name]
    off = engine(model, {**{key: options[key] for key in SAME if key in options}, "prefix_cache": False})
    has_grammars = off.grammar_compiler is not None
    requests = mixed_requests(
        off.worker_limits.num_token_ids,
        count=count,
        seed=seed,
        grammars=GRAMMARS if has_grammars else (),
        stop_token_id=off.eos_token_ids[0] if off.eos_token_ids else None,
    )
    if "lora" in options:
        names = [None, *(each.partition("=")[0] for each in options["lora"])]
        requests = [msgspec.structs.replace(each, lora=names[place % 3]) for place, each in enumerate(requests)]

    def make_on(outputs: Mapping[int, Sequence[int]]) -> EnginePlan:
        if drafter in set(DraftKind):
            return with_drafter(engine(model, options), scripted_drafter(DraftKind(drafter), outputs, seed=seed))
        speculative = drafted_model(drafter).speculative if drafter in DRAFTED else drafter
        return engine(model, {**options, "speculative": f"{speculative},adaptive=false"})

    counts = check_on_is_off(off, make_on, requests, seed=seed)
    features = features_of(requests)
    if not drafter.startswith("ngram"):  # others take no predictions, and are given none
        del features["prediction"]
    return counts, features


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="of each drafter in each case")
    parser.add_argument("--batch", type=int, default=125, help="requests of one engine")
    parser.add_argument("--drafters", nargs="+", default=[*NGRAMS, *DraftKind, *DRAFTED])
    parser.add_argument("--cases", nargs="+", help="by default all that a drafter has")
    parser.add_argument("--json", help="written after each case")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for drafter in arguments.drafters:
        for name in arguments.cases or cases_of(drafter):
            counts, features, begin_s = SpeculationCounts(), Counter[str](), time.monotonic()
            for seed in range(0, arguments.requests, arguments.batch):
                count = min(arguments.batch, arguments.requests - seed)
                of_batch, features_of_batch = run_case(name, drafter, count=count, seed=seed)
                counts += of_batch
                features += features_of_batch
            rows.append({"drafter": str(drafter), "case": name, **asdict(counts), "of_them": dict(features)})
            print(rows[-1], f"{time.monotonic() - begin_s:.0f} s", flush=True)
            if arguments.json:
                report = {**msgspec.to_builtins(provenance()), "differing_answers": 0, "rows": rows}
                Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
