"""`measure`: one attack, its trial and its three arms before a server of its own."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from openinfer_bench.hostile.attacks import ATTACKS, HONEST, Counts
from openinfer_bench.hostile.background import BackgroundThread
from openinfer_bench.hostile.guard_killer import GuardKiller
from openinfer_bench.hostile.victims import Seen, ask_all, percentile
from openinfer_bench.http_client import Address, unverified
from openinfer_bench.processes import tree_memory, tree_processor_s
from openinfer_bench.served import served
from openinfer_core.errors import EngineClosed, Refused

RATIO, MORE_MS = 2.0, 20.0
HEALTH_S = 1.0
ALL_MIB = 1024.0
LOG_KIB = 1024.0
MOST_CONNECTED = 64  # of an honest tenant in place of one whose answers come early: fewer than a tenant may have
_OPEN_FILES = 256
_KEYS = {"victim": "a-key-of-the-victims", "attacker": "a-key-of-the-attacker"}
_KV_BLOCKS = 1024
_OLD_BUDGETS_MIB = {"kv_cache": 64.0, "grammars": 256.0}  # of servers that have no metric of them, for this model
_SAMPLE_EVERY_S = 0.5
_QUIET = 0.1  # of a processor
_KIB, _MIB = 2**10, 2**20
_SHOWN_BYTES = 2**14
_BUDGET = re.compile(r'openinfer_budget_limit\{budget="\w*_bytes"\} (\S+)')
_KV_CACHE = re.compile(r'openinfer_engine_memory_bytes\{purpose="kv_cache"\} (\S+)')
_OPEN_REQUESTS = re.compile(r"^openinfer_requests_open (\S+)", re.MULTILINE)
_GRAMMARS = re.compile(r"^openinfer_grammar_bytes_limit (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the arms.

    Attributes:
        requests: of victims, per arm.
        trial_s: of an attack, to see how much of it is admitted.
        deadline_s: of an arm, for servers that hardly answer.
        gaps: that victims see in an arm at least; a row with fewer, or with fewer requests, fails.
    """

    about: str
    requests: int
    gaps: int
    trial_s: float
    deadline_s: float


