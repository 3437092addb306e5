"""What the sessions of a measured run would take on a server without mistakes: the run's own rates, in virtual time.

    python tools/agents/ideal.py OUT.json RESULT.json [...]

`RESULT.json` is what `tools/device/sessions.py` wrote: of its parts `alone-NEW` and `many-NEW` come the time of a turn
alone, the rate of loads and the sessions' shape. The same sessions are then played by events (`eviction.py`): a turn
that finds its prefix takes what it takes alone, prompts are computed one after the other, and so are loads.

    all in the pool     nothing is ever loaded: what turns that come at one time cost each other
    load, then compute  the pool of the run, in the pool's own order of eviction, as this engine does
    layer by layer      the same, but a turn is computed while it is loaded
    best order          the same, and what is needed last is evicted (Belady's hits, spread evenly): a bound

The last two this engine does not do. TTFT from the third turn on, as the run's own `split_ms`.
"""

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from eviction import Optimal, Play, Result, Times, Workload, cycle

from openinfer_core.provenance import provenance
from openinfer_kv_cache import KvCache, KvCacheOptions

BLOCK_TOKENS = 16
FIRST_TURN = 2
GOAL_RATIO, GOAL_MS = 1.2, 10.0


def ttft_p50_ms(found: Result) -> float:
    later = [each for each, turn in zip(found.ttft_s, found.turns, strict=True) if turn >= FIRST_TURN]
    return round(1e3 * statistics.median(later), 1)


def play(workload: Workload, num_blocks: int, times: Times) -> Result:
    cache = KvCache(KvCacheOptions(num_blocks=num_blocks, block_size_tokens=1))
    return Play(workload, cache, waits_for_loads=True, times=times).run()


def ideal(report: Mapping[str, Any], new: str) -> dict[str, Any]:
    """TTFT of each way, beside what was measured, in milliseconds."""
    alone, many = (report["parts"][f"{kind}-{new}"] for kind in ("alone", "many"))
    shape, flags = many["set_up"], report["server"]
    num_blocks = int(flags[flags.index("--num-blocks") + 1])
    alone_ms = statistics.median(row["ttft_ms"]["p50"] for row in alone["rows"][FIRST_TURN:])
    decode_s = alone["totals"]["session_s"]["p50"] - sum(row["ttft_ms"]["mean"] for row in alone["rows"]) / 1e3
    load_s = report["block_bytes"] / many["load_gb_s"] / 1e9
    added = (shape["new_tokens"] + shape["output_tokens"]) // BLOCK_TOKENS
    workload = cycle(
        shape["sessions"],
        shape["first_tokens"] // BLOCK_TOKENS,
        num_blocks,
        wait_s=shape["wait_s"],
        spread=0.0,
        turns=shape["turns"],
        new=added,
    )
    all_blocks = sum(len(turns[-1].ids) + 64 for _, turns in workload.sessions)
    # What a turn adds is in its time alone; a first turn computes all.
    first_s = alone["rows"][0]["ttft_ms"]["p50"] / 1e3
    times = {
        "load_s": load_s,
        "compute_s": first_s / (shape["first_tokens"] // BLOCK_TOKENS),
        "turn_s": alone_ms / 1e3 - added * first_s / (shape["first_tokens"] // BLOCK_TOKENS),
        "decode_s": decode_s / shape["turns"],
        "one_after_the_other": True,
    }
    pooled = play(workload, all_blocks, Times(**times))
    serial = play(workload, num_blocks, Times(**times))
    layered = play(workload, num_blocks, Times(**times, by_layer=True))
    hits = Optimal(serial.order).hits(num_blocks)
    best = play(workload, num_blocks, Times(**times | {"load_s": load_s * (1 - hits)}, by_layer=True))
    return {
        "sessions": shape["sessions"],
        "prefix_gb": round(shape["first_tokens"] // BLOCK_TOKENS * report["block_bytes"] / 1e9, 2),
        "load_gb_s": many["load_gb_s"],
        "load_ms": round(1e3 * load_s * shape["first_tokens"] / BLOCK_TOKENS, 1),
        "alone_ms": round(alone_ms, 1),
        "goal_ms": round(GOAL_RATIO * alone_ms + GOAL_MS, 1),
        "measured_ms": statistics.median(row["ttft_ms"]["p50"] for row in many["rows"][FIRST_TURN:]),
        "all in the pool": ttft_p50_ms(pooled),
        "load, then compute": ttft_p50_ms(serial),
        "layer by layer": ttft_p50_ms(layered),
        "best order": ttft_p50_ms(best),
        "hits": {"kept": round(serial.hits / max(1, serial.asked), 3), "optimal": hits},
    }


def main() -> int:
    out, *files = sys.argv[1:]
    rows: dict[str, Any] = {}
    for file in files:
        report = json.loads(Path(file).read_bytes())
        news = [part.partition("-")[2] for part in report["parts"] if part.startswith("many-")]
        for new in news:
            rows[f"{report['model']}, {new} new tokens"] = found = ideal(report, new)
            print(report["model"], new, *(f"\n   {name:20} {value}" for name, value in found.items()), flush=True)
    Path(out).write_text(json.dumps({**msgspec.to_builtins(provenance()), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
