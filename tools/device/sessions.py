"""Agents' sessions on one GPU: what a turn costs next to the same turn alone on the card, in a pool of a third.

    python3 tools/device/sessions.py qwen3-4b|qwen3-8b|qwen3.5-4b[-long|-120k[-six]]|tiny OUT COMMIT [PART ...]

    part        what is played                                                        the table's columns
    alone-NEW   one session without waits, NEW tokens a turn: all of it in the pool   the reference
    many-NEW    the sessions, pool a third of what they hold, host tier for the rest  TTFT by turn, ratio, hits
    early-NEW   the same as many-NEW, with loads before turns arrive                  `early-loads` of the scheduler
    lru-NEW     the same as many-NEW, least recently used evicted first               the order before
    check-NAME  many turns of shorter contexts again without a cache                  tokens, log-probabilities
    disk        sessions; the server ends and starts again; the same prompts          what the first turn takes

The sets of `-long` grow to 120,000 tokens in 40 turns, those of `-120k` have nearly as many from the first turn on and
end there; their pool is a third of what they hold, and the host tier holds all of it. `-120k-six` is the goal's own:
six sessions of Qwen3-8B in a pool of two. `-plain` parts ask for no more than tokens, as those of another engine's
server do (`peer_sessions.py`).
Each server has answered a large request before the parts begin (`large_s`). Weights are random (`tiny` has its own, on
the CPU: the rehearsal), prompts are token ids, and the server is asked over HTTP. Parts of one server run in the order
given; of `check`, which stands for all its names, three at a time, since nothing is timed. One whose server has a
planted error is right if the error is found.
Writes OUT/sessions-MODEL.json after each part.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from published_configs import PUBLISHED

import openinfer_tiny_model
from openinfer.models import find_family
from openinfer_bench.first_tokens import FirstToken, first_tokens, medians
from openinfer_bench.served import OPENINFER, Served, served
from openinfer_core import EngineClosed
from openinfer_core.provenance import provenance
from openinfer_engine.testing.adapters import write_adapter

PART_LIMIT_S = 270
PLACES = 5
QUIET_S, MOST_SAVES_S = 1.5, 40.0
COUNTED = (
    "openinfer_num_preemptions_total",
    "openinfer_kv_tier_unsaved_blocks_total",
    "openinfer_kv_tier_failures_total",
    "openinfer_kv_tier_saved_blocks_total",
    "openinfer_kv_tier_evicted_blocks_total",
    "openinfer_kv_tier_early_blocks_total",
    "openinfer_kv_tier_early_unused_blocks_total",
    "openinfer_spec_decode_num_accepted_tokens_total",
)
ADAPTER = "adapter"
PEAKED = "peaked"
"""Random weights of Qwen3.5-4B's shape whose next token is sure, and whose log-probabilities are not: layers add so
little to the residual that the tied head finds the last token there, four or more ahead of all others and about as
likely as all of them. Plain random weights are so flat that sums in another order change a draw in six."""
LRU = """
from openinfer_kv_cache import BlockPool

BlockPool.keeps_conversations = property(lambda self: False)
"""
PLANTS: Mapping[str, str] = {
    "lru": LRU,
    "stale-block": """
from openinfer_kv_cache import BlockSequence

find = BlockSequence._find_prefix

def find_stale(self, *args):
    found = find(self, *args)
    others = [block for block in self._pool._registry.values() if block not in found]
    return [*found[:-1], others[0]] if found and others else found

BlockSequence._find_prefix = find_stale
""",
    "state-one-row-back": """
from openinfer_engine.worker.state_slots import StateSlots

advance = StateSlots.advance

def advance_and_keep(self, plan, **options):
    advance(self, plan, **options)
    self._copy(plan.state_snapshots)

StateSlots.advance = advance_and_keep
StateSlots.keep = lambda self, plan: None
""",
    "positions-off-by-one": """
import cupy

from openinfer_kernels.cuda.sampling.steps import SlotState

prepare = SlotState.prepare_mixed

def prepare_and_shift(self, inputs):
    prepare(self, inputs)
    batch = inputs.batch
    counts = cupy.diff(batch.query_starts)
    is_cached = ((batch.context_lens > counts) & (counts > 1)).astype(cupy.int32)
    places = cupy.arange(len(batch.positions), dtype=cupy.int32)
    rows = cupy.searchsorted(batch.query_starts[1:], places, side="right")
    batch.positions[:] += is_cached[cupy.minimum(rows, len(counts) - 1)]

