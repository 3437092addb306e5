"""Run clients that people use against this server, and draw what passed.

    ./run clients                          # all of them; those of npm where there is Node
    ./run clients openai codex             # some
    ./run clients --ci                     # those that CI runs
    ./run clients --write-page             # and put the table into docs/reference/clients.md
    ./run clients --capture                # and what they asked into the server's tests
    ./run clients --lock                   # resolve the pins of Python clients anew; runs nothing

Each client is driven by a file of drivers/ in an environment of its own, from pinned packages, through a proxy that
remembers its requests. It ends with 1 if any scenario fails that clients.toml does not except.
"""

import argparse
import contextlib
import datetime as dt
import json
import logging
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import captures
from .environments import ENVIRONMENTS, Failure, make_environment, write_locks
from .proxy import CapturingProxy, Exchange
from .servers import Scripted, scripted_server, tiny_server
from .table import FOLDER, PAGE, Client, Result, Row, Scenario, drawn, failures, read_clients, row_of, with_rows

OWN_ROUTES = "/v1/"  # of openinfer-server; other routes are other packages'
SCENARIO_S = 300.0  # how long a client may take for a scenario before it counts as hanging


def main() -> int:
    clients = read_clients()
    options = parse_arguments(clients)
    if options.lock:
        write_locks(clients)
        return 0
    chosen = choose(clients, options.names, ci=options.ci)
    rows, lines = run_all(chosen, capture=options.capture)
    print(f"\n{drawn(rows)}")
    if options.write_page:
        page = with_rows(PAGE.read_text("utf-8"), rows, [each.name for each in clients])
        PAGE.write_text(page, encoding="utf-8")
    for line in lines:
        print(f"FAILED {line}")
    return 1 if lines else 0


def parse_arguments(clients: Sequence[Client]) -> argparse.Namespace:
    first, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="./run clients", description=first)
    names = [each.name for each in clients]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which, of {', '.join(names)} (default: all)")
    parser.add_argument("--ci", action="store_true", help="those that CI runs")
    parser.add_argument("--write-page", action="store_true", help=f"put the table into {PAGE.name}")
    parser.add_argument("--capture", action="store_true", help="keep what was asked for the server's replay tests")
    parser.add_argument("--lock", action="store_true", help="resolve the pins of clients.toml anew; run nothing")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(names)):
        parser.error(f"there is no client {unknown[0]!r}; there are {', '.join(names)}")
    return options


def choose(clients: Sequence[Client], names: Sequence[str], *, ci: bool) -> list[Client]:
    chosen = [each for each in clients if (each.name in names or not names) and (each.ci or not ci)]
    if shutil.which("npm") is None and not names:
        left_out = [each.name for each in chosen if each.runtime == "node"]
        print(f"no npm on PATH: {', '.join(left_out)} left out" if left_out else "", flush=True)
        chosen = [each for each in chosen if each.runtime != "node"]
    return chosen


def run_all(clients: Sequence[Client], *, capture: bool) -> tuple[list[Row], list[str]]:
    """Run clients one after the other; return the table's rows, and what failed."""
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    logging.getLogger("openinfer").addHandler(logging.FileHandler(ENVIRONMENTS / "scripted-server.log", mode="w"))
    rows: list[Row] = []
    lines: list[str] = []
    with tiny_server(ENVIRONMENTS / "tiny-server.log") as tiny, scripted_server() as scripted:
        for client in clients:
            print(f"{client.name} {client.version} on {client.api}", flush=True)
            with CapturingProxy(tiny) as to_tiny, CapturingProxy(scripted.url) as to_scripted:
                results = run_client(client, to_tiny.url, to_scripted.url, scripted)
            exchanges = [*to_tiny.exchanges, *to_scripted.exchanges]
            failed = failures(client, results)
            if failed:
                print_refusals(exchanges)
                print(f"    what it wrote is in {log_of(client)}", flush=True)
            elif capture and client.api.startswith(OWN_ROUTES):
                captures.write(client, exchanges)
            rows.append(row_of(client, results, date))
            lines += failed
    return rows, lines


def run_client(client: Client, tiny: str, scripted_url: str, scripted: Scripted) -> dict[Scenario, Result]:
    """Run one client's scenarios; a driver that ends early or hangs leaves the rest without results."""
    try:
        environment = make_environment(client)
    except Failure as failure:
        return {scenario: Result(passed=False, detail=str(failure)) for scenario in Scenario}
    with log_of(client).open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [*command_of(client, environment), tiny, scripted_url, *client.driver[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=environment,
            env=environment_variables(environment),
        )
    try:
        return follow(process, client, scripted)
    finally:
        process.kill()
        process.wait()


def log_of(client: Client) -> Path:
    return ENVIRONMENTS / f"{client.name}.log"


def command_of(client: Client, environment: Path) -> list[str]:
    driver = FOLDER / "drivers" / client.driver[0]
    if driver.suffix == ".mjs":
        copy = environment / driver.name  # Node looks for packages beside the file
        for file in (driver, driver.with_name("scenarios.mjs")):
            shutil.copy(file, environment / file.name)
        return ["node", str(copy)]
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    return [str(python if python.exists() else sys.executable), str(driver)]


def environment_variables(environment: Path) -> dict[str, str]:
    """Return what a client sees of this process's variables: no keys, proxies or homes of its user."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "SYSTEMROOT", "TMPDIR", "TEMP") if name in os.environ}
    home = environment / "home"
    home.mkdir(exist_ok=True)
    return {**kept, "HOME": str(home), "PYTHONUNBUFFERED": "1"}


def follow(process: "subprocess.Popen[str]", client: Client, scripted: Scripted) -> dict[Scenario, Result]:
    """Tell the driver what to do, and collect its results."""
    assert process.stdin is not None
    assert process.stdout is not None
    wanted = [scenario for scenario in Scenario if scenario not in client.lacks]
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    tell(process, " ".join(wanted))
    results: dict[Scenario, Result] = {}
    aborted = scripted.aborted
    for scenario in wanted:
        result = next_result(lines, scenario)
        if scenario is Scenario.ABORT and result.passed:
            result = judge_abort(scripted, aborted)
        tell(process, "")
        print(f"    {scenario}: {'yes' if result.passed else result.detail}", flush=True)
        results[scenario] = result
        if result.detail == HANGS:
            break
    return results


HANGS = f"no result within {SCENARIO_S:g} s"


def next_result(lines: "queue.SimpleQueue[str]", scenario: Scenario) -> Result:
    try:
        while line := lines.get(timeout=SCENARIO_S):
            with contextlib.suppress(ValueError):
                told = json.loads(line)
                if isinstance(told, Mapping) and told.get("scenario") == scenario:
                    return Result(bool(told["passed"]), str(told["detail"]))
    except queue.Empty:
        return Result(passed=False, detail=HANGS)
    return Result(passed=False, detail="the driver ended before it")


def judge_abort(scripted: Scripted, before: int) -> Result:
    """Look at the engine while the client lives: what it left is aborted, and the engine is free."""
    try:
        scripted.wait_until_free()
    except AssertionError as error:
        return Result(passed=False, detail=str(error))
    if scripted.aborted == before:
        return Result(passed=False, detail="the engine was free, and nothing was aborted")
    return Result(passed=True)


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended, which its results say
        process.stdin.write(f"{line}\n")
        process.stdin.flush()


def _read(process: "subprocess.Popen[str]", lines: "queue.SimpleQueue[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def print_refusals(exchanges: Sequence[Exchange]) -> None:
    for each in exchanges:
        if each.status >= 400:
            print(f"    {each.method} {each.path}: {each.status} {each.answer[:500]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
