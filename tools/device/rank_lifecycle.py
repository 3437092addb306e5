"""Engines of two ranks that sleep and change weights and adapters, part by part: what ended, and where the rest stood.

    python3 tools/device/rank_lifecycle.py [PART ...] [--device cuda|cpu] [--ranks N] [--timeout-s S] [--json FILE]

Each part is a process with an engine of its own and a small model, and prints what it does as it goes. One that takes
longer than its time is asked where each of its threads is, and so are the processes of its ranks (Python's stacks, by
SIGUSR1), and then killed; the next part follows. With the default of 25 s six parts take 150 s at most.
"""

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from source_packages import ROOT, environment, folders

PARTS = ("in-flight-1", "in-flight-2", "update", "update-in-flight", "names", "chunks")
DUMP_S = 1.0
"""That printing stacks may take."""


# --- one part, in its own process --------------------------------------------------------------------------


class Part:
    """Engines of one part."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self._folder = folder
        self._options = options
        self._begin_s = time.perf_counter()

    def say(self, what: str) -> None:
        print(f"  {time.perf_counter() - self._begin_s:6.2f} s  {what}", flush=True)

    def loop(self, model: str = "old", *, names: tuple[str, ...] = tuple("abc"), **options: Any) -> Any:
        from openinfer_engine import EngineOptions, build_loop, resolve
        from openinfer_qwen3.family import Qwen3

        lora = [f"{name}={self._folder / name}" for name in names]
        given = {**self._options, "lora": lora, "lora_root": str(self._folder), "weights_root": str(self._folder)}
        chosen = EngineOptions(**{**given, "max_loras": 3, "max_lora_rank": 16, **options})
        made = build_loop(resolve(Qwen3().definition, self._folder / model, chosen))
        self.say(f"an engine of {model!r} has started {options or ''}")
        return made

    def tokens(self, loop: Any, asked: list[Any]) -> dict[int, list[int]]:
        from openinfer_engine.testing import run_at_once

        found = {key: each.token_ids for key, each in sorted(run_at_once(loop, asked).items())}
        self.say(f"{len(found)} requests have ended")
        return found

    def control(self, loop: Any, command: Any) -> list[Any]:
        events = loop.control(command)
        self.say(f"{type(command).__name__} was obeyed")
        return events


def requests(
    names: tuple[str | None, ...] = ("a", None, "b", "c", None, "b", "c", "a"), *, most: int = 24
) -> list[Any]:
    from openinfer_core import GenerateRequest, RequestId, SamplingParams

    return [
        GenerateRequest(
            request_id=RequestId(number),
            prompt_token_ids=tuple((37 * number + 11 * at) % 127 for at in range(60 - 3 * (number % 7))),
            lora=name,
            sampling=SamplingParams(max_tokens=most, temperature=0),
        )
        for number, name in enumerate(names)
    ]


def begun(part: Part, loop: Any, num_steps: int = 9) -> list[Any]:
    events = [event for request in requests() for event in loop.submit(request)]
    for _ in range(num_steps):
        events += loop.step()
    part.say(f"{num_steps} steps")
    return events


def finished(part: Part, loop: Any, events: list[Any]) -> dict[int, list[int]]:
    from openinfer_engine.testing import Answer

    while loop.busy:
        events += loop.step()
    found: dict[int, Answer] = {}
    for event in events:
        found.setdefault(event.request_id, Answer()).take(event)
    part.say("all have ended")
    return {key: each.token_ids for key, each in sorted(found.items())}


def in_flight(part: Part, *, level: int) -> None:
    from openinfer_core.control import Sleep, Wake

    loop = part.loop(batch_invariant=True)
    expected = part.tokens(loop, requests())
    events = begun(part, loop)
    events += part.control(loop, Sleep(keeps_weights=level == 1))
    events += part.control(loop, Wake())
    require(finished(part, loop, events), expected)
    loop.close()


def update(part: Part) -> None:
    from openinfer_core.control import Sleep, UpdateWeights, Wake

    loop = part.loop(batch_invariant=True)
    before = part.tokens(loop, requests())
    fresh = part.loop("new", batch_invariant=True)
    expected = part.tokens(fresh, requests())
    fresh.close()
    if before == expected:
        raise SystemExit("both models say the same: this shows nothing")
    for commands in ((UpdateWeights(path="new"),), (UpdateWeights(path="new"),), (Sleep(), Wake())):
        for command in commands:
            part.control(loop, command)
        require(part.tokens(loop, requests()), expected)
    loop.close()


def update_in_flight(part: Part) -> None:
    from openinfer_core.control import UpdateWeights

    loop = part.loop(batch_invariant=True)
    events = begun(part, loop)
    events += part.control(loop, UpdateWeights(path="new"))
    found = finished(part, loop, events)
    if {len(each) for each in found.values()} != {24}:
        raise SystemExit(f"not all have all their tokens: {found}")
    loop.close()


def names(part: Part) -> None:
    from openinfer_core.control import LoadAdapter, UnloadAdapter

    fresh = part.loop(names=("b", "c"), batch_invariant=True)
    expected = {name: part.tokens(fresh, requests((name, None, name))) for name in "bc"}
    fresh.close()
    loop = part.loop(names=(), max_loras=1, batch_invariant=True)
    for name in ("b", "c", "b"):
        told: list[str | None] = []
        loop.begin_control(LoadAdapter("late", name), told.append)
        while not told:
            loop.step()
        part.say(f"{name!r} was loaded: {told}")
        require(part.tokens(loop, requests(("late", None, "late"))), expected[name])
        part.control(loop, UnloadAdapter("late"))
    loop.close()


def chunks(part: Part) -> None:
    whole = part.loop(batch_invariant=True)
    expected = part.tokens(whole, requests())
    whole.close()
    loop = part.loop(batch_invariant=True, max_step_tokens=64)
    require(part.tokens(loop, requests()), expected)
    loop.close()


def require(found: object, expected: object) -> None:
    if found != expected:
        raise SystemExit(f"found    {found}\nexpected {expected}")


RUNS: Mapping[str, Callable[[Part], None]] = {
    "in-flight-1": lambda part: in_flight(part, level=1),
    "in-flight-2": lambda part: in_flight(part, level=2),
    "update": update,
    "update-in-flight": update_in_flight,
    "names": names,
    "chunks": chunks,
}


def run_part(name: str, folder: Path, given: argparse.Namespace) -> None:
    faulthandler.register(signal.SIGUSR1)
    ranks = {"tensor_parallel_size": given.ranks, "rank_host": "process"} if given.ranks > 1 else {}
    sleeps = {"enable_sleep": True} if given.device == "cuda" else {}
    sizes = {"num_blocks": 256, "block_size_tokens": 16, "max_num_seqs": 16}
    from openinfer_engine.options import DeviceKind

    part = Part(folder, {"device": DeviceKind(given.device), **sizes, **ranks, **sleeps})
    part.say("imported")
    RUNS[name](part)


# --- all parts ---------------------------------------------------------------------------------------------


def children(process_id: int) -> list[int]:
    """All that come of a process."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has ended
    found, new = [], [process_id]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def ask_where(process_id: int) -> None:
    for each in (process_id, *children(process_id)):
        print(f"  == where process {each} is", flush=True)
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(each, signal.SIGUSR1)
        time.sleep(DUMP_S / 2)


