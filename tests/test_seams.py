"""What serves takes time, threads, entropy and processes from the modules that the simulator stands in for.

`openinfer_core.testing.simulation.standard_library` replaces names of `time`, `threading`, `queue`, `random` and `os`.
Another way to the same thing would be real in a simulated run, and differ between two runs of one seed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("core", "engine", "kv-cache", "kv-offload", "server")

# The C clock and entropy behind Python's back, and processes and threads that no world makes.
FORBIDDEN = {
    "datetime.now",
    "datetime.today",
    "datetime.utcnow",
    "date.today",
    "os.fork",
    "os.forkpty",
    "os.getrandom",
    "os.posix_spawn",
    "random.SystemRandom",
    "uuid.uuid1",
}
FORBIDDEN_MODULES = {"_thread", "multiprocessing", "sched"}
# With no argument these read the C clock.
NEED_ARGUMENTS = {"time.localtime": 1, "time.gmtime": 1, "time.ctime": 1, "time.asctime": 1, "time.strftime": 2}


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        for path in (ROOT / "packages" / f"openinfer-{package}" / "src").rglob("*.py"):
            if "testing" not in path.parts:
                yield path


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.Attribute | ast.Call) and is_forbidden(node):
            yield ast.unparse(node)


def is_forbidden(node: ast.Attribute | ast.Call) -> bool:
    if isinstance(node, ast.Call):
        return len(node.args) < NEED_ARGUMENTS.get(ast.unparse(node.func), 0)
    return ".".join(ast.unparse(node).split(".")[-2:]) in FORBIDDEN


def test_what_serves_reads_clocks_and_makes_threads_in_ways_that_a_world_has() -> None:
    found = {f"{path.relative_to(ROOT)}: {what}" for path in sources() for what in offences(path.read_text())}
    assert found == set()


def test_each_way_around_is_noticed() -> None:
    ways = ("datetime.now(UTC)", "import multiprocessing", "from _thread import start_new_thread", "time.localtime()")
    assert all(list(offences(way)) for way in ways)
    assert not list(offences("time.localtime(now_s); datetime.fromtimestamp(time.time(), UTC); threading.Thread()"))