SlotState.prepare_mixed = prepare_and_shift
""",
    "adapter-by-name": """
from openinfer_kv_cache import PrefixHasher

root = PrefixHasher.root

def root_by_name(self, *, lora_name=None, adapter_digest=None, cache_salt=None):
    return root(self, lora_name=lora_name, cache_salt=cache_salt)

PrefixHasher.root = root_by_name
""",
    "dropped-salt": """
from openinfer_server.request import plan

plan.salt_of = lambda tenant, given: None
""",
    PEAKED: """
from openinfer_engine.weights import dummy

spread_of = dummy._spread_of

def spread_of_peaked(name, shape):
    spread = spread_of(name, shape)
    if name.endswith(".norm.weight") and ".layers." not in name:
        return spread._replace(mean=-0.4)  # of 1 + weight, before the head
    gains = {"o_proj": 0.0047, "out_proj": 0.0047, "down_proj": 0.0012}
    return spread._replace(deviation=spread.deviation * gains.get(name.split(".")[-2], 1.0))

dummy._spread_of = spread_of_peaked
""",
}
"""Changes of a server, each the `sitecustomize.py` of its processes: an order of eviction, weights, and errors, of
which the first is for models without states."""
GOAL_RATIO, GOAL_MS = 1.2, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of sessions; `wait_s` is a tool's, and none where one session is alone."""

    sessions: int
    turns: int
    first_tokens: int
    new_tokens: int
    output_tokens: int = 16
    wait_s: float = 1.0
    is_plain: bool = False
    """Whether requests ask for no log-probabilities and no token ids, so that servers of others do the same work."""

    @property
    def flags(self) -> list[str]:
        named = {name.replace("_", "-"): value for name, value in asdict(self).items() if name != "is_plain"}
        flags = [text for name, value in named.items() for text in (f"--{name}", str(value))]
        return [*flags, "--agents-share", "0", *(["--plain"] if self.is_plain else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Sessions of which some turns are asked again; `planted` is an error that must be found."""

    shape: Shape
    turns: int
    flags: Sequence[str]
    """The server's, after those of its model; `{folder}` in them is a scratch folder."""
    planted: str | None = None
    is_peaked: bool = False
    """Whether its weights make distributions that are not flat (`PEAKED`)."""
    has_adapter: bool = False
    restarts: bool = False
    """Whether the sessions are played by one server first, and checked by the next one, which begins on its tiers."""
    is_other_adapter: bool = False
    """Whether the first of the two has another adapter of the same name."""

    @property
    def held_tokens(self) -> int:
        """By all sessions at their ends."""
        shape = self.shape
        return shape.sessions * (shape.first_tokens + shape.turns * (shape.new_tokens + shape.output_tokens))

    @property
    def longest_tokens(self) -> int:
        return self.held_tokens // self.shape.sessions + 64

    @property
    def num_blocks(self) -> int:
        """A third of what they hold, but the longest at least; all of it where an error must meet a cached prefix."""
        part = 48 if self.planted is None else 16
        return max(self.longest_tokens // 16 + 2, self.held_tokens // part + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """Of a model: what is played by the name of the part, and the server's flags."""

    many: Mapping[str, Shape]
    checks: Mapping[str, Check]
    disk: Shape
    num_blocks: int
    """About a third of what the sessions of `many` hold at their ends."""
    host: str
    flags: Sequence[str]
    block_bytes: int
    """Of KV."""
    disk_size: str = "30GiB"
    num_token_ids: int = 150_000
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


DISK = ("--kv-tier", "disk={folder}/kv,16GiB", "--kv-load-timeout-ms", "20000")
INVARIANT, HOST = ("--batch-invariant", "true"), ("--kv-tier", "host=8GiB")
NGRAM, FP8 = ("--speculative", "ngram,k=4"), ("--kv-cache-dtype", "fp8")
EARLY = ("--scheduler-option", "early-loads=true")
CUDA = ("--device", "cuda", "--load-format", "dummy", "--grammar-compiler", "none", "--max-num-seqs", "32")
SOME_STATES = ("--state-snapshot-bytes", str(2 << 30))
SERVERS: Sequence[tuple[str, str | None, tuple[str, ...]]] = (
    ("early", None, EARLY),
    ("lru", "lru", ()),
    ("many", None, ()),
)
"""Kinds of parts that one server plays, its planted change, and its flags. The first server plays `alone`, too, for
which these say nothing."""
CHECKED = Shape(sessions=8, turns=12, first_tokens=600, new_tokens=400, output_tokens=24, wait_s=0.0)
LONGER = replace(CHECKED, output_tokens=64)
"""Rows of which some are preempted."""
WAITING = replace(CHECKED, wait_s=0.4)
"""So that something can be loaded before a turn arrives."""
BRIEF = replace(CHECKED, sessions=4, turns=4)
PLAIN = Shape(sessions=6, turns=16, first_tokens=30_000, new_tokens=150, wait_s=2.0, is_plain=True)
TINY = Shape(sessions=3, turns=4, first_tokens=100, new_tokens=40, output_tokens=8, wait_s=0.0)


def long_set_up(sessions: int, **fields: Any) -> SetUp:
    """The goal's own shape: so many sessions that grow to 120,000 tokens."""
    return SetUp(
        many={"3000": Shape(sessions=sessions, turns=40, first_tokens=3_000, new_tokens=2_984, wait_s=2.0)},
        checks={},
        disk=Shape(sessions=3, turns=2, first_tokens=118_000, new_tokens=3_000, wait_s=0.0),
        disk_size="56GiB",
        **fields,
    )


SET_UPS: Mapping[str, SetUp] = {
    "qwen3-8b": SetUp(
        many={
            "3000": Shape(sessions=6, turns=14, first_tokens=3_000, new_tokens=3_000, wait_s=2.0),
            "150": Shape(sessions=6, turns=8, first_tokens=34_000, new_tokens=150, wait_s=2.0),
            "150x16": Shape(sessions=6, turns=16, first_tokens=30_000, new_tokens=150, wait_s=2.0),
            "150x16-plain": PLAIN,
            "150x40": Shape(sessions=6, turns=40, first_tokens=30_000, new_tokens=150, wait_s=2.0),
        },
        checks={
            "invariant-ngram-fp8": Check(shape=CHECKED, turns=20, flags=(*HOST, *INVARIANT, *NGRAM, *FP8)),
            "invariant-lora-ngram": Check(shape=CHECKED, turns=40, flags=(*HOST, *INVARIANT, *NGRAM), has_adapter=True),
            "invariant-early": Check(shape=WAITING, turns=40, flags=(*HOST, *INVARIANT, *EARLY)),
            "stale-block": Check(shape=BRIEF, turns=8, flags=(), planted="stale-block"),
            "other-batches": Check(shape=CHECKED, turns=40, flags=HOST),
            "other-batches-fp8": Check(shape=CHECKED, turns=40, flags=(*HOST, *FP8)),
        },
        disk=Shape(sessions=3, turns=2, first_tokens=16_000, new_tokens=150, wait_s=0.0),
        num_blocks=5_100,
        host="host=36GiB",
        block_bytes=16 * 36 * 2 * 8 * 128 * 2,
        flags=(*CUDA, "--max-model-tokens", "45000"),
        config={"max_position_embeddings": 131_072},
    ),
    "qwen3-4b": SetUp(
        many={"150x16-plain": PLAIN},
        checks={},
        disk=Shape(sessions=3, turns=2, first_tokens=16_000, new_tokens=150, wait_s=0.0),
        num_blocks=5_100,
        host="host=36GiB",
        block_bytes=16 * 36 * 2 * 8 * 128 * 2,
        flags=(*CUDA, "--max-model-tokens", "45000"),
        config={"max_position_embeddings": 131_072},
    ),
    "qwen3.5-4b": SetUp(
        many={
            "3000": Shape(sessions=16, turns=11, first_tokens=3_000, new_tokens=3_000, wait_s=2.0),
            "150": Shape(sessions=16, turns=10, first_tokens=28_000, new_tokens=150, wait_s=2.0),
            "150x16": Shape(sessions=16, turns=16, first_tokens=26_000, new_tokens=150, wait_s=2.0),
            "150x40": Shape(sessions=16, turns=40, first_tokens=26_000, new_tokens=150, wait_s=2.0),
        },
        checks={
            "host": Check(shape=CHECKED, turns=34, flags=(*HOST, *INVARIANT, *SOME_STATES)),
            "host-ngram": Check(shape=LONGER, turns=34, flags=(*HOST, *INVARIANT, *SOME_STATES, *NGRAM)),
            "disk-restarted": Check(shape=CHECKED, turns=34, flags=(*DISK, *INVARIANT, *SOME_STATES), restarts=True),
            "host-lora-ngram": Check(
                shape=CHECKED, turns=34, flags=(*HOST, *INVARIANT, *SOME_STATES, *NGRAM), has_adapter=True
            ),
            "host-early": Check(shape=WAITING, turns=34, flags=(*HOST, *INVARIANT, *SOME_STATES, *EARLY)),
            "host-fp8": Check(shape=CHECKED, turns=34, flags=(*HOST, *INVARIANT, *SOME_STATES, *FP8)),
            "other-batches": Check(shape=CHECKED, turns=88, flags=(*HOST, *SOME_STATES), is_peaked=True),
            "state-one-row-back": Check(
                shape=BRIEF, turns=8, flags=(*INVARIANT, *SOME_STATES), planted="state-one-row-back"
            ),
            "dropped-salt": Check(shape=BRIEF, turns=8, flags=(*INVARIANT, *SOME_STATES), planted="dropped-salt"),
            # Without graphs: what is replayed runs nothing of Python.
            "positions-off-by-one": Check(
                shape=BRIEF,
                turns=8,
                flags=(*INVARIANT, *SOME_STATES, "--cuda-graph", "false"),
                planted="positions-off-by-one",
            ),
            "adapter-by-name": Check(
                shape=BRIEF,
                turns=8,
                flags=(*DISK, *INVARIANT, *SOME_STATES),
                planted="adapter-by-name",
                has_adapter=True,
                restarts=True,
                is_other_adapter=True,
            ),
        },
        disk=Shape(sessions=3, turns=2, first_tokens=26_000, new_tokens=150, wait_s=0.0),
        num_blocks=11_000,
        host="host=40GiB",
        block_bytes=16 * 8 * 2 * 4 * 256 * 2,
        flags=(*CUDA, "--max-model-tokens", "45000", "--state-snapshot-bytes", str(6 << 30)),
    ),
    "qwen3-8b-long": long_set_up(
        6,
        num_blocks=15_000,
        host="host=101GiB",
        block_bytes=16 * 36 * 2 * 8 * 128 * 2,
        flags=(*CUDA, "--max-model-tokens", "124000"),
        config={"max_position_embeddings": 131_072},
    ),
    "qwen3.5-4b-long": long_set_up(
        16,
        num_blocks=40_000,
        host="host=80GiB",
        block_bytes=16 * 8 * 2 * 4 * 256 * 2,
        flags=(*CUDA, "--max-model-tokens", "124000", "--state-snapshot-bytes", str(6 << 30)),
    ),
    "qwen3-8b-120k": SetUp(
        many={"150": Shape(sessions=3, turns=10, first_tokens=118_300, new_tokens=150, wait_s=2.0)},
        checks={},
        disk=Shape(sessions=1, turns=2, first_tokens=118_300, new_tokens=150, wait_s=0.0),
        num_blocks=7_800,
        host="host=54GiB",
        block_bytes=16 * 36 * 2 * 8 * 128 * 2,
        flags=(*CUDA, "--max-model-tokens", "124000"),
        config={"max_position_embeddings": 131_072},
    ),
    "qwen3-8b-120k-six": SetUp(
        many={"150": Shape(sessions=6, turns=8, first_tokens=118_300, new_tokens=150, wait_s=2.0)},
        checks={},
        disk=Shape(sessions=3, turns=2, first_tokens=118_300, new_tokens=150, wait_s=0.0),
        disk_size="56GiB",
        num_blocks=15_600,
        host="host=100GiB",
        block_bytes=16 * 36 * 2 * 8 * 128 * 2,
        flags=(*CUDA, "--max-model-tokens", "124000"),
        config={"max_position_embeddings": 131_072},
    ),
    "qwen3.5-4b-120k": SetUp(
        many={"150": Shape(sessions=4, turns=10, first_tokens=118_300, new_tokens=150, wait_s=2.0)},
        checks={},
        disk=Shape(sessions=1, turns=2, first_tokens=118_300, new_tokens=150, wait_s=0.0),
        num_blocks=10_300,
        host="host=24GiB",
        block_bytes=16 * 8 * 2 * 4 * 256 * 2,
        flags=(*CUDA, "--max-model-tokens", "124000", "--state-snapshot-bytes", str(4 << 30)),
    ),
    "tiny": SetUp(
        many={
            "60": Shape(sessions=3, turns=4, first_tokens=60, new_tokens=60, wait_s=0.05),
            "10": Shape(sessions=3, turns=4, first_tokens=200, new_tokens=10, wait_s=0.05),
        },
        checks={
            "host": Check(shape=TINY, turns=6, flags=("--kv-tier", "host=64MiB", *INVARIANT)),
            "host-early": Check(
                shape=replace(TINY, wait_s=0.1), turns=6, flags=("--kv-tier", "host=64MiB", *INVARIANT, *EARLY)
            ),
            "lora-ngram": Check(
                shape=TINY, turns=6, flags=("--kv-tier", "host=64MiB", *INVARIANT, *NGRAM), has_adapter=True
            ),
            "stale-block": Check(shape=TINY, turns=6, flags=INVARIANT, planted="stale-block"),
            "adapter-by-name": Check(
                shape=TINY,
                turns=6,
                flags=(*DISK, *INVARIANT),
                planted="adapter-by-name",
                has_adapter=True,
                restarts=True,
                is_other_adapter=True,
            ),
            "disk-restarted": Check(shape=TINY, turns=6, flags=(*DISK, *INVARIANT), restarts=True),
            "other-batches": Check(shape=TINY, turns=6, flags=HOST),
        },
        disk=Shape(sessions=2, turns=2, first_tokens=200, new_tokens=10, wait_s=0.0),
        num_blocks=26,
        host="host=64MiB",
        block_bytes=16 * 8 * 2 * 2 * 32 * 4,
        flags=("--device", "cpu", "--max-num-seqs", "8"),
        num_token_ids=2_000,
    ),
}


class Runner:
    """Plays parts, and keeps what was measured."""

    def __init__(self, model: str, folder: Path, out: Path, commit: str) -> None:
        self.set_up, self._model, self._folder, self._commit = SET_UPS[model], model, folder, commit
        self._file = out / f"sessions-{model}.json"
        self.found: dict[str, Any] = {}
        self._large_s: list[float] = []  # of each server
        self._noting = threading.Lock()

    def run(self, parts: Sequence[str]) -> None:
        alone = [part for part in parts if part.startswith("alone-")]
        for kind, planted_name, flags in SERVERS:
            of_kind = [part for part in parts if part.startswith(f"{kind}-")]
            if of_kind or (alone and kind == SERVERS[-1][0]):
                self._play_many([*alone, *of_kind], planted_name, flags)
                alone = []
        with ThreadPoolExecutor(PLACES) as places:
            names = [name for name in self.set_up.checks if {"check", f"check-{name}"} & set(parts)]
            list(places.map(self._check, names))
        if "disk" in parts:
            self._disk()

    def _check(self, name: str) -> None:
        try:
            self._check_on_servers(name)
        except EngineClosed as error:  # the others' answers count nevertheless
            self._note(f"check-{name}", {"failed": str(error)})

    def _check_on_servers(self, name: str) -> None:
        check = self.set_up.checks[name]
        sample = ["--check", str(check.turns), *(["--tolerance", "0"] if set(INVARIANT) <= set(check.flags) else [])]
        flags = ["--num-blocks", str(check.num_blocks), "--max-model-tokens", str(check.longest_tokens), *check.flags]
        with tempfile.TemporaryDirectory(prefix="sessions-check-") as folder:
            flags = [flag.format(folder=folder) for flag in flags]
            lora, other = (self._lora(check, Path(folder), seed) for seed in range(2))
            changes = [*filter(None, [check.planted]), *([PEAKED] if check.is_peaked else [])]
            command = planted(changes, Path(folder)) if changes else OPENINFER
            model = ADAPTER if check.has_adapter else "m"
            if check.restarts:
                with self._server(*flags, *(other if check.is_other_adapter else lora), command=command) as server:
                    self._play(server, check.shape, f"check-{name}", model=model)
                    self._wait_for_saves(server)
            with self._server(*flags, *lora, command=command) as server:
                found = self._play(server, check.shape, f"check-{name}", *sample, model=model)
        self._note(f"check-{name}", found | {"flags": flags, "planted": check.planted, **right(check, found)})

    def _lora(self, check: Check, scratch: Path, seed: int) -> Sequence[str]:
        """Flags of an adapter, whose name is the same for every seed."""
        if not check.has_adapter:
            return ()
        family, _ = find_family(self._folder)
        config = json.loads((self._folder / "config.json").read_bytes())
        write_adapter(scratch / f"{seed}", family.definition, config, rank=16, seed=seed)
        return ("--lora", f"{ADAPTER}={scratch / str(seed)}")

    def _play_many(self, parts: Sequence[str], planted_name: str | None, further: Sequence[str]) -> None:
        flags = ("--num-blocks", str(self.set_up.num_blocks), "--kv-tier", self.set_up.host, *further)
        with tempfile.TemporaryDirectory(prefix="sessions-order-") as folder:
            command = OPENINFER if planted_name is None else planted([planted_name], Path(folder))
            trace = Path(folder) / "trace.json"
            with self._server(*flags, "--trace", str(trace), command=command) as server:
                for part in parts:
                    self._note(part, self._many(server, part))
            self._note_split(parts, trace)

    def _note_split(self, parts: Sequence[str], trace: Path) -> None:
        """Where the time to the first token went, of the turns from the third on, where there are so many: before it
        prompts are computed.
        """
        found = first_tokens(json.loads(trace.read_bytes())["traceEvents"])
        for part in parts:
            rows = self.found[part].get("rows", ())
            begin_us, end_us = (1e6 * at_s for at_s in self.found[part].get("window_s", (0, 0)))  # of the same clock
            mine = [each for each in found if begin_us <= each.submitted_us < end_us]
            least = rows[2]["prompt_tokens"] if len(rows) > 2 else 0
            later = [each for each in mine if each.prompt_tokens >= least]
            self.found[part]["split_ms"] = medians(later)
            for name in ("loaded", "in the pool"):
                some = [each for each in later if bool(each.loaded_blocks) == (name == "loaded")]
                self.found[part][f"split_ms, {name}"] = medians(some)
            self.found[part]["load_gb_s"] = round(self._rate(later), 1)
            told = {key: value for key, value in self.found[part].items() if key.startswith(("split", "load_gb"))}
            print(
                f"== {part}, from the third turn if there is one",
                *(f"   {key} {value}" for key, value in told.items()),
                sep="\n",
            )
        self._save()

    def _rate(self, found: Sequence[FirstToken]) -> float:
        """Of loads from tiers, in GB/s, their own time alone."""
        seconds = sum(each.load_ms for each in found) / 1e3
        return self.set_up.block_bytes * sum(each.loaded_blocks for each in found) / 1e9 / seconds if seconds else 0.0

    def _many(self, server: Served, part: str) -> dict[str, Any]:
        kind, _, new = part.partition("-")
        shape = self.set_up.many[new]
        return self._play(server, shape if kind != "alone" else replace(shape, sessions=1, wait_s=0.0), part)

    def _disk(self) -> None:
        with tempfile.TemporaryDirectory(prefix="sessions-kv-") as folder:
            tier = ("--kv-tier", f"disk={folder}/kv,{self.set_up.disk_size}", "--kv-load-timeout-ms", "20000")
            with self._server(*tier) as server:
                self._note("disk-before", self._play(server, self.set_up.disk, "disk"))
                waited_s = self._wait_for_saves(server)
            trace = Path(folder) / "trace.json"
            with self._server(*tier, "--trace", str(trace)) as server:
                self._note("disk-after", self._play(server, self.set_up.disk, "disk") | {"saves_s": waited_s})
            self._note_split(["disk-after"], trace)

    def _wait_for_saves(self, server: Served) -> float:
        """Seconds until the tier is given nothing more."""
        began_s = time.monotonic()
        last, same_since_s = -1.0, began_s
        while time.monotonic() - same_since_s < QUIET_S and time.monotonic() - began_s < MOST_SAVES_S:
            saved = counters(server)["openinfer_kv_tier_saved_blocks_total"]
            if saved != last:
                last, same_since_s = saved, time.monotonic()
            time.sleep(0.1)
        return round(same_since_s - began_s, 2)

    @contextlib.contextmanager
    def _server(self, *flags: str, command: Sequence[str] = OPENINFER) -> Iterator[Served]:
        common = ("--model", str(self._folder), "--model-name", "m", "--log-level", "warning")
        of_model = without([*self.set_up.flags], {flag for flag in flags if flag.startswith("--")})
        with served([*common, *of_model, *flags], command=command) as server:
            self._large_s.append(large_s := round(ask_largely(server.port), 2))
            print(f"-- ready after {server.ready_s:.1f} s, large {large_s} s later: {' '.join(flags)}", flush=True)
            yield server

    def _play(self, server: Served, shape: Shape, salt: str, *flags: str, model: str = "m") -> dict[str, Any]:
        began_s, before = time.monotonic(), counters(server)
        asked = ("--served-model", model, "--commit", self._commit, "--salt", salt)
        found = played(server.port, shape, *asked, "--num-token-ids", str(self.set_up.num_token_ids), *flags)
        if "failed" in found:
            return found
        return found | {
            "wall_s": round(time.monotonic() - began_s, 1),
            "window_s": (began_s, time.monotonic()),
            "counters": {name: value - before[name] for name, value in counters(server).items()},
        }

    def _note(self, part: str, found: dict[str, Any]) -> None:
        with self._noting:
            self._write(part, found)

    def _write(self, part: str, found: dict[str, Any]) -> None:
        self.found[part] = found
        self._save()
        lines = [f"== {part}, {found.get('wall_s', 0)} s", *found.get("said", [found.get("failed")])]
        print(*lines, found.get("counters"), found.get("verdicts"), found.get("draws"), sep="\n", flush=True)

    def _save(self) -> None:
        report = {
            **msgspec.to_builtins(provenance(commit=self._commit)),
            "model": self._model,
            "block_bytes": self.set_up.block_bytes,
            "server": [*self.set_up.flags, "--num-blocks", str(self.set_up.num_blocks), "--kv-tier", self.set_up.host],
            "large_s": self._large_s,
            "parts": self.found,
            "by_turn": self.by_turn(),
        }
        self._file.write_text(json.dumps(report, indent=1) + "\n")

    def by_turn(self) -> dict[str, list[dict[str, Any]]]:
        return by_turn(self.found, self.set_up.many)


def played(port: int, shape: Shape, *flags: str) -> dict[str, Any]:
    """What `openinfer bench sessions` found at a server of this machine; `failed` alone if it has no report."""
    with tempfile.TemporaryDirectory(prefix="sessions-") as folder:
        report = Path(folder) / "report.json"
        command = [*OPENINFER, "bench", "sessions", "--url", f"http://127.0.0.1:{port}", "--json", str(report)]
        command += [*shape.flags, *flags]
        done = subprocess.run(command, timeout=PART_LIMIT_S, capture_output=True, text=True, check=False)
        if not report.exists():
            return {"failed": (done.stdout + done.stderr)[-2000:]}
        found = json.loads(report.read_bytes())
    kept = {name: found[name] for name in ("set_up", "rows", "totals", "checked")}
    return kept | {"said": done.stdout.splitlines()[-8:]}


def by_turn(found: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Of `alone` and each of `many` and `early`: TTFT p50 by turn, and whether it is within the goal.

    Args:
        found: of each part.
        names: of the shapes, as parts have them.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    for new in names:
        for kind in ("many", "early"):
            alone, many = (found.get(f"{each}-{new}", {}).get("rows", ()) for each in ("alone", kind))
            pairs = zip(alone, many, strict=False)
            tables[f"{kind}-{new}"] = [compared(*pair) for pair in pairs if all(map(has_time, pair))]
    return {new: rows for new, rows in tables.items() if rows}


def ask_largely(port: int) -> float:
    """Seconds of a first large request, with few tokens: the process that takes these is there then.

    It is started with the server, and a first turn that waited for it would not be the engine's.
    """
    began_s = time.monotonic()
    body = json.dumps({"model": "m", "prompt": [1, 2, 3], "max_tokens": 1}).encode() + b" " * 2**15
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked) as response:
        response.read()
    return time.monotonic() - began_s


def planted(names: Sequence[str], scratch: Path) -> Sequence[str]:
    """The command of a server whose processes have these changes."""
    (scratch / "sitecustomize.py").write_text("".join(PLANTS[name] for name in names))
    path = os.pathsep.join([str(scratch), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ("env", f"PYTHONPATH={path}", *OPENINFER)


def without(flags: Sequence[str], names: set[str]) -> list[str]:
    """Pairs of flag and value, but those of some names."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return [text for name, value in pairs if name not in names for text in (name, value)]


def right(check: Check, found: Mapping[str, Any]) -> dict[str, Any]:
    """Verdicts by name; `failed` where turns differ, or where a planted error was not found."""
    checked = found.get("checked", ())
    verdicts = Counter(each["verdict"] for each in checked)
    told: dict[str, Any] = {"verdicts": dict(verdicts), "draws": draws(checked, check.shape.output_tokens)}
    differ = verdicts["different"] + verdicts["unanswered"]
    if check.planted is not None and not verdicts["different"]:
        told["failed"] = f"the planted error {check.planted} was not found"
    elif check.planted is None and (differ or verdicts["tie"] * 100 > verdicts.total()):
        told["failed"] = f"{differ} turns differ"
    return told


def draws(checked: Sequence[Mapping[str, Any]], output_tokens: int) -> dict[str, float]:
    """Tokens that were drawn after equal ones in both runs, up to the first that differs, and how many differ."""
    differ = [each["position"] for each in checked if each["verdict"] in ("tie", "different")]
    same = sum(each["verdict"] == "same" for each in checked)
    compared = sum(position + 1 for position in differ if position is not None) + same * output_tokens
    share = len(differ) / compared if compared else 0.0
    return {"compared": compared, "differ": len(differ), "share": round(share, 5)}


def counters(server: Served) -> dict[str, float]:
    """Sums over the labels of what may go wrong without a request's failing."""
    found = sums(server.port)
    return {name: found.get(name, 0.0) for name in COUNTED}


def sums(port: int) -> dict[str, float]:
    """What a server's `/metrics` says by name, over all labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
    found: defaultdict[str, float] = defaultdict(float)
    for line in filter(None, lines):
        labelled, _, value = line.rpartition(" ")
        found[labelled.partition("{")[0]] += float(value)
    return found


def has_time(row: Mapping[str, Any]) -> bool:
    return bool(row["ttft_ms"])


def compared(alone: Mapping[str, Any], many: Mapping[str, Any]) -> dict[str, Any]:
    own_ms, ms = alone["ttft_ms"]["p50"], many["ttft_ms"]["p50"]
    return {
        "turn": many["turn"],
        "prompt_tokens": many["prompt_tokens"],
        "alone_ms": own_ms,
        "ttft_p50_ms": ms,
        "ttft_p99_ms": many["ttft_ms"]["p99"],
        "ratio": round(ms / own_ms, 2),
        "within_goal": ms <= GOAL_RATIO * own_ms + GOAL_MS,
        "hits_of_allowed": round(many["hit_rate"] / many["allowed_rate"], 4) if many["allowed_rate"] else None,
        "alone_hit_rate": alone["hit_rate"],
    }


def write_model(folder: Path, config: Mapping[str, Any]) -> None:
    """A config with the tiny model's tokenizer, whose vocabulary is filled up to the config's size."""
    source = openinfer_tiny_model.model_dir()
    tokenizer = json.loads((source / "tokenizer.json").read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary.update({f"<unused{i}>": i for i in range(config["vocab_size"]) if i not in taken})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config))


def main() -> int:
    model, out, commit, *parts = sys.argv[1:]
    set_up = SET_UPS[model]
    every = [f"{kind}-{new}" for new in set_up.many for kind in ("alone", "many", "early", "lru")] + ["check", "disk"]
    every += [f"check-{name}" for name in set_up.checks]
    if unknown := set(parts) - set(every):
        sys.exit(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    Path(out).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sessions-model-") as made:
        folder = Path(made)
        if model == "tiny":
            folder = openinfer_tiny_model.model_dir()
        else:
            published = PUBLISHED[model.removesuffix("-long").removesuffix("-six").removesuffix("-120k")]
            write_model(folder, {**published, **set_up.config})
        runner = Runner(model, folder, Path(out), commit)
        try:
            runner.run(parts or every)
        finally:
            show(runner.by_turn())
    return 1 if any("failed" in found for found in runner.found.values()) else 0


def show(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    for new, rows in tables.items():
        good = sum(row["within_goal"] for row in rows[1:])
        print(f"{new}: {good} of {len(rows) - 1} turns after the first within {GOAL_RATIO} x + {GOAL_MS} ms")
        for row in rows if len(rows) < 16 else [*rows[:4], *rows[4::6]]:
            print("  ", *(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    sys.exit(main())