FULL = Size(about="arms of 1,000 requests", requests=1000, gaps=20_000, trial_s=8.0, deadline_s=120.0)
QUICK = Size(
    about="quick arms of 100 requests, too few for a p99 to repeat",
    requests=100,
    gaps=2000,
    trial_s=4.0,
    deadline_s=30.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One attack; `honest` is A, both of its arms together."""

    attack: str
    about: str
    admitted: float
    """Requests of the attacker in flight, on average; the honest tenant has as many, at most `MOST_CONNECTED` in place
    of one whose answers come early."""
    requests: int
    gaps: int
    requests_honest: int
    gaps_honest: int
    ttft_p50_ms: float
    ttft_p50_honest_ms: float
    ttft_p99_ms: float
    ttft_p99_honest_ms: float
    itl_p99_ms: float
    itl_p99_honest_ms: float
    statuses: dict[str, int]
    statuses_honest: dict[str, int]
    health_s: float
    """That `/health` took at most."""
    health_honest_s: float
    idle_mib: float
    peak_mib: float
    allowed_mib: float
    log_kib: float
    """That the server logged during the attack, errors alone."""
    outcomes: dict[str, int]
    failures: list[str]


async def measure(name: str, size: Size, command: Sequence[str]) -> Row:
    """Trial, A, B, A."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="openinfer-hostile-"))
        flags = ["--model", "tiny", "--device", "cpu", "--num-blocks", str(_KV_BLOCKS)]
        flags += ["--api-keys-file", str(_write_keys(Path(folder)))]
        flags += _certificate(Path(folder)) if ATTACKS[name].before_tls else []
        flags += ATTACKS[name].flags
        quiet = ("env", "OPENINFER_LOG_LEVEL=ERROR", *command)  # older servers have no flag for it
        log = stack.enter_context(ServerLog(Path(folder) / "log"))
        server = stack.enter_context(served(flags, command=quiet, max_open_files=_OPEN_FILES, log=log.file))
        address = Address(server.host, server.port, ATTACKS[name].before_tls)
        return await _measure(name, size, address, server.pid, log)


async def _measure(name: str, size: Size, address: Address, pid: int, log: "ServerLog") -> Row:
    on_grammars = ATTACKS[name].on_grammars

    async def arm(attacker: str, concurrency: int) -> tuple[Seen, Counts]:
        await wait_until_quiet(lambda: tree_processor_s(pid))
        kills_guard = attacker != HONEST and ATTACKS[attacker].kills_guard
        with _attacking(attacker, address, concurrency) as counts, GuardKiller(pid) if kills_guard else nullcontext():
            seen = await ask_all(
                address,
                _KEYS["victim"],
                requests=size.requests,
                deadline_s=size.deadline_s,
                on_grammars=on_grammars,
                least_s=0.0 if attacker == HONEST else ATTACKS[attacker].least_s,
            )
        return seen, counts

    warm = await ask_all(address, _KEYS["victim"], requests=16, deadline_s=size.deadline_s, on_grammars=True)
    if warm.statuses.keys() != {"200"}:
        raise EngineClosed(f"before any attack, requests with a grammar are answered {dict(warm.statuses)}")
    idle_mib = tree_memory(pid).proportional_mib
    open_requests = 0.0
    with _attacking(name, address, 0) as trial:
        if ATTACKS[name].answers_early:
            open_requests = await _mean_open_requests(address, size.trial_s)
        else:
            await asyncio.sleep(size.trial_s)
    admitted = max(trial.admitted, open_requests)
    num_honest = round(max(trial.admitted, min(open_requests, MOST_CONNECTED)))
    first, _ = await arm(HONEST, num_honest)
    logged_before = log.num_bytes
    with PeakMemory(pid) as peak:
        during, counts = await arm(name, 0)
    log_kib = (log.num_bytes - logged_before) / _KIB
    last, _ = await arm(HONEST, num_honest)
    return _row(
        name,
        admitted,
        (first, last),
        during,
        counts,
        size=size,
        idle_mib=idle_mib,
        peak=peak,
        log_kib=log_kib,
        address=address,
    )


async def _mean_open_requests(address: Address, duration_s: float) -> float:
    """Requests that the server has open, on average over that time; 0 of a server that does not say."""
    seen: list[float] = []
    end_s = time.monotonic() + duration_s
    while (left_s := end_s - time.monotonic()) > 0:
        await asyncio.sleep(min(_SAMPLE_EVERY_S, left_s))
        found = _OPEN_REQUESTS.search(await asyncio.to_thread(_metrics, address))
        seen.append(0.0 if found is None else float(found[1]))
    return sum(seen) / max(1, len(seen))


async def wait_until_quiet(processor_s: Callable[[], float], *, period_s: float = 0.5, most_s: float = 60.0) -> None:
    """Returns when a server has nothing left of the arm before, which would count as the next one's, or after `most_s`.

    Args:
        processor_s: processor time of the server so far.
        period_s: in which it is looked at twice.
        most_s: that a server may work on for clients which have left.
    """
    before_s = float("-inf")
    for _ in range(round(most_s / period_s)):
        try:
            now_s = processor_s()
        except Refused:  # a process of the tree ended meanwhile
            now_s = float("inf")
        if now_s - before_s <= _QUIET * period_s:
            return
        before_s = now_s
        await asyncio.sleep(period_s)


def _row(
    name: str,
    admitted: float,
    honest: Sequence[Seen],
    during: Seen,
    counts: Counts,
    *,
    size: Size,
    idle_mib: float,
    peak: "PeakMemory",
    log_kib: float,
    address: Address,
) -> Row:
    attack = ATTACKS[name]
    ttft_s = [each for seen in honest for each in seen.ttft_s]
    gaps_s = [each for seen in honest for each in seen.gaps_s]
    row = Row(
        attack=name,
        about=attack.about,
        admitted=round(admitted, 2),
        requests=len(during.ttft_s),
        gaps=len(during.gaps_s),
        requests_honest=len(ttft_s),
        gaps_honest=len(gaps_s),
        ttft_p50_ms=1e3 * percentile(during.ttft_s, 0.5),
        ttft_p50_honest_ms=1e3 * percentile(ttft_s, 0.5),
        ttft_p99_ms=1e3 * percentile(during.ttft_s, 0.99),
        ttft_p99_honest_ms=1e3 * percentile(ttft_s, 0.99),
        itl_p99_ms=1e3 * percentile(during.gaps_s, 0.99),
        itl_p99_honest_ms=1e3 * percentile(gaps_s, 0.99),
        statuses=dict(during.statuses),
        statuses_honest=dict(honest[0].statuses + honest[1].statuses),
        health_s=during.health_s,
        health_honest_s=max(seen.health_s for seen in honest),
        idle_mib=idle_mib,
        peak_mib=peak.mib,
        allowed_mib=min(ALL_MIB, idle_mib + _budgets_mib(address)),
        log_kib=round(log_kib, 1),
        outcomes=dict(counts.outcomes),
        failures=[],
    )
    row.failures.extend(failures(row, size, has_ended=peak.has_ended))
    return row


def failures(row: Row, size: Size, *, has_ended: bool) -> list[str]:
    """The bounds that a row is beyond."""
    unforeseen = {each: times for each, times in row.outcomes.items() if each not in ATTACKS[row.attack].outcomes}
    checks = {
        "the server ended": has_ended,
        "TTFT": row.ttft_p99_ms > max(RATIO * row.ttft_p99_honest_ms, row.ttft_p99_honest_ms + MORE_MS),
        "ITL": row.itl_p99_ms > max(RATIO * row.itl_p99_honest_ms, row.itl_p99_honest_ms + MORE_MS),
        f"victims got {row.statuses}": not row.statuses.keys() <= row.statuses_honest.keys() | {"200", "cut"},
        f"{row.requests} requests, {row.gaps} gaps": row.requests < size.requests or row.gaps < size.gaps,
        f"{row.requests_honest} requests, {row.gaps_honest} gaps in two arms of A": row.requests_honest
        < 2 * size.requests
        or row.gaps_honest < 2 * size.gaps,
        "health": row.health_s > HEALTH_S,
        "memory": row.peak_mib > row.allowed_mib,
        f"{row.log_kib:.0f} KiB of log": row.log_kib > LOG_KIB,
        f"attackers got {unforeseen}": bool(unforeseen),
    }
    return [what for what, is_so in checks.items() if is_so]


@contextmanager
def _attacking(name: str, address: Address, concurrency: int) -> Generator[Counts]:
    """Counts that are filled at the end; an honest tenant without requests is no process."""
    counts = Counts()
    if name == HONEST and not concurrency:
        yield counts
        return
    arguments = [name, address.url, _KEYS["attacker"], str(concurrency)]
    command = [sys.executable, "-m", "openinfer_bench.hostile.attacker", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker:  # noqa: S603 - our own module
        if attacker.stdout is None:
            raise RuntimeError("the attacker has no standard output")
        attacker.stdout.readline()  # it has begun
        try:
            yield counts
        finally:
            attacker.terminate()
            told, _ = attacker.communicate()
            if told:
                found = json.loads(told)
                counts.outcomes.update(found["outcomes"])
                counts.admitted_s, counts.took_s = found["admitted_s"], found["took_s"]


class ServerLog:
    """What a server logs, in a file. A context manager, which shows the first of it on standard error at its end.

    Attributes:
        file: takes it.
    """

    def __init__(self, path: Path) -> None:
        self.file = path.open("w+b")

    @property
    def num_bytes(self) -> int:
        """So far."""
        return os.fstat(self.file.fileno()).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.file:
            sys.stderr.write(os.pread(self.file.fileno(), _SHOWN_BYTES, 0).decode(errors="replace"))
            if self.num_bytes > _SHOWN_BYTES:
                sys.stderr.write(f"... {self.num_bytes} bytes of log in all\n")


class PeakMemory(BackgroundThread):
    """Samples the memory of a server's processes in a thread. A context manager.

    Attributes:
        mib: the most that was seen, shared pages counted once.
        has_ended: the server did.
    """

    def __init__(self, pid: int) -> None:
        super().__init__("openinfer-memory")
        self.mib = 0.0
        self.has_ended = False
        self._pid = pid

    def _run(self) -> None:
        failed = 0  # in a row; a process of the tree that ends meanwhile is one
        is_last = False
        while not is_last and not self.has_ended:  # at the begin and the end, too: an arm may be shorter than a pause
            try:
                self.mib = max(self.mib, tree_memory(self._pid).proportional_mib)
                failed = 0
            except Refused:
                failed += 1
                self.has_ended = failed > 3
            is_last = self._left.wait(_SAMPLE_EVERY_S)


def _write_keys(folder: Path) -> Path:
    file = folder / "keys.toml"
    file.touch(mode=0o600)
    file.write_text("".join(f'[[keys]]\ntenant = "{tenant}"\nkey = "{key}"\n' for tenant, key in _KEYS.items()))
    return file


def _certificate(folder: Path) -> list[str]:
    """Flags of a server with a certificate of its own making."""
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
    try:
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - our own words
    except FileNotFoundError as error:
        raise Refused("an attack on TLS needs the command openssl, which makes the server's certificate") from error
    return ["--tls-cert-file", certificate, "--tls-key-file", key]


def _budgets_mib(address: Address) -> float:
    """What the server's budgets of bytes allow in all, as its metrics have them."""
    text = _metrics(address)
    of_each = {"kv_cache": _KV_CACHE.search(text), "grammars": _GRAMMARS.search(text)}
    mib = [_OLD_BUDGETS_MIB[name] if found is None else float(found[1]) / _MIB for name, found in of_each.items()]
    return sum(mib) + sum(float(limit) / _MIB for limit in _BUDGET.findall(text))


def _metrics(address: Address) -> str:
    context = unverified() if address.is_tls else None
    try:
        with urllib.request.urlopen(f"{address.url}/metrics", timeout=10, context=context) as page:  # noqa: S310 - ours
            return page.read().decode()
    except OSError as error:
        raise EngineClosed(f"the server does not show its metrics: {error}") from error
