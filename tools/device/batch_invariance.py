"""Batch invariance on a GPU: one request's bits alone and in company, and what the mode costs.

    python3 tools/device/batch_invariance.py MODEL_FOLDER OUT.json [check] [time]

The folder needs a `config.json` of Qwen3 only: weights are random. Run it where the packages can be imported
(`source_packages.py`).
"""

import gc
import json
import sys
import time
from pathlib import Path

import numpy as np

from openinfer_bench.offline import measure_offline
from openinfer_core import GenerateRequest, RequestId, SamplingParams, Tokens
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.options import DeviceKind, LoadFormat
from openinfer_qwen3.family import Qwen3

PROMPT_TOKENS, NEW_TOKENS = 900, 24
SIZES = ((1, 1024), (8, 1024), (32, 1024), (64, 1024), (256, 1024), (1, 16384))


def make_loop(folder, **options):
    fields = {"device": DeviceKind.CUDA, "load_format": LoadFormat.DUMMY, "kv_cache_bytes": 48 << 30, **options}
    return build_loop(resolve(Qwen3().definition, folder, EngineOptions(**fields)))


def request(index, num_tokens, max_tokens, **sampling):
    ids = np.random.default_rng(index).integers(0, 150_000, num_tokens).tolist()
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3, logprobs=5, **sampling)
    return GenerateRequest(request_id=RequestId(index), prompt_token_ids=tuple(ids), sampling=params)


def answer(loop, wanted, others=()):
    """Ids and log-probabilities of one request; others begin some steps before it and run beside it."""
    events = []
    for other in others:
        events += [*loop.submit(other), *loop.step()]
    events += loop.submit(wanted)
    while loop.busy:
        events += loop.step()
    mine = [event for event in events if isinstance(event, Tokens) and event.request_id == wanted.request_id]
    ids = [token for event in mine for token in event.token_ids]
    return ids, [each for event in mine for each in event.logprobs or ()]


def differing(got, expected):
    return sum(a != b for a, b in zip(got[1], expected[1], strict=False)) + abs(len(got[1]) - len(expected[1]))


def check(folder, *, batch_invariant):
    """Log-probabilities that differ in any bit from those of the request alone, by circumstance."""
    wanted = request(0, PROMPT_TOKENS, NEW_TOKENS)
    others = [request(i, 37 * i, 60) for i in range(1, 8)]
    many = [request(i, 20 + i % 50, 50) for i in range(1, 60)]
    loop = make_loop(folder, batch_invariant=batch_invariant, max_num_seqs=64)
    alone = answer(loop, wanted)
    assert len(alone[0]) == NEW_TOKENS
    found = {"with a prefix hit": differing(answer(loop, wanted), alone)}
    found["among 7, after a prefix hit"] = differing(answer(loop, wanted, others), alone)
    found["among 59, after a prefix hit"] = differing(answer(loop, wanted, many), alone)
    loop.close()
    del loop
    gc.collect()
    loop = make_loop(folder, batch_invariant=batch_invariant, max_num_seqs=16, max_step_tokens=129, prefix_cache=False)
    found["in chunks of 129"] = differing(answer(loop, wanted), alone)
    found["in chunks, among 7"] = differing(answer(loop, wanted, others), alone)
    loop.close()
    del loop
    gc.collect()
    return found


def timings(folder, *, batch_invariant):
    loop = make_loop(folder, batch_invariant=batch_invariant, prefix_cache=False, max_step_tokens=8192)
    rows = []
    for batch, prompt in SIZES:
        timing = measure_offline(loop, max_step_tokens=8192, batch=batch, prompt_tokens=prompt, output_tokens=48)
        rows.append({"batch": batch, "prompt_tokens": prompt, "tpot_ms": timing.tpot_ms,
                     "prefill_tokens_per_s": timing.prefill_tokens_per_s})  # fmt: skip
    loop.close()
    del loop
    gc.collect()
    return rows


def main():
    folder, target, *what = sys.argv[1:]
    results = {}
    for batch_invariant in (True, False):
        name, began = f"batch_invariant={batch_invariant}", time.time()
        results[name] = {}
        if "check" in what:
            results[name]["differing_of_24"] = check(Path(folder), batch_invariant=batch_invariant)
        if "time" in what:
            results[name]["rows"] = timings(Path(folder), batch_invariant=batch_invariant)
        print(name, json.dumps(results[name], indent=1), f"in {time.time() - began:.1f} s", flush=True)
        Path(target).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
