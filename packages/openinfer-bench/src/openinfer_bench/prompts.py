"""`openinfer bench prompts`: what long conversations cost before a request is admitted, and what they cost others.

Sessions of 500 KB arrive spread over one second (`--over-s`), each over a new connection, and every turn adds 2 KB. The
server is the real frontend before a simulated engine, so that time to first token is what JSON, template, tokens, frame
and digests take, and the way there and back. Three arms: `short` has turns of 2 KB and no history, in the same order of
arrival; `whole` has the history, and every turn is encoded whole (`--known-prefix-bytes 0`); `known` has it, and what
is new is encoded alone. A stream of another client runs next to them; its gaps are held against those of `short`.

The client is two processes on the same machine, of which one follows the stream: times are upper bounds. Processor time
of the server per turn is told where Linux tells it, what the stream takes included: it holds also where others use the
machine.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import tokenizers

from openinfer.models import find_model_dir
from openinfer_bench.arguments import check_folders, check_least
from openinfer_bench.followed_stream import followed_stream
from openinfer_bench.http_client import Address, ask
from openinfer_bench.processes import descendants
from openinfer_core import EngineClosed, InvalidRequest
from openinfer_core.provenance import provenance
from openinfer_core.simulated import SimulatedOptions
from openinfer_server import ServerOptions

OPENINFER_CONTRACT = 1

ARMS = ("short", "whole", "known")
_WORDS = "the stone is a mountain, return x + 1\n    if not found: 3.14 “quotes” path/to/file.py { } [0] //".split(" ")
_STREAM_STEP_S = 0.005
_END_S = 60.0
_PATH = "/v1/chat/completions"
_MAX_BODY_BYTES = 2**26
_MOST_TRIES = 10
_OK = 200
_HEAD = ("arm", "workers", "turns", "failed", "TTFT p50", "p99", "max", "gap p50", "p99", "max", "CPU ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What one arm measured."""

    arm: str
    workers: int
    turns: int
    """Requests, without those of the first round, which make the sessions known."""
    failed: int
    failures: dict[str, int]
    """Of these, by HTTP's status."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    ttft_max_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    """Gaps of the stream of another client, whose engine makes a token every 5 ms."""
    cpu_ms: float | None
    """Processor time of frontend and engine per turn; None where it is not Linux."""


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; `--json FILE` also writes it, what there is so far after each round.

    Returns 1 if a turn failed.

    Raises:
        InvalidRequest: a number is out of range, or a file is not there or cannot be written.
    """
    arguments = _parser().parse_args(argv)
    check_least(arguments, {"sessions": 1, "kilobytes": 1, "rounds": 1, "over_s": 0, "large_workers": 1})
    check_folders(arguments, ("json",))
    if arguments.model is not None and not (arguments.model / "tokenizer.json").is_file():
        raise InvalidRequest(f"--model {arguments.model} has no tokenizer.json", field="model")
    found: dict[tuple[int, str], Arm] = {}

    def note(measured: Arm) -> None:
        found[measured.workers, measured.arm] = measured
        if arguments.json is not None:
            _write(Path(arguments.json), arguments, list(found.values()))

    print(_line(_HEAD), flush=True)
    for workers in arguments.workers:
        for arm in arguments.arms:
            asyncio.run(_measure(arguments, arm, workers, note))
            row = asdict(found[workers, arm])
            failures = row.pop("failures")
            print(_line(row.values()), failures or "", flush=True)
    return 1 if any(arm.failed for arm in found.values()) else 0


def _write(file: Path, arguments: argparse.Namespace, arms: Sequence[Arm]) -> None:
    content = {
        **msgspec.to_builtins(provenance()),
        "sessions": arguments.sessions,
        "kilobytes": arguments.kilobytes,
        "rounds": arguments.rounds,
        "over_s": arguments.over_s,
        "large_workers": arguments.large_workers,
        "arms": [asdict(arm) for arm in arms],
    }
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer bench prompts", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", type=Path, help="folder of tokenizer and template; by default the tiny model's")
    parser.add_argument(
        "--sessions", type=int, default=40, metavar="N", help="conversations; each has a turn per round"
    )
    parser.add_argument("--kilobytes", type=int, default=500, metavar="N", help="history of each at the first round")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each that are measured")
    parser.add_argument("--over-s", type=float, default=1.0, metavar="S", help="in which the turns of a round arrive")
    parser.add_argument("--workers", type=int, nargs="+", default=[1], metavar="N", help="API workers of the server")
    parser.add_argument("--large-workers", type=int, default=1, metavar="N", help="its processes for large requests")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    return parser


async def _measure(arguments: argparse.Namespace, arm: str, workers: int, note: Callable[[Arm], None]) -> None:
    folder: Path = find_model_dir("tiny") if arguments.model is None else arguments.model
    size = 0 if arm == "short" else 1000 * arguments.kilobytes
    sessions = [conversation(number, size) for number in range(arguments.sessions)]
    known_bytes = 0 if arm == "whole" else ServerOptions().known_prefix_bytes
    of_server = {"workers": workers, "large_request_workers": arguments.large_workers}
    with _server(folder, known_prefix_bytes=known_bytes, **of_server) as (address, pid):
        # Every process that may get a session sees it before it is measured: of large ones each comes to one process.
        is_large = size >= ServerOptions().large_request_bytes
        for _ in range(3 * workers if workers > 1 and arm == "known" and not is_large else 1):
            await _make_known(address, sessions)
        gaps: list[float] = []
        ttft_s: list[float] = []
        failures = Counter[str]()
        begin_s = _used_s(pid)
        with followed_stream(address) as gaps_since:
            for _ in range(arguments.rounds):
                for session in sessions:
                    session.extend(turn(session))
                answers = await _round(address, sessions, over_s=arguments.over_s)
                failures.update(f"{-answer:.0f}" for answer in answers if answer < 0)
                ttft_s += [answer for answer in answers if answer >= 0]
                used_s = None if begin_s is None else (_used_s(pid) or 0.0) - begin_s
                gaps += gaps_since()
                note(_arm(arm, workers, ttft_s=ttft_s, gaps=gaps, failures=failures, used_s=used_s))


