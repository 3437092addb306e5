"""Sessions of agents in virtual time: to 142,000 tokens, next to an ideal server, and of two tenants of unlike lengths.

    python tools/agents/long_sessions.py OUT.json LABEL [PART ...]

The scheduler, the block pool and its order of eviction are the engine's (`virtual.py`); steps and loads take what those
of Qwen3-8B took on an H200 (or Qwen3.5-4B, as if it had no states). LABEL says which version was run: what OUT.json has
under others stays, so that a change can be shown before and after. TTFT has 25 ms for what is outside the engine.

    long      three sessions of 43 turns to 142,000 tokens, pool a third: TTFT by turn, hits, the scheduler's own time
    ideal     sessions of the measured runs, next to a server without mistakes that loads, then computes (`eviction.py`)
    early     sessions of the measured runs with loads before turns arrive and without (`early-loads`)
    answers   six sessions with early loads, whose answers come back as they were given, and otherwise
    notice    six sessions of 119,800 tokens in a pool of two, early loads, whose ends are seen at once, or later
    tenants   three sessions of 110,000 tokens and eight of 8,000 to 14,000, of one tenant and of two
    begin     prompts of 110,000 and 9,000 tokens that come at one time, a server's first, of one tenant and of two
"""

import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import eviction
import msgspec
from virtual import BLOCK_TOKENS, Card, Played, Session, Turn, World

from openinfer_core.provenance import provenance
from openinfer_kv_cache import KvCache, KvCacheOptions

QWEN3_8B = Card()
QWEN35_4B = Card(base_s=3.6e-3, token_s=17.6e-6, load_s=17.4e-6, save_s=17.4e-6)
SHAPES = {"qwen3-8b": (6, 34_000, 5100, QWEN3_8B), "qwen3.5-4b": (16, 28_000, 11_000, QWEN35_4B)}
SEEDS = (1, 2, 3)
FIRST_TURN = 2
NEW_TOKENS = 150


def drawn_ids() -> Iterator[int]:
    return iter(range(10, 10**9))


def turns(ids: Iterator[int], first: int, new: int, count: int, wait: Callable[[], float]) -> list[Turn]:
    def take(number: int) -> list[int]:
        return [next(ids) for _ in range(number)]

    return [Turn(take(first), 0.0), *(Turn(take(new), wait()) for _ in range(count - 1))]


def waits(draw: random.Random, mean_s: float, spread: float) -> Callable[[], float]:
    """From one length (spread 0) to exponential ones (1)."""
    return lambda: mean_s * (1 - spread) + (draw.expovariate(1 / mean_s) * spread if spread else 0.0)


