"""Whole engines of low-bit models next to BF16 on one GPU, in turns: ms a token and tokens/s of prompts, in one table.

    python3 tools/device/less_to_read.py OUT.json COMMIT [--plan dense|kv|larger|prompts|formats|mixtures ...]
                                         [--only NAME ...] [--seconds S] [--device cuda|cpu] [--configs FOLDER]

Weights are random codes of the real shapes, routers' of normal scale; configs are those of `published_configs.py`.
Each engine is a process. Those that a plan names again stay, so that BF16 is measured before and after every other
(in brackets: the share of the mean of both); the next one is imported meanwhile. A size is 8x1024, rows and tokens of
each prompt, or 256-128x1024: once 256 rows have decoded, all but 128 are aborted and these decode on. Every plan ends
by itself: what does not fit into S seconds is left out, and said.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import published_configs
import source_packages

STEPS = {False: 32, True: 16}  # that are timed; and of many rows
MANY_ROWS = 96
UNTIMED_STEPS = 6  # of the rows before that are under way, and the first replays of a graph
REPEATED_TOKENS = 16384  # of prompts, up to which a size is measured twice and the quicker is kept
OUTPUT_ROOM = 192  # tokens of a sequence after its prompt, of which first come those of other prompts' steps
BLOCK_TOKENS = 16
START_S = 60
MANY_TOKENS = 100_000  # of KV, with which a model of 4B takes more than a quarter of the GPU

ALL = ("1x1024", "8x1024", "16x1024", "32x1024", "64x1024", "256-192-128-96x1024", "1x16384")
SOME = ("1x1024", "8x1024", "64x1024", "256-192-128-96x1024", "1x16384")
FEW = ("1x1024", "8x1024", "64x1024")
KV = ("64x1024", "256x1024", "1x16384")
PROMPTS = ("8x1024", "1x16384")
MIXED = ("1x1024", "8x1024", "64-32x1024")


class Line(NamedTuple):
    """A turn of an engine, which is known by its name."""

    name: str
    model: str
    sizes: Sequence[str]
    options: Sequence[str] = ()


def beside(first: Line, others: Sequence[Line], *, every: int = 1) -> list[Line]:
    """The first before, after, and between so many of the others."""
    turns = [first]
    for number, line in enumerate(others, 1):
        turns += [line, first] if number % every == 0 or number == len(others) else [line]
    return turns


def part_of_gpu(fraction: str) -> Sequence[str]:
    """For mixtures, whose recurrent states of 256 sequences would take 15 GiB."""
    return f"gpu_memory_fraction={fraction}", "max_num_seqs=64"


LONG_STEPS = ("max_step_tokens=8192",)
W8A8 = (*LONG_STEPS, "low_bit_activations=prefill")
PLANS: Mapping[str, Sequence[Line]] = {
    "dense": beside(
        Line("BF16", "qwen3-4b", ALL), [Line("FP8 blocks", "qwen3-4b-fp8", ALL), Line("AWQ", "qwen3-4b-awq", ALL)]
    ),
    "kv": [
        *beside(Line("BF16", "qwen3-4b", KV), [Line("BF16, FP8 KV", "qwen3-4b", KV, ("kv_cache_dtype=fp8",))]),
        Line("FP8 blocks, FP8 head", "qwen3-4b-fp8", FEW, ("fp8_head=true",)),
        Line("AWQ, FP8 head", "qwen3-4b-awq", FEW, ("fp8_head=true",)),
    ],
    "larger": beside(
        Line("8B BF16", "qwen3-8b", FEW), [Line("8B FP8", "qwen3-8b-fp8", FEW), Line("8B AWQ", "qwen3-8b-awq", FEW)]
    ),
    "prompts": beside(
        Line("BF16, steps of 8192", "qwen3-4b", PROMPTS, LONG_STEPS),
        [
            Line("FP8 blocks, W8A8", "qwen3-4b-fp8", PROMPTS, W8A8),
            Line("FP8 rows, W8A8", "qwen3-4b-fp8-rows", PROMPTS, W8A8),
            Line("INT8, W8A8", "qwen3-4b-w8a8", PROMPTS, W8A8),
        ],
    ),
    "formats": beside(
        Line("BF16", "qwen3-4b", SOME),
        [
            Line(name, model, SOME)
            for name, model in {
                "FP8 rows": "qwen3-4b-fp8-rows",
                "INT8 rows": "qwen3-4b-w8a8",
                "GPTQ": "qwen3-4b-gptq",
                "W4A16": "qwen3-4b-w4a16",
                "MXFP4": "qwen3-4b-mxfp4",
                "W4A16 in groups of 32": "qwen3-4b-w4a16-g32",
                "NVFP4": "qwen3-4b-nvfp4",
            }.items()
        ],
        every=2,
    ),
    "mixtures": [
        *beside(
            Line("35B-A3B BF16", "qwen3.5-35b-a3b", MIXED, part_of_gpu("0.52")),
            [
                # 68 GB of an H200's memory, which one GPU of 80 GB has as well
                Line("35B-A3B FP8", "qwen3.5-35b-a3b-fp8", MIXED, part_of_gpu("0.45")),
                Line("35B-A3B AWQ", "qwen3.5-35b-a3b-awq", MIXED, part_of_gpu("0.35")),
            ],
        ),
        *beside(
            Line("30B-A3B BF16", "qwen3-30b-a3b", MIXED, part_of_gpu("0.5")),
            [
                Line("30B-A3B AWQ", "qwen3-30b-a3b-awq", MIXED, part_of_gpu("0.35")),
                Line("30B-A3B FP8", "qwen3-30b-a3b-fp8", MIXED, part_of_gpu("0.4")),
            ],
        ),
    ],
}


class Size(NamedTuple):
    """Rows that decode, one count after the other, of prompts of so many tokens."""

    rows: Sequence[int]
    prompt_tokens: int

    @classmethod
    def of(cls, text: str) -> "Size":
        rows, _, prompt = text.partition("x")
        return cls([int(each) for each in rows.split("-")], int(prompt))

    @property
    def tokens(self) -> int:
        return self.rows[0] * (self.prompt_tokens + OUTPUT_ROOM)


def lines_of(plans: Sequence[str], only: Sequence[str] | None) -> list[Line]:
    found: list[Line] = []
    for line in [line for name in plans for line in PLANS[name]]:
        is_asked = only is None or line.name in only or line.name.endswith("BF16")
        if is_asked and (only is None or line not in found[-1:]):
            found.append(line)
    return found


def options_of(line: Line, sizes: Sequence[Size], device: str) -> dict[str, str]:
    """Of an engine that has room for its sizes, and leaves what it can to others."""
    given = {
        "device": device,
        "load_format": "dummy",
        "prefix_cache": "false",
        "gpu_memory_fraction": "0.46" if max(each.tokens for each in sizes) > MANY_TOKENS else "0.25",
        "max_model_tokens": str(max(each.prompt_tokens for each in sizes) + OUTPUT_ROOM),
        "num_blocks": str(max(each.tokens for each in sizes) // BLOCK_TOKENS + 64),
    }
    return given | dict(option.split("=") for option in line.options)


class Engine:
    """A process that is imported when it is made, and serves when it is opened. It ends with its input."""

    def __init__(self, model: Path, options: Mapping[str, str], environment: Mapping[str, str]) -> None:
        command = [sys.executable, __file__, "--engine", str(model), json.dumps(options)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self._lines.put(text)
        self._lines.put("")

    def ask(self, question: Any, *, seconds: float) -> dict[str, Any]:
        """The answer; or what went wrong."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._lines.get(timeout=max(0.1, seconds))
        except queue.Empty:
            return {"failed": f"no answer within {seconds:.0f} s"}
        except BrokenPipeError:
            answer = ""
        return json.loads(answer) if answer else {"failed": self._last_words()}

    def _last_words(self) -> str:
        self._process.wait(10)
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-900:]

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def serve(model: Path, options: Mapping[str, str]) -> None:
    """The process of an engine: a question and an answer a line. Everything else that it prints are errors."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import msgspec
    import numpy as np

    from openinfer_core import claim, list_plugins, read_config
    from openinfer_core.plugins import MODELS
    from openinfer_core.process.resident import settle_memory
    from openinfer_core.provenance import provenance
    from openinfer_engine.engine_plan import resolve
    from openinfer_engine.launch import build_loop

    family: Any = claim(read_config(model), list_plugins(MODELS))[0]
    chosen = msgspec.convert(dict(options), family.options_type, strict=False)
    loop, rng = None, np.random.default_rng(0)
    for text in sys.stdin:
        question = json.loads(text)
        begin = time.monotonic()
        if loop is None:
            plan = resolve(family.definition, model, chosen)
            loop = build_loop(plan)
            settle_memory()
            shown = msgspec.to_builtins(plan.plan())
            answer = {
                "weight_format": shown["parts"].get("weight_format"),
                "weights_bytes": shown["memory_bytes"]["weights"],
                "kernels": shown["kernels"].get("quantised weights"),
                "limits": shown["limits"],
                "load_s": round(time.monotonic() - begin, 2),
                "provenance": msgspec.to_builtins(provenance(commit=question["commit"])),
            }
            measured(loop, rng, Size([min(8, chosen.max_num_seqs)], 64))  # what only a first step does
        else:
            answer = {"rows": [row for each in question["sizes"] for row in best(loop, rng, Size.of(each))]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if loop is not None:
        loop.close()


def best(loop: Any, rng: Any, size: Size) -> list[dict[str, Any]]:
    repeats = 2 if size.rows[0] * size.prompt_tokens <= REPEATED_TOKENS else 1
    runs = [measured(loop, rng, size) for _ in range(repeats)]
    prefill_s = min(each[0] for each in runs)
    return [
        {
            "size": f"{rows}x{size.prompt_tokens}",
            "tpot_ms": round(min(each[1][index] for each in runs), 4),
            # where others were aborted, their prompts were the first ones' as well
            "prefill_tokens_per_s": round(size.rows[0] * size.prompt_tokens / prefill_s) if index == 0 else None,
        }
        for index, rows in enumerate(size.rows)
    ]


class Batch:
    """Requests that were submitted together, and how many tokens each has had."""

    def __init__(self, loop: Any, rng: Any, size: Size) -> None:
        from openinfer_core import GenerateRequest, RequestId, SamplingParams

        first_id = int(rng.integers(0, 2**40))
        self._loop, self._generated = loop, {RequestId(first_id + index): 0 for index in range(size.rows[0])}
        sampling = SamplingParams(max_tokens=OUTPUT_ROOM, temperature=0.0)
        for request_id in self._generated:
            prompt = tuple(rng.integers(0, loop.info.num_token_ids, size.prompt_tokens).tolist())
            request = GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)
            self._count(loop.submit(request))

    def prefill(self) -> None:
        while not all(self._generated.values()):
            self.step()

    def step(self) -> int:
        """Tokens of requests that were not aborted."""
        return self._count(self._loop.step())

    def keep(self, rows: int) -> None:
        """Aborts all others; those stay that have said least: the last ones."""
        for request_id in list(self._generated)[: len(self._generated) - rows]:
            self._loop.abort(request_id)
            del self._generated[request_id]

    def _count(self, events: Any) -> int:
        from openinfer_core import Failed, Tokens

        found = 0
        for event in events:
            if isinstance(event, Failed):
                raise SystemExit(f"a request failed: {event.message}")
            if isinstance(event, Tokens) and event.request_id in self._generated:
                self._generated[event.request_id] += len(event.token_ids)
                found += len(event.token_ids)
        return found


def measured(loop: Any, rng: Any, size: Size) -> tuple[float, list[float]]:
    """Seconds until every request has its first token, then ms a token of each count of rows."""
    begin = time.perf_counter()
    batch = Batch(loop, rng, size)
    batch.prefill()
    prefill_s, tpots = time.perf_counter() - begin, []
    for rows in size.rows:
        batch.keep(rows)
        for _ in range(UNTIMED_STEPS):
            batch.step()
        steps = STEPS[rows >= MANY_ROWS]
        begin = time.perf_counter()
        tokens = sum(batch.step() for _ in range(steps))
        tpots.append((time.perf_counter() - begin) * 1e3 / steps)
        if tokens != rows * steps:
            raise SystemExit(f"{steps} steps of {rows} rows gave {tokens} tokens, not one of each row and step")
    batch.keep(0)
    while loop.busy:
        loop.step()
    return prefill_s, tpots


def base_of(turns: Sequence[dict[str, Any]], index: int) -> Sequence[dict[str, Any]]:
    """The nearest turns of BF16 with the same weights and steps, before and after."""
    turn = turns[index]
    size = turn["name"].split(" ")[0] if turn["name"][0].isdigit() else ""
    first = " ".join([size, "BF16"]).strip()
    same = [
        each["name"] in (first, f"{first}, steps of 8192") and ("W8A8" in turn["name"]) == ("8192" in each["name"])
        for each in turns
    ]
    before = [each for each, is_same in zip(turns[:index], same[:index], strict=True) if is_same]
    after = [each for each, is_same in zip(turns[index + 1 :], same[index + 1 :], strict=True) if is_same]
    return [*before[-1:], *after[:1]]


def table(turns: Sequence[dict[str, Any]]) -> str:
    """Of each turn: ms a token, tokens/s of prompts; and how many times as fast as BF16 both are."""
    text: list[str] = []
    for index, turn in enumerate(turns):
        if "failed" in turn:
            text.append(f"{turn['name']}: FAILED {turn['failed'][-400:]}")
            continue
        base = base_of(turns, index)
        cells = []
        for row in turn["rows"]:
            same = [each for one in base for each in one.get("rows", ()) if each["size"] == row["size"]]
            cell = f"{row['size']} {row['tpot_ms']:.3f}"
            if same:
                cell += f" ({sum(each['tpot_ms'] for each in same) / len(same) / row['tpot_ms']:.3f})"
            if row["prefill_tokens_per_s"]:
                cell += f" {row['prefill_tokens_per_s']:,}"
                speeds = [each["prefill_tokens_per_s"] for each in same if each["prefill_tokens_per_s"]]
                if speeds:
                    cell += f" ({row['prefill_tokens_per_s'] * len(speeds) / sum(speeds):.3f})"
            cells.append(cell)
        text.append(f"{turn['name']}: " + "; ".join(cells))
    return "\n".join(text)


class Session:
    """Turns of engines until the time is over; what was found is written after each."""

    def __init__(self, lines: Sequence[Line], configs: Path, given: argparse.Namespace) -> None:
        self._lines, self._configs, self._given = lines, configs, given
        self._end = time.monotonic() + given.seconds
        self._environment = source_packages.environment()
        self._made: dict[str, Engine] = {}
        self._opened: set[str] = set()
        self._described: dict[str, Any] = {}
        self.turns: list[dict[str, Any]] = []
        self.left_out: list[str] = []

    def run(self) -> None:
        try:
            for index, line in enumerate(self._lines):
                left = self._end - time.monotonic()
                if left <= 0:
                    self.left_out.append(line.name)
                    continue
                self._import(index)
                self.turns.append({"name": line.name, "model": line.model, "options": [*line.options]})
                self.turns[-1] |= self._turn(index, line, left)
                passed_s = self._given.seconds - self._end + time.monotonic()
                print(f"{passed_s:5.0f} s  {table(self.turns[-1:])}", flush=True)
                if "failed" in self.turns[-1] or line.name not in [each.name for each in self._lines[index + 1 :]]:
                    self._close(line.name)
                self._write()
        finally:
            for name in list(self._made):
                self._close(name)

    def _import(self, index: int) -> None:
        """This turn's engine and the next one that is not there yet."""
        for line in [self._lines[index], *self._lines[index + 1 : index + 3]]:
            if line.name not in self._made:
                sizes = [Size.of(size) for each in self._lines if each.name == line.name for size in each.sizes]
                options = options_of(line, sizes, self._given.device)
                self._made[line.name] = Engine(self._configs / line.model, options, self._environment)

    def _turn(self, index: int, line: Line, left: float) -> dict[str, Any]:
        engine, found = self._made[line.name], {}
        if line.name not in self._opened:
            found = engine.ask({"commit": self._given.commit}, seconds=min(left, START_S))
            self._opened.add(line.name)
            self._described = found.pop("provenance", self._described)
        if "failed" in found:
            return found
        return found | engine.ask({"sizes": line.sizes}, seconds=self._end - time.monotonic())

    def _close(self, name: str) -> None:
        self._made.pop(name).close()
        self._opened.discard(name)

    def _write(self) -> None:
        whole = {
            **self._described,
            "command": f"python3 tools/device/less_to_read.py --plan {' '.join(self._given.plan)}",
            "turns": self.turns,
            "left_out": self.left_out,
        }
        self._given.out.write_text(json.dumps(whole, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("commit")
    parser.add_argument("--plan", nargs="+", choices=PLANS, default=["dense"])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these engines of the plan, next to BF16")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--configs", type=Path, help="in the place of the published ones, by the same names")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        published_configs.write(Path(folder))
        session = Session(lines_of(given.plan, given.only), given.configs or Path(folder), given)
        session.run()
    print(table(session.turns))
    if session.left_out:
        print("left out:", ", ".join(session.left_out))
    return 1 if any("failed" in each for each in session.turns) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        sys.exit(main())