def supervise(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    print(f"{name}:", flush=True)
    options = ["--device", given.device, "--ranks", str(given.ranks)]
    command = [sys.executable, __file__, name, *options, "--folder", str(folder)]
    begin = time.perf_counter()
    part = subprocess.Popen(command, env=environment(), stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = part.wait(given.timeout_s)
    except subprocess.TimeoutExpired:
        ask_where(part.pid)
        with suppress(ProcessLookupError):
            os.killpg(part.pid, signal.SIGKILL)
        part.wait()
        code = None
    said = {0: "passed", None: f"did not end within {given.timeout_s:g} s"}.get(code, f"FAILED with {code}")
    took = round(time.perf_counter() - begin, 2)
    print(f"{name}: {said}, {took} s", flush=True)
    return {"part": name, "result": said, "seconds": took}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=25.0)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such parts: {sorted(unknown)}")
    sys.path[:0] = [*folders(), str(ROOT / "packages" / "openinfer-qwen3" / "tests")]
    if given.folder is not None:
        run_part(given.parts[0], given.folder, given)
        return 0
    from gpu_model import CONFIG
    from lifecycle_models import CPU_CONFIG, write_adapted

    with tempfile.TemporaryDirectory() as made:
        config = CONFIG if given.device == "cuda" else CPU_CONFIG
        folder = write_adapted(Path(made), config, {"a": 1, "b": 8, "c": 16})
        rows = [supervise(name, folder, given) for name in given.parts or PARTS]
    if given.json is not None:
        record = {"commit": given.commit, "device": given.device, "ranks": given.ranks, "parts": rows}
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row["result"] == "passed" for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