def conversation(number: int, size: int) -> list[dict[str, str]]:
    """Turns of so many bytes in all, each of 2 to 30 KB, the last one the user's; no two conversations begin alike."""
    rng = random.Random(number)  # noqa: S311 - a workload, no secret
    turns = [{"role": "user", "content": f"Task {number}. {_text(rng, 2000)}"}]
    while (left := size - sum(len(each["content"]) for each in turns)) > 0:
        turns.append({"role": "assistant", "content": _text(rng, 500)})
        turns.append({"role": "user", "content": _text(rng, min(left, rng.randrange(2000, 30_000)))})
    return turns


def turn(session: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """What a turn adds: an answer and a message, 2 KB."""
    rng = random.Random(len(session))  # noqa: S311 - a workload, no secret
    return [{"role": "assistant", "content": _text(rng, 500)}, {"role": "user", "content": _text(rng, 1500)}]


def _text(rng: random.Random, size: int) -> str:
    return " ".join(rng.choices(_WORDS, k=size // 4))[:size]


async def _round(address: Address, sessions: Sequence[list[dict[str, str]]], *, over_s: float) -> list[float]:
    """One turn of each, spread over so many seconds; seconds to the first token, or minus the status of a failure."""
    # `short` sends the last turn alone: encoded beforehand, so that the client does nothing else meanwhile.
    fields = {"model": "simulated", "max_tokens": 1, "stream": True}
    bodies = [json.dumps({**fields, "messages": session}).encode() for session in sessions]
    begin_s = time.monotonic()

    async def one(number: int, body: bytes) -> float:
        await asyncio.sleep(max(0.0, begin_s + over_s * number / len(bodies) - time.monotonic()))
        answer = await ask(address, _PATH, body)
        if answer.is_whole and answer.status == _OK and answer.event_s:
            return answer.event_s[0] - answer.begin_s
        return -float(max(1, answer.status))  # 1 for one that was lost, or cut off

    return await asyncio.gather(*(one(number, body) for number, body in enumerate(bodies)))


async def _make_known(address: Address, sessions: Sequence[list[dict[str, str]]]) -> None:
    """Sends each session until it is answered, one after the other: more at a time would be too much to encode."""
    for session in sessions:
        for _ in range(_MOST_TRIES):
            if (await _round(address, [session], over_s=0.0))[0] >= 0:
                break
        else:
            raise EngineClosed("the server answers no session before the measurement")


@contextmanager
def _server(
    folder: Path, *, workers: int, large_request_workers: int, known_prefix_bytes: int
) -> Generator[tuple[Address, int]]:
    vocabulary = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    engine = SimulatedOptions(tpot_s=_STREAM_STEP_S, num_token_ids=vocabulary)
    served = ServerOptions(
        port=0,
        workers=workers,
        large_request_workers=large_request_workers,
        known_prefix_bytes=known_prefix_bytes,
        max_body_bytes=_MAX_BODY_BYTES,
        max_open_body_bytes=64 * _MAX_BODY_BYTES,
        max_queued_tokens=2**30,
        max_request_kv_tokens=2**30,
        template_timeout_s=60.0,
    )
    encoded = [msgspec.json.encode(options).decode() for options in (engine, served)]
    command = [sys.executable, "-m", "openinfer_bench.simulated_server", str(folder), *encoded]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            url = process.stdout.readline().strip() if process.stdout is not None else ""
            if not url:
                raise EngineClosed(f"the server ended with code {process.wait()} before it served")
            yield Address.of(url), process.pid
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _arm(
    arm: str,
    workers: int,
    *,
    ttft_s: Sequence[float],
    gaps: Sequence[float],
    failures: Mapping[str, int],
    used_s: float | None,
) -> Arm:
    return Arm(
        arm=arm,
        workers=workers,
        turns=len(ttft_s),
        failed=sum(failures.values()),
        failures=dict(failures),
        ttft_p50_ms=_ms(ttft_s, 0.5),
        ttft_p99_ms=_ms(ttft_s, 0.99),
        ttft_max_ms=_ms(ttft_s, 1.0),
        gap_p50_ms=_ms(gaps, 0.5),
        gap_p99_ms=_ms(gaps, 0.99),
        gap_max_ms=_ms(gaps, 1.0),
        cpu_ms=None if used_s is None or not ttft_s else round(1000 * used_s / len(ttft_s), 2),
    )


def _used_s(pid: int) -> float | None:
    """Processor time of a process and its descendants so far."""
    if not sys.platform.startswith("linux"):
        return None
    ticks = 0
    for each in descendants(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user's and the kernel's, proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")


def _ms(seconds: Sequence[float], quantile: float) -> float:
    if not seconds:
        return float("nan")
    ordered = sorted(seconds)
    at = statistics.median(ordered) if quantile == 0.5 else ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
    return round(1000 * at, 2)


def _line(cells: Iterable[object]) -> str:
    return " ".join(f"{cell!s:>9}" for cell in cells)


__all__ = ["ARMS", "Arm", "conversation", "run", "turn"]
