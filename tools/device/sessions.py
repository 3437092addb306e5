"""Agents' sessions on one GPU: what a turn costs next to the same turn alone on the card, in a pool of a third.

    python3 tools/device/sessions.py qwen3-8b|qwen3.5-4b|tiny OUT COMMIT [PART ...]

    part        what is played                                                        the table's columns
    alone-NEW   one session without waits, NEW tokens a turn: all of it in the pool   the reference
    many-NEW    the sessions, pool a third of what they hold, host tier for the rest  TTFT by turn, ratio, hits
    check       many turns of shorter contexts again without a cache                  tokens, log-probabilities
    disk        sessions; the server ends and starts again; the same prompts          what the first turn takes

Weights are random (`tiny` has its own, on the CPU: the rehearsal), prompts are token ids, and the server is asked over
HTTP. Parts of one server run in the order given. Writes OUT/sessions-MODEL.json after each part.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from published_configs import PUBLISHED

import openinfer_tiny_model
from openinfer_bench.served import OPENINFER, Served, served
from openinfer_core.provenance import provenance

PART_LIMIT_S = 150
QUIET_S, MOST_SAVES_S = 1.5, 40.0
COUNTED = (
    "openinfer_num_preemptions_total",
    "openinfer_kv_tier_unsaved_blocks_total",
    "openinfer_kv_tier_failures_total",
    "openinfer_kv_tier_saved_blocks_total",
    "openinfer_kv_tier_evicted_blocks_total",
)
GOAL_RATIO, GOAL_MS = 1.2, 10.0
GOAL_HITS = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of sessions; `wait_s` is a tool's, and none where one session is alone."""

    sessions: int
    turns: int
    first_tokens: int
    new_tokens: int
    output_tokens: int = 16
    wait_s: float = 1.0

    @property
    def flags(self) -> list[str]:
        named = {name.replace("_", "-"): value for name, value in asdict(self).items()}
        return [text for name, value in named.items() for text in (f"--{name}", str(value))] + ["--agents-share", "0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """Of a model: what is played by the name of the part, and the server's flags."""

    many: Mapping[str, Shape]
    check: Shape
    checked_turns: int
    disk: Shape
    num_blocks: int
    """About a third of what the sessions of `many` hold at their ends."""
    host: str
    flags: Sequence[str]
    check_flags: Sequence[str] = ()
    least_blocks: int = 2_900
    """Of a pool: `--max-model-tokens` fit."""
    num_token_ids: int = 150_000
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


CUDA = ("--device", "cuda", "--load-format", "dummy", "--grammar-compiler", "none", "--max-num-seqs", "32")
SET_UPS: Mapping[str, SetUp] = {
    "qwen3-8b": SetUp(
        many={
            "3000": Shape(sessions=6, turns=14, first_tokens=3_000, new_tokens=3_000, wait_s=2.0),
            "150": Shape(sessions=6, turns=40, first_tokens=34_000, new_tokens=150, wait_s=0.5),
        },
        check=Shape(sessions=6, turns=10, first_tokens=1_000, new_tokens=500, output_tokens=24, wait_s=0.0),
        checked_turns=30,
        disk=Shape(sessions=3, turns=2, first_tokens=16_000, new_tokens=150, wait_s=0.0),
        num_blocks=5_100,
        host="host=36GiB",
        flags=(*CUDA, "--max-model-tokens", "45000"),
        config={"max_position_embeddings": 131_072},
    ),
    "qwen3.5-4b": SetUp(
        many={
            "3000": Shape(sessions=16, turns=11, first_tokens=3_000, new_tokens=3_000, wait_s=2.0),
            "150": Shape(sessions=16, turns=24, first_tokens=28_000, new_tokens=150, wait_s=1.0),
        },
        check=Shape(sessions=8, turns=12, first_tokens=600, new_tokens=400, output_tokens=8, wait_s=0.0),
        checked_turns=80,
        disk=Shape(sessions=3, turns=2, first_tokens=26_000, new_tokens=150, wait_s=0.0),
        num_blocks=11_000,
        host="host=40GiB",
        check_flags=("--batch-invariant", "true"),
        flags=(*CUDA, "--max-model-tokens", "45000", "--state-snapshot-bytes", str(6 << 30)),
    ),
    "tiny": SetUp(
        many={
            "60": Shape(sessions=3, turns=4, first_tokens=60, new_tokens=60, wait_s=0.05),
            "10": Shape(sessions=3, turns=4, first_tokens=200, new_tokens=10, wait_s=0.05),
        },
        check=Shape(sessions=3, turns=4, first_tokens=100, new_tokens=40, output_tokens=8, wait_s=0.0),
        checked_turns=6,
        disk=Shape(sessions=2, turns=2, first_tokens=200, new_tokens=10, wait_s=0.0),
        num_blocks=26,
        least_blocks=26,
        host="host=64MiB",
        flags=("--device", "cpu", "--max-num-seqs", "8"),
        check_flags=("--batch-invariant", "true"),
        num_token_ids=2_000,
    ),
}


class Runner:
    """Plays parts, and keeps what was measured."""

    def __init__(self, model: str, folder: Path, out: Path, commit: str) -> None:
        self.set_up, self._model, self._folder, self._commit = SET_UPS[model], model, folder, commit
        self._file = out / f"sessions-{model}.json"
        self.found: dict[str, Any] = {}

    def run(self, parts: Sequence[str]) -> None:
        of_many = [part for part in parts if part.partition("-")[0] in ("alone", "many")]
        if of_many:
            with self._server("--num-blocks", str(self.set_up.num_blocks), "--kv-tier", self.set_up.host) as server:
                for part in of_many:
                    self._note(part, self._many(server, part))
        if "check" in parts:
            with self._server(*self.set_up.check_flags, "--kv-tier", "host=8GiB", *self._small()) as server:
                sample = ["--check", str(self.set_up.checked_turns)]
                if self.set_up.check_flags:
                    sample += ["--tolerance", "0"]
                self._note("check", self._play(server, self.set_up.check, "check", *sample))
        if "disk" in parts:
            self._disk()

    def _small(self) -> list[str]:
        """A pool of a third for the sessions that are checked, too, but for one context at least."""
        shape = self.set_up.check
        held = shape.sessions * (shape.first_tokens + shape.turns * (shape.new_tokens + shape.output_tokens))
        return ["--num-blocks", str(max(self.set_up.least_blocks, held // 48))]

    def _many(self, server: Served, part: str) -> dict[str, Any]:
        kind, _, new = part.partition("-")
        shape = self.set_up.many[new]
        return self._play(server, shape if kind == "many" else replace(shape, sessions=1, wait_s=0.0), part)

    def _disk(self) -> None:
        with tempfile.TemporaryDirectory(prefix="sessions-kv-") as folder:
            tier = ("--kv-tier", f"disk={folder},30GiB", "--kv-load-timeout-ms", "20000")
            with self._server(*tier) as server:
                self._note("disk-before", self._play(server, self.set_up.disk, "disk"))
                waited_s = self._wait_for_saves(server)
            with self._server(*tier) as server:
                self._note("disk-after", self._play(server, self.set_up.disk, "disk") | {"saves_s": waited_s})

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
    def _server(self, *flags: str) -> Iterator[Served]:
        common = ("--model", str(self._folder), "--model-name", "m", "--log-level", "warning")
        with served([*common, *self.set_up.flags, *flags]) as server:
            print(f"-- ready after {server.ready_s:.1f} s: {' '.join(flags)}", flush=True)
            yield server

    def _play(self, server: Served, shape: Shape, salt: str, *flags: str) -> dict[str, Any]:
        began_s, before = time.monotonic(), counters(server)
        with tempfile.TemporaryDirectory(prefix="sessions-") as folder:
            report = Path(folder) / "report.json"
            command = [*OPENINFER, "bench", "sessions", "--url", f"http://127.0.0.1:{server.port}"]
            command += ["--served-model", "m", "--json", str(report), "--commit", self._commit, "--salt", salt]
            command += ["--num-token-ids", str(self.set_up.num_token_ids), *shape.flags, *flags]
            done = subprocess.run(command, timeout=PART_LIMIT_S, capture_output=True, text=True, check=False)
            if not report.exists():
                return {"failed": (done.stdout + done.stderr)[-2000:]}
            found = json.loads(report.read_bytes())
        return {name: found[name] for name in ("set_up", "rows", "totals", "checked")} | {
            "wall_s": round(time.monotonic() - began_s, 1),
            "counters": {name: value - before[name] for name, value in counters(server).items()},
            "said": done.stdout.splitlines()[-8:],
        }

    def _note(self, part: str, found: dict[str, Any]) -> None:
        self.found[part] = found
        lines = [f"== {part}, {found.get('wall_s', 0)} s", *found.get("said", [found.get("failed")])]
        print(*lines, found.get("counters"), sep="\n", flush=True)
        report = {
            **msgspec.to_builtins(provenance(commit=self._commit)),
            "model": self._model,
            "server": [*self.set_up.flags, "--num-blocks", str(self.set_up.num_blocks), "--kv-tier", self.set_up.host],
            "parts": self.found,
            "by_turn": self.by_turn(),
        }
        self._file.write_text(json.dumps(report, indent=1) + "\n")

    def by_turn(self) -> dict[str, list[dict[str, Any]]]:
        """Of each pair of `alone` and `many`: TTFT p50 by turn, and whether it is within the goal."""
        tables: dict[str, list[dict[str, Any]]] = {}
        for new in self.set_up.many:
            alone, many = (self.found.get(f"{kind}-{new}", {}).get("rows", ()) for kind in ("alone", "many"))
            tables[new] = [compared(*pair) for pair in zip(alone, many, strict=False) if all(map(has_time, pair))]
        return {new: rows for new, rows in tables.items() if rows}


def counters(server: Served) -> dict[str, float]:
    """Sums over the labels of what may go wrong without a request's failing."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
        lines = [line for line in response.read().decode().splitlines() if line.startswith(COUNTED)]
    return {
        name: sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))
        for name in COUNTED
    }


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
    every = [f"{kind}-{new}" for new in set_up.many for kind in ("alone", "many")] + ["check", "disk"]
    if unknown := set(parts) - set(every):
        sys.exit(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    Path(out).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sessions-model-") as made:
        folder = Path(made)
        if model == "tiny":
            folder = openinfer_tiny_model.model_dir()
        else:
            write_model(folder, {**PUBLISHED[model], **set_up.config})
        runner = Runner(model, folder, Path(out), commit)
        try:
            runner.run(parts or every)
        finally:
            show(runner.by_turn())
    return 1 if any("failed" in found for found in runner.found.values()) else 0


def show(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    for new, rows in tables.items():
        good = sum(row["within_goal"] for row in rows[1:])
        print(f"{new} new tokens: {good} of {len(rows) - 1} turns after the first within {GOAL_RATIO} x + {GOAL_MS} ms")
        for row in rows if len(rows) < 16 else [*rows[:4], *rows[4::6]]:
            print("  ", *(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    sys.exit(main())
