"""Time to first token and throughput with drafts where the KV pool is full and requests wait, against the same without.

    python3 tools/device/drafted_load.py qwen3-8b --speculative eagle3,k=2 --accept never=1 goal=1.99
        [--clients 96] [--requests 240] [--rows 40] [--most-s 60] [--json FILE]

So many clients send a request each, and another one when it is answered. Prompts are of half to one and a half times
`--prompt` tokens, answers of as many around `--output`; the pool has room for `--rows` requests of both means, so that
most clients wait for blocks, and rows are preempted where answers are long. Drafts are those of `drafted_speed.py`:
the real drafter runs in each step, its drafts are spoiled to the stated acceptance, and all tokens are compared.

Modes are its `off` (requests with the bias) and `adaptive`. TTFT counts from when a client sends. An arm ends after
`--most-s` seconds, with what was answered until then; compare arms that answered the same. The file is written anew
after each arm.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import drafted_speed as speed
import msgspec
import numpy as np

from openinfer_core import GenerateRequest, RequestId, SamplingParams, Tokens
from openinfer_core.provenance import provenance

BLOCK_TOKENS = 16


@dataclass(slots=True)
class Row:
    """One mode at one acceptance."""

    mode: str
    acceptance: str
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    seconds: float
    answered: int
    preemptions: int
    accepted: int
    drafted: int
    most_waiting: int


class Load:
    """Clients that ask again and again."""

    def __init__(self, loop: Any, made: Sequence[speed.Simulated], given: argparse.Namespace, *, first: int) -> None:
        self._loop, self._made, self._first = loop, made, first
        self._rng = np.random.default_rng(11)
        self._asks = [self._ask(given, first + index) for index in range(given.requests)]
        self._sent_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        self.ttft_ms: list[float] = []
        self.itl_ms: list[float] = []
        self.num_tokens = self.most_waiting = self.answered = 0

    def _ask(self, given: argparse.Namespace, request_id: int) -> GenerateRequest:
        count, answer = (int(mean * self._rng.uniform(0.5, 1.5)) for mean in (given.prompt, given.output))
        sampling = SamplingParams(max_tokens=answer, temperature=0.0, logit_bias={speed.ANSWER: speed.BIAS})
        ids = tuple(self._rng.integers(5000, given.num_ids, count).tolist())
        return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=ids, sampling=sampling)

    def run(self, clients: int, *, most_s: float) -> float:
        """Seconds until all are answered, or no more are waited for."""
        began = time.perf_counter()
        waiting = list(reversed(self._asks))
        for _ in range(min(clients, len(waiting))):
            self._send(waiting.pop())
        while self._loop.busy and time.perf_counter() - began < most_s:
            for drafter in self._made:
                drafter.turn()
            ended = self._take(self._loop.step())
            self.answered += ended
            self.most_waiting = max(self.most_waiting, self._loop.stats().waiting)
            for _ in range(min(ended, len(waiting))):
                self._send(waiting.pop())
        seconds = time.perf_counter() - began
        for request_id in self._sent_s:
            self._loop.abort(request_id)
        while self._loop.busy:
            self._loop.step()
        return seconds

    def _send(self, request: GenerateRequest) -> None:
        self._sent_s[request.request_id] = time.perf_counter()
        self._take(self._loop.submit(request))

    def _take(self, events: Sequence[Any]) -> int:
        """How many requests have ended."""
        now_s, ended = time.perf_counter(), 0
        for event in events:
            if isinstance(event, Tokens):
                if any(token != speed.ANSWER for token in event.token_ids):
                    raise SystemExit("a token is not the known one")
                self.num_tokens += len(event.token_ids)
                if event.request_id in self._last_s:
                    self.itl_ms.append((now_s - self._last_s[event.request_id]) * 1e3)
                else:
                    self.ttft_ms.append((now_s - self._sent_s[event.request_id]) * 1e3)
                self._last_s[event.request_id] = now_s
            elif type(event).__name__ == "Finished":
                ended += 1
            elif type(event).__name__ == "Failed":
                raise SystemExit(f"a request failed: {event}")
        return ended


def measure(given: argparse.Namespace, folder: Path, mode: str) -> list[Row]:
    loop, made = speed.open_engine(given, folder, mode)
    rows: list[Row] = []
    for place, acceptance in enumerate(given.accept if made else [speed.Acceptance("bias", 1, 1)]):
        speed.give_drafts(given, made, acceptance, batch=speed.most_rows(made))
        before = loop.stats()
        load = Load(loop, made, given, first=1 + place * 10 * given.requests)
        seconds, after = load.run(given.clients, most_s=given.most_s), loop.stats()
        ttft, itl = (np.percentile(each, (50, 90, 99)).tolist() for each in (load.ttft_ms, load.itl_ms))
        rows.append(
            Row(
                mode=mode,
                acceptance=acceptance.name,
                tokens_per_s=load.num_tokens / seconds,
                ttft_p50_ms=ttft[0],
                ttft_p90_ms=ttft[1],
                ttft_p99_ms=ttft[2],
                itl_p50_ms=itl[0],
                itl_p99_ms=itl[2],
                seconds=seconds,
                answered=load.answered,
                preemptions=after.preemptions - before.preemptions,
                accepted=after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens,
                drafted=after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens,
                most_waiting=load.most_waiting,
            )
        )
        print(rows[-1], flush=True)
        if given.json is not None:
            write(given, rows)
    loop.close()
    return rows


def main() -> int:
    given = arguments()
    mean = given.prompt + given.output
    pool = f"num_blocks={given.rows * -(-mean // BLOCK_TOKENS)}"
    given.option = [pool, f"max_model_tokens={2 * mean}", *given.option]
    with tempfile.TemporaryDirectory() as made:
        folder = speed.model_folder(given, Path(made))
        if len(given.modes) == 1:
            rows = measure(given, folder, given.modes[0])
        else:
            rows = speed.of_each_mode(given.modes, __file__, Row)
    if len(given.modes) > 1:
        print(table(rows))
    if given.json is not None:
        write(given, rows)
    return 0


def write(given: argparse.Namespace, rows: Sequence[Row]) -> None:
    set_up = {name: str(value) for name, value in vars(given).items()}
    report = {
        **msgspec.to_builtins(provenance(commit=given.commit)),
        "set_up": set_up,
        "rows": [asdict(row) for row in rows],
    }
    given.json.write_text(json.dumps(report, indent=1) + "\n")


def table(rows: Sequence[Row]) -> str:
    off = next((row for row in rows if row.mode == "off"), None)
    lines = ["mode      acceptance  tokens/s  x off   TTFT p50   p90   p99 ms   ITL p50   p99 ms  preempted  drafts"]
    for row in rows:
        gain = f"{row.tokens_per_s / off.tokens_per_s:5.3f}" if off else "    -"
        ttft = f"{row.ttft_p50_ms:8.0f} {row.ttft_p90_ms:6.0f} {row.ttft_p99_ms:6.0f}"
        lines.append(
            f"{row.mode:8}  {row.acceptance:10}  {row.tokens_per_s:8.0f}  {gain}  {ttft}  {row.itl_p50_ms:8.2f} "
            f"{row.itl_p99_ms:7.2f}  {row.preemptions:9}  {row.accepted} of {row.drafted}"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a folder with a config.json, or one of {', '.join(speed.CONFIGS)}")
    parser.add_argument("--speculative", required=True)
    parser.add_argument("--accept", type=speed.Acceptance.parse, nargs="+", default=[speed.Acceptance("never", 1, 1)])
    parser.add_argument("--modes", nargs="+", default=["off", "adaptive"])
    parser.add_argument("--clients", type=int, default=96)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--most-s", type=float, default=60.0, help="of an arm")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=192)
    parser.add_argument("--num-ids", type=int, default=150_000, help="of prompts, from 5,000 on")
    parser.add_argument("--config", default="{}", help="JSON of keys of config.json that are different")
    parser.add_argument("--drafter-config", default="{}", help="the same of the drafter's")
    parser.add_argument("--option", nargs="*", default=[], help="engine options: NAME=VALUE")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    parser.set_defaults(real=False)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
