"""How long requests wait for an adapter's slot: many adapters, few slots, Zipf's traffic in real time.

    python3 tools/device/lora_zipf.py MODEL [--adapters N] [--slots N] [--rate R] [--seconds S] [--device cuda|cpu]
                                      [--json FILE] [--commit C]

MODEL is a folder with a config.json; weights and adapters are random. Requests come by themselves, R a second, and name
the k-th adapter in proportion to k^-1.2. A wait is from submission to the step in which a request begins. Bound is what
may pass a request, MAX_BYPASS_S, and the longest time that any request ran, since a slot is free when its rows end.
Exits with 1 where the p99 of the rarest quarter of adapters is beyond it.
"""

import argparse
import json
import sys
import time
from contextlib import closing
from pathlib import Path

from source_packages import folders

sys.path[:0] = folders()

import numpy as np  # noqa: E402
from made_adapters import made_adapters  # noqa: E402

from openinfer_core import (  # noqa: E402
    Failed,
    Finished,
    GenerateRequest,
    RequestId,
    SamplingParams,
    TokenEvent,
)
from openinfer_core.events import Scheduled  # noqa: E402
from openinfer_engine.engine_plan import resolve  # noqa: E402
from openinfer_engine.launch import build_loop  # noqa: E402
from openinfer_engine.loop import StepLoop  # noqa: E402
from openinfer_engine.options import DeviceKind, EngineOptions, LoadFormat  # noqa: E402
from openinfer_engine.scheduler.order.bypass import MAX_BYPASS_S  # noqa: E402

EXPONENT = 1.2
PROMPT_TOKENS, MOST_NEW_TOKENS = 100, 120


class Traffic:
    def __init__(self, given: argparse.Namespace) -> None:
        rng = np.random.default_rng(3)
        popularity = 1 / np.arange(1, given.adapters + 1) ** EXPONENT
        count = int(given.rate * given.seconds)
        self.due_s = np.cumsum(rng.exponential(1 / given.rate, count))
        self.adapters = rng.choice(given.adapters, count, p=popularity / popularity.sum())
        self.lengths = rng.integers(10, MOST_NEW_TOKENS, count)
        self.prompts = rng.integers(0, 250, (count, PROMPT_TOKENS))
        self.waits_s: dict[int, float] = {}
        self.began_s: dict[int, float] = {}
        self.ran_s: dict[int, float] = {}
        self.failed = 0

    def run(self, loop: StepLoop) -> None:
        begin, number = time.monotonic(), 0
        while number < len(self.due_s) or loop.busy:
            now = time.monotonic() - begin
            while number < len(self.due_s) and self.due_s[number] <= now:
                self.take(loop.submit(self.request(number)))
                number += 1
            if loop.busy:
                self.take(loop.step())
            else:
                time.sleep(max(0.0, self.due_s[number] - now))

    def request(self, number: int) -> GenerateRequest:
        return GenerateRequest(
            request_id=RequestId(number),
            prompt_token_ids=tuple(self.prompts[number].tolist()),
            sampling=SamplingParams(max_tokens=int(self.lengths[number]), temperature=0.0),
            lora=f"adapter-{self.adapters[number]}",
        )

    def take(self, events: list[TokenEvent]) -> None:
        now = time.monotonic()
        for event in events:
            if isinstance(event, Scheduled):
                self.waits_s[event.request_id], self.began_s[event.request_id] = event.queued_s, now
            elif isinstance(event, Finished):
                self.ran_s[event.request_id] = now - self.began_s[event.request_id]
            elif isinstance(event, Failed):
                self.failed += 1

    def result(self, num_adapters: int) -> dict[str, float]:
        of_rare = [wait for number, wait in self.waits_s.items() if self.adapters[number] >= 3 * num_adapters // 4]
        waits, ran = np.array(list(self.waits_s.values())), np.array(list(self.ran_s.values()))
        return {
            "requests": len(self.due_s),
            "failed": self.failed,
            "rare_requests": len(of_rare),
            "rare_p50_s": float(np.percentile(of_rare, 50)),
            "rare_p99_s": float(np.percentile(of_rare, 99)),
            "p50_s": float(np.percentile(waits, 50)),
            "p99_s": float(np.percentile(waits, 99)),
            "longest_run_s": float(ran.max()),
            "bound_s": float(MAX_BYPASS_S + ran.max()),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with made_adapters(given.model, count=given.adapters, rank=given.rank) as made:
        options = EngineOptions(
            device=DeviceKind(given.device),
            load_format=LoadFormat.DUMMY,
            num_blocks=2048,
            max_num_seqs=32,
            max_model_tokens=256,
            lora=made.flags,
            max_loras=given.slots,
            max_lora_rank=given.rank,
        )
        begin = time.perf_counter()
        loop = build_loop(resolve(made.definition, given.model, options))
        print(f"started in {time.perf_counter() - begin:.1f} s with {given.adapters} adapters", flush=True)
        traffic = Traffic(given)
        with closing(loop):
            traffic.run(loop)
    result = traffic.result(given.adapters)
    print("  ".join(f"{key} {value:.3f}" for key, value in result.items()), flush=True)
    if given.json:
        what = {
            key: getattr(given, key) for key in ("adapters", "slots", "rank", "rate", "seconds", "commit", "device")
        }
        given.json.write_text(json.dumps({"model": given.model.name, **what, **result}, indent=1) + "\n")
    return int(result["rare_p99_s"] > result["bound_s"] or traffic.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
