"""An engine of several GPUs against one of one: log-probabilities, times, and the end when a rank dies.

    python3 tools/device/tensor_parallel.py MODEL OUT 1 && python3 tools/device/tensor_parallel.py MODEL OUT 2

MODEL needs a config.json alone: weights are random, the same for every number of ranks. The first run writes what later
ones are compared with, all write OUT/tensor-parallel-RANKS.json.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from openinfer_bench.offline import measure_offline
from openinfer_core import (
    Failed,
    GenerateRequest,
    RequestId,
    SamplingParams,
    Tokens,
    claim,
    list_plugins,
    read_config,
)
from openinfer_core.plugins import MODELS
from openinfer_core.provenance import provenance
from openinfer_engine import GroupBroken, StepLoop, build_loop, resolve
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.worker.process_group import start_workers
from openinfer_engine.worker.process_runner import ProcessRunner

SIZES = ((1, 1024), (8, 1024), (64, 1024))
PROMPTS = (1, 17, 100, 333, 700, 1024)


def main() -> None:
    model_dir, out, ranks = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    family: Any = claim(read_config(model_dir), list_plugins(MODELS))[0]
    given = {"device": "cuda", "load_format": "dummy", "tensor_parallel_size": ranks, "prefix_cache": False}
    options = msgspec.convert({**given, "grammar_compiler": "none"}, family.options_type)
    begin_s = time.perf_counter()
    processes = start_workers(EngineSpec.of(family.definition, model_dir, options), options)
    composition = resolve(family.definition, model_dir, options)
    loop = build_loop(composition, processes)
    start_s = time.perf_counter() - begin_s
    print(f"{ranks} ranks started in {start_s:.1f} s; blocks {loop.info.num_blocks}", flush=True)
    memory = {phase.name: phase.device_bytes for phase in loop.info.start if hasattr(phase, "device_bytes")}
    first, second = answers(loop), answers(loop)
    alone = answers(loop, together=False)
    chunks = describe("prompts one by one against together, the same ranks", alone, first)
    is_repeatable = bool(np.array_equal(first, second))
    print(f"two runs are equal bit for bit: {is_repeatable}", flush=True)
    drift = compare(first, out / "tensor-parallel-1.npy", ranks)
    rows = []
    for batch, prompt in SIZES:
        found = measure_offline(loop, max_step_tokens=2048, batch=batch, prompt_tokens=prompt, output_tokens=65)
        rows.append({"batch": batch, "prompt": prompt, "tpot_ms": found.tpot_ms, "prefill_s": found.prefill_s})
        print(
            f"{batch:>3} x {prompt}: TPOT {found.tpot_ms:7.3f} ms, prefill {found.prefill_s * 1e3:8.1f} ms", flush=True
        )
    death = kill_a_rank(loop) if isinstance(loop.runner, ProcessRunner) else None
    if death is None:
        loop.close()
    report = {
        "ranks": ranks,
        "start_s": start_s,
        "device_bytes": memory,
        "plan": msgspec.to_builtins(composition.plan()),
        "is_repeatable": is_repeatable,
        "drift": drift,
        "drift_of_chunks": chunks,
        "rows": rows,
        "death": death,
    }
    text = json.dumps({**msgspec.to_builtins(provenance(commit=os.environ.get("COMMIT"))), **report}, indent=2)
    (out / f"tensor-parallel-{ranks}.json").write_text(text + "\n")


def answers(loop: StepLoop, *, together: bool = True) -> np.ndarray:
    """Log-probabilities of fixed prompts' own tokens, each prompt's after the last."""
    rng, said = np.random.default_rng(3), dict[int, list[float]]()
    for index, length in enumerate(PROMPTS):
        prompt = tuple(rng.integers(0, loop.info.num_token_ids, length + 1).tolist())
        sampling = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, prompt_logprobs=0)
        request = GenerateRequest(request_id=RequestId(index), prompt_token_ids=prompt, sampling=sampling)
        assert loop.submit(request) == []
        said[index] = []
        if not together:
            listen(loop, said)
    listen(loop, said)
    return np.concatenate([np.asarray(values) for values in said.values()])


def listen(loop: StepLoop, said: dict[int, list[float]]) -> None:
    while loop.busy:
        for event in loop.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Tokens):
                said[event.request_id] += [one.logprob for one in event.prompt_logprobs or ()]


def compare(found: np.ndarray, reference: Path, ranks: int) -> dict[str, float]:
    if ranks == 1:
        np.save(reference, found)
        return {}
    return describe("against one rank", found, np.load(reference))


def describe(what: str, found: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    delta = np.abs(found - reference)
    drift = {"positions": len(delta), "mean": float(delta.mean()), "p99": float(np.quantile(delta, 0.99))}
    print(f"log-probabilities, {what}: mean {drift['mean']:.4f}, p99 {drift['p99']:.4f} of {len(delta)}", flush=True)
    return drift


def kill_a_rank(loop: StepLoop) -> dict[str, Any]:
    """Ends a rank's process while the engine decodes; how long until the loop says so, and until it is closed."""
    assert isinstance(loop.runner, ProcessRunner)
    sampling = SamplingParams(max_tokens=4000, temperature=0.0)
    loop.submit(GenerateRequest(request_id=RequestId(999), prompt_token_ids=(1, 2, 3), sampling=sampling))
    for _ in range(50):
        loop.step()
    os.kill(loop.runner.process_ids[-1], signal.SIGKILL)
    begin_s, message = time.perf_counter(), ""
    try:
        while True:
            loop.step()
    except GroupBroken as error:
        message = str(error)
    told_s = time.perf_counter() - begin_s
    loop.close()
    closed_s = time.perf_counter() - begin_s
    print(f"death: {message!r} after {told_s * 1e3:.0f} ms, closed after {closed_s:.2f} s", flush=True)
    return {"message": message, "told_s": told_s, "closed_s": closed_s}


if __name__ == "__main__":
    main()
