"""What a turn takes whose KV lies on disk and that has to wait for its turn: with what waits brought up, and without.

    python3 tools/device/prefetch.py qwen3-4b|tiny OUT COMMIT [REPEATS]

Each repeat starts two servers on one folder of a disk tier below a host tier. The first computes some prompts, so that
their KV is on disk. The second, whose host tier is empty, is given a long answer that holds the pool, and meanwhile a
prompt that is on disk: what is told is its TTFT, and how long after the end of the long answer that was. In the arm
`without` nothing is brought up (`TierStack.prefetch_blocks` is 0). Weights are random; `tiny`, on the CPU, rehearses.
"""

import http.client
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from published_configs import PUBLISHED
from sessions import counters, write_model

import openinfer_tiny_model
from openinfer_bench.served import OPENINFER, Served, served
from openinfer_core.provenance import provenance

WITHOUT = """
from openinfer_kv_offload import TierStack

TierStack.prefetch_blocks = property(lambda self: 0)
"""
PREFETCHED = "openinfer_kv_tier_prefetched_blocks_total"
CUDA = ("--device", "cuda", "--load-format", "dummy", "--grammar-compiler", "none", "--max-num-seqs", "8")
QUIET_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """`prompt_tokens` are on disk; the pool has room for them or for what holds it."""

    prompt_tokens: int
    holding_tokens: int
    answer_tokens: int
    num_blocks: int
    num_token_ids: int
    flags: Sequence[str]


SET_UPS = {
    "qwen3-4b": SetUp(
        prompt_tokens=16_000,
        holding_tokens=8_000,
        answer_tokens=600,
        num_blocks=1_100,
        num_token_ids=150_000,
        flags=(*CUDA, "--max-model-tokens", "17000", "--kv-tier", "host=12GiB", "--kv-load-timeout-ms", "20000"),
    ),
    "tiny": SetUp(
        prompt_tokens=400,
        holding_tokens=200,
        answer_tokens=120,
        num_blocks=34,
        num_token_ids=2_000,
        flags=("--device", "cpu", "--max-num-seqs", "4", "--max-step-tokens", "128", "--kv-tier", "host=64MiB"),
    ),
}


def main() -> int:
    model, out, commit, *repeats = sys.argv[1:]
    set_up, rows = SET_UPS[model], list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="prefetch-") as made:
        folder = openinfer_tiny_model.model_dir() if model == "tiny" else Path(made) / "model"
        if model != "tiny":
            folder.mkdir()
            write_model(folder, PUBLISHED[model])
        for repeat in range(int(repeats[0]) if repeats else 1):
            for arm in ("with", "without"):
                rows.append({"repeat": repeat, "arm": arm, **measure(set_up, folder, arm, repeat)})
                print(rows[-1], flush=True)
                report = {**msgspec.to_builtins(provenance(commit=commit)), "model": model, "rows": rows}
                Path(out).mkdir(parents=True, exist_ok=True)
                (Path(out) / f"prefetch-{model}.json").write_text(json.dumps(report, indent=1) + "\n")
    for arm in ("with", "without"):
        of_arm = [row["after_ms"] for row in rows if row["arm"] == arm]
        print(f"{arm}: {statistics.median(of_arm):.0f} ms after the long answer's end")
    return 0


def measure(set_up: SetUp, folder: Path, arm: str, repeat: int) -> dict[str, Any]:
    prompts = [ids(set_up, number) for number in range(3)]
    with tempfile.TemporaryDirectory(prefix="prefetch-kv-") as kv, tempfile.TemporaryDirectory() as plant:
        (Path(plant) / "sitecustomize.py").write_text(WITHOUT if arm == "without" else "")
        flags = ["--model", str(folder), "--model-name", "m", "--log-level", "warning", *set_up.flags]
        flags += ["--kv-tier", f"disk={kv}/{repeat},20GiB", "--num-blocks", str(set_up.num_blocks)]
        with started(flags, Path(plant)) as server:
            computed_ms = [1e3 * ask(server, prompt, 1)[0] for prompt in prompts]
            wait_for_saves(server)
        with started(flags, Path(plant)) as server:
            disk_ms = 1e3 * ask(server, prompts[2], 1)[0]
            waited = [wait_behind(server, set_up, prompt, repeat) for prompt in prompts[:2]]
            brought = scraped(server, PREFETCHED)
    ttft_ms, after_ms = (round(statistics.median(each), 1) for each in zip(*waited, strict=True))
    return {
        "computed_ms": round(statistics.median(computed_ms), 1),
        "from_disk_ms": round(disk_ms, 1),
        "ttft_ms": ttft_ms,
        "after_ms": after_ms,
        "each_after_ms": [round(after, 1) for _, after in waited],
        "prefetched_blocks": brought,
    }


def wait_behind(server: Served, set_up: SetUp, prompt: Sequence[int], repeat: int) -> tuple[float, float]:
    """Milliseconds to the first token of a prompt that has to wait, and those after the end of what it waited for."""
    holding = [(7 * repeat + 3 * at + len(prompt)) % set_up.num_token_ids for at in range(set_up.holding_tokens)]
    ends: list[float] = []
    began = threading.Event()
    thread = threading.Thread(
        target=lambda: ends.append(sum(ask(server, holding, set_up.answer_tokens, began=began)[1:]))
    )
    thread.start()
    if not began.wait(60):
        raise SystemExit("the long answer did not begin")
    ttft_s, begin_s, _ = ask(server, prompt, 1)
    thread.join()
    return 1e3 * ttft_s, 1e3 * (begin_s + ttft_s - ends[0])


def ids(set_up: SetUp, number: int) -> list[int]:
    return [(number * 7919 + at * 31 + at * at % 97) % set_up.num_token_ids for at in range(set_up.prompt_tokens)]


def ask(
    server: Served, prompt: Sequence[int], num_tokens: int, *, began: threading.Event | None = None
) -> tuple[float, float, float]:
    """Seconds to the first token; when it was asked, and seconds until the end."""
    body = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    encoded = json.dumps(body | {"temperature": 0}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    begin_s, first_s = time.monotonic(), 0.0
    try:
        connection.request("POST", "/v1/completions", encoded, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {response.read()[:500]!r}")
        while line := response.readline():
            if line.startswith(b"data: {") and not first_s:
                first_s = time.monotonic() - begin_s
                if began is not None:
                    began.set()
    finally:
        connection.close()
    return first_s, begin_s, time.monotonic() - begin_s


@contextmanager
def started(flags: Sequence[str], plant: Path) -> Iterator[Served]:
    path = os.pathsep.join([str(plant), *filter(None, [os.environ.get("PYTHONPATH")])])
    with served(flags, command=("env", f"PYTHONPATH={path}", *OPENINFER)) as server:
        yield server


def wait_for_saves(server: Served) -> None:
    """Until nothing has been written for a while; what is still in the first tier alone is lost at the end."""
    last, since_s = -1.0, time.monotonic()
    while time.monotonic() - since_s < QUIET_S:
        saved = counters(server)["openinfer_kv_tier_saved_blocks_total"]
        if saved != last:
            last, since_s = saved, time.monotonic()
        time.sleep(0.1)


def scraped(server: Served, name: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return round(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)))


if __name__ == "__main__":
    sys.exit(main())
