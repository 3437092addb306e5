"""Processor time that a data-parallel engine takes with a new prompt apart from the model, alone in one thread.

    python tools/agents/routed_prompt.py [--tokens N] [--json FILE]

The router digests the prompt, and then the scheduler of the rank that gets it, chunk by chunk. Two arms, taken in
turns: hashers that remember what the other has computed, and hashers that do not, as it was before.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.provenance import provenance
from openinfer_core.queue_policies import FairShare
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepResult
from openinfer_engine.data_parallel.routing import RankRouter
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_kv_cache import PrefixHasher

RUNS = 5
BLOCK_SIZE_TOKENS = 16
NUM_BLOCKS = 2**16
STEP_TOKENS = 8192
KEY = bytes(32)


def main() -> None:
    """Prints a table; `--json` also writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="of the prompt (default: 100000)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    taken: dict[str, list[tuple[float, float]]] = {"apart": [], "together": []}
    for number in range(RUNS):
        for arm, runs in taken.items():
            runs.append(measured(number, num_tokens=arguments.tokens, together=arm == "together"))
    rows = {arm: _row(runs) for arm, runs in taken.items()}
    for arm, row in rows.items():
        print(f"{arm:>10} router {row['router_ms']:6.2f} ms, scheduler {row['scheduler_ms']:6.2f} ms")
    if arguments.json is not None:
        content: dict[str, Any] = {
            **msgspec.to_builtins(provenance()),
            "tokens": arguments.tokens,
            "runs": RUNS,
            "arms": rows,
            "runs_ms": taken,
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def measured(seed: int, *, num_tokens: int, together: bool) -> tuple[float, float]:
    """Milliseconds of the router, and of the scheduler until the prompt is computed."""
    config = SchedulerConfig(
        num_blocks=NUM_BLOCKS,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        max_num_seqs=4,
        max_step_tokens=STEP_TOKENS,
        max_model_tokens=num_tokens + 1,
        digest_key=KEY,
    )
    scheduler = TokenBudgetScheduler(config, FairShare(QueuePolicyConfig()))
    hasher = PrefixHasher(BLOCK_SIZE_TOKENS, key=KEY)
    if together:
        scheduler.share_digests(hasher)
    router = RankRouter([None, None], num_blocks=NUM_BLOCKS, hasher=hasher)
    request = GenerateRequest(
        request_id=RequestId(0),
        prompt_token_ids=tuple(np.random.default_rng(seed).integers(0, 150_000, num_tokens).tolist()),
        sampling=SamplingParams(max_tokens=1),
    )
    begin_s = time.thread_time()
    router.choose(request)
    routed_s = time.thread_time()
    scheduler.add(request, now_s=0.0)
    while (plan := scheduler.plan(now_s=0.0)) is not None:
        token_ids = np.where(plan.max_new > 0, 7, -1).astype(np.int32)
        scheduler.apply(plan, StepResult.of_single_tokens(token_ids), now_s=0.0)
    return 1000 * (routed_s - begin_s), 1000 * (time.thread_time() - routed_s)


def _row(runs: list[tuple[float, float]]) -> dict[str, float]:
    router_ms, scheduler_ms = (statistics.median(each) for each in zip(*runs, strict=True))
    return {"router_ms": round(router_ms, 2), "scheduler_ms": round(scheduler_ms, 2)}


if __name__ == "__main__":
    main()