def told(ttft_s: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(ttft_s, n=100, method="inclusive")
    named = {f"p{place}": round(1e3 * cuts[place - 1], 1) for place in (10, 50, 90, 99)}
    return named | {"longest": round(1e3 * max(ttft_s), 1), "turns": len(ttft_s)}


def later(played: Sequence[Played]) -> list[float]:
    return [each.ttft_s for each in played if each.turn >= FIRST_TURN]


def long() -> dict[str, Any]:
    """As `virtual.Card` has no attention, only what the engine does to a turn grows here."""
    ids = drawn_ids()
    sessions = [Session(0.01 * each, turns(ids, 3300, 3284, 43, lambda: 2.0)) for each in range(3)]
    world = World(sessions, num_blocks=9000, card=QWEN3_8B, max_model_tokens=150_000)
    played = world.run()
    rows: list[dict[str, Any]] = []
    for turn in (0, 1, 2, 5, 10, 20, 30, 42):
        some = [each for each in played if each.turn == turn]
        rows.append(
            {
                "turn": turn + 1,
                "prompt_tokens": some[0].prompt_tokens,
                "hits": round(statistics.mean(each.cached_tokens / each.prompt_tokens for each in some), 4),
                "ttft_ms": round(1e3 * statistics.median(each.ttft_s for each in some), 1),
                "scheduler_cpu_ms": round(1e3 * statistics.median(each.cpu_s for each in some), 1),
            }
        )
    stats = world.scheduler.stats()
    world.scheduler.check_integrity()
    return {"turns": rows, "preemptions": stats.preemptions, "unsaved_blocks": stats.unsaved_blocks}


def ideal() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, (sessions, first, num_blocks, card) in SHAPES.items():
        for spread in (0.0, 0.5, 1.0):
            ours, theirs, hits, most = list[float](), list[float](), list[float](), list[float]()
            for seed in SEEDS if spread else SEEDS[:1]:
                draw, ids = random.Random(seed), drawn_ids()
                wait = waits(draw, 2.0, spread)
                made = [Session(0.01 * n, turns(ids, first, NEW_TOKENS, 20, wait)) for n in range(sessions)]
                world = World(made, num_blocks=num_blocks, card=card, max_model_tokens=45_000)
                played = world.run()
                ours += later(played)
                asked = sum(each.prompt_tokens for each in played if each.turn) / BLOCK_TOKENS
                hits.append(1 - world.link.loaded_blocks / asked)
                found = ideal_of(made, num_blocks, card)
                theirs += [each for each, turn in zip(found.ttft_s, found.turns, strict=True) if turn >= FIRST_TURN]
                most.append(eviction.Optimal(found.order).hits(num_blocks))
            key = f"{name}, {sessions} sessions, waits of 2 s, spread {spread}"
            rows[key] = {
                "scheduler_ms": told(ours),
                "load_then_compute_ms": told(theirs),
                "hits": round(statistics.mean(hits), 3),
                "hits_possible": round(statistics.mean(most), 3),
            }
            print(key, rows[key], flush=True)
    return rows


def early() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, (sessions, first, num_blocks, card) in SHAPES.items():
        for spread in (0.0, 0.25, 0.5, 1.0):
            key = f"{name}, {sessions} sessions, waits of 2 s, spread {spread}"
            rows[key] = {}
            for kind, options in (("on_demand", {}), ("early", {"early-loads": "true"})):
                ttft, moved, unused = list[float](), 0, 0
                for seed in SEEDS if spread else SEEDS[:1]:
                    ids, wait = drawn_ids(), waits(random.Random(seed), 2.0, spread)
                    made = [Session(0.01 * n, turns(ids, first, NEW_TOKENS, 20, wait)) for n in range(sessions)]
                    world = World(made, num_blocks=num_blocks, card=card, max_model_tokens=45_000, options=options)
                    ttft += later(world.run())
                    moved += world.link.loaded_blocks
                    unused += world.scheduler.stats().early_unused_blocks
                rows[key][kind] = told(ttft) | {"loaded_blocks": moved, "unused_blocks": unused}
            print(key, rows[key], flush=True)
    return rows


def answers() -> dict[str, Any]:
    sessions, first, num_blocks, card = SHAPES["qwen3-8b"]
    rows: dict[str, Any] = {}
    for name, change in (("as given", False), ("otherwise", True)):
        ids = drawn_ids()
        made = [Session(0.01 * n, turns(ids, first, NEW_TOKENS, 16, lambda: 2.0)) for n in range(sessions)]
        options = {"early-loads": "true"}
        world = World(
            made, num_blocks=num_blocks, card=card, max_model_tokens=45_000, options=options, answers_change=change
        )
        row = told(later(world.run()))
        stats = world.scheduler.stats()
        rows[name] = row | {"early_blocks": stats.early_blocks, "unused_blocks": stats.early_unused_blocks}
        print(name, rows[name], flush=True)
    return rows


def notice() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for notice_ms in (0, 13, 20):
        ids = drawn_ids()
        card = Card(
            base_s=12e-3, token_s=60e-6, load_s=42.4e-6, save_s=42.4e-6, outside_s=70e-3, notice_s=notice_ms / 1e3
        )
        made = [Session(0.01 * n, turns(ids, 118_300, NEW_TOKENS, 10, lambda: 2.0)) for n in range(6)]
        options = {"early-loads": "true"}
        world = World(made, num_blocks=15_600, card=card, max_model_tokens=124_000, options=options)
        played = world.run()
        by_turn = [[each.ttft_s for each in played if each.turn == turn] for turn in range(10)]
        stats = world.scheduler.stats()
        row = rows[f"ends seen {notice_ms} ms later"] = {
            "ttft_p50_ms by turn": [round(1e3 * statistics.median(each), 1) for each in by_turn],
            "loaded_blocks": world.link.loaded_blocks,
            "early_blocks": stats.early_blocks,
            "unused_blocks": stats.early_unused_blocks,
        }
        print(notice_ms, row, flush=True)
    return rows


def ideal_of(sessions: Sequence[Session], num_blocks: int, card: Card) -> eviction.Result:
    made: list[tuple[float, list[eviction.Turn]]] = []
    ids = drawn_ids()
    for session in sessions:
        held, seen = list[int](), list[eviction.Turn]()
        for turn in session.turns:
            held += [next(ids) for _ in range(-(-len(turn.new_ids) // BLOCK_TOKENS))]
            seen.append(eviction.Turn(tuple(held), turn.wait_s))
        made.append((session.begin_s, seen))
    times = eviction.Times(
        load_s=card.load_s,
        compute_s=card.token_s * BLOCK_TOKENS,
        turn_s=card.base_s + card.outside_s,
        decode_s=card.base_s * 16,
        one_after_the_other=True,
    )
    cache = KvCache(KvCacheOptions(num_blocks=num_blocks, block_size_tokens=1))
    return eviction.Play(eviction.Workload(num_blocks, made), cache, waits_for_loads=True, times=times).run()


def tenants() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for num_blocks in (9000, 14_000):
        for names in ("aa", "ab"):
            of_long, of_short, first = list[float](), list[float](), list[float]()
            for seed in SEEDS:
                draw, ids = random.Random(seed), drawn_ids()
                made = [
                    Session(0.1 * n, turns(ids, 110_000, 300, 15, waits(draw, 4.0, 0.5)), names[0]) for n in range(3)
                ]
                made += [
                    Session(
                        0.05 * n, turns(ids, draw.randrange(8000, 14_000), 300, 31, waits(draw, 1.5, 0.5)), names[1]
                    )
                    for n in range(8)
                ]
                played = World(made, num_blocks=num_blocks, card=QWEN3_8B, max_model_tokens=150_000).run()
                of_long += later([each for each in played if each.session < 3])
                of_short += later([each for each in played if each.session >= 3])
                first += [each.ttft_s for each in played if each.turn == 0]
            key = f"{num_blocks} blocks, {len(set(names))} tenants"
            rows[key] = {"long_ms": told(of_long), "short_ms": told(of_short), "first_turns_ms": told(first)}
            print(key, rows[key], flush=True)
    return rows


def begin() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for names in ("aa", "ab"):
        ids = drawn_ids()
        made = [
            Session(0.0, turns(ids, size, 0, 1, lambda: 0.0), name)
            for size, name in zip((110_000, 9000), names, strict=True)
        ]
        played = World(made, num_blocks=14_000, card=QWEN3_8B, max_model_tokens=150_000).run()
        ttft = {each.prompt_tokens: round(1e3 * each.ttft_s, 1) for each in played}
        rows[f"{len(set(names))} tenants"] = {"ttft_ms": ttft}
        print(names, ttft, flush=True)
    return rows


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "long": long,
    "ideal": ideal,
    "early": early,
    "answers": answers,
    "notice": notice,
    "tenants": tenants,
    "begin": begin,
}


def main() -> int:
    out, label, *parts = sys.argv[1:]
    file = Path(out)
    report = json.loads(file.read_bytes()) if file.exists() else {"versions_run": {}}
    for part in parts or PARTS:
        rows = PARTS[part]()
        report["versions_run"].setdefault(label, {})[part] = rows
        print(label, part, "is written", flush=True)
        report = msgspec.to_builtins(provenance()) | {"versions_run": report["versions_run"]}
        file.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
