"""The program that a simulation runs in: `python child.py MODULE:FUNCTION SEED JSON`.

It is run by its path, makes the world, installs it in the standard library, and only then imports anything of
openinfer. FUNCTION is called in the world's first task with the world and what JSON says; what it returns is printed as
the last line, in JSON. The process ends without waiting for threads that still run: they are the world's.
"""

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGE = "openinfer_core.testing.simulation"
_SPIN_S = 30.0  # imports, and a collection of garbage, take less


def run_in_child(
    function: str,
    *,
    seed: int,
    arguments: Mapping[str, Any],
    hash_seed: int | None = None,
    folder: Path | None = None,
) -> "subprocess.Popen[str]":
    """Starts a simulation.

    Args:
        function: `MODULE:FUNCTION`; called with the world and the arguments.
        seed: of the world.
        arguments: what JSON can say.
        hash_seed: of the child's hashes of strings; by default Python draws one.
        folder: where it makes its files, which are left there if it fails.

    Returns:
        The process; its output's last line is what the function returned, in JSON.
    """
    environment = {**os.environ, "PYTHONHASHSEED": "random" if hash_seed is None else str(hash_seed)}
    if folder is not None:
        environment["TMPDIR"] = str(folder)
    command = [sys.executable, __file__, function, str(seed), json.dumps(dict(arguments))]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603


def _load(name: str) -> Any:
    """A module of this folder without its packages, which would bind names of the standard library."""
    full_name = f"{_PACKAGE}.{name}"
    spec = importlib.util.spec_from_file_location(full_name, Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(full_name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    spec.loader.exec_module(module)
    return module


def _watch(world: Any) -> None:
    """Ends the process where one task computes on and on: nothing in virtual time would tell."""
    end = os._exit  # the world replaces it
    seen: list[tuple[int, float]] = []

    def look(number: int, frame: Any) -> None:
        del number
        now = (world.num_switches, world.now_s)
        if now in seen:
            where = "".join(traceback.format_stack(frame))
            sys.stdout.write(f"Stuck: one task has computed for {_SPIN_S:g} s of a processor, and goes on\n{where}")
            sys.stdout.flush()
            end(1)
        seen[:] = [now]

    signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SPIN_S, _SPIN_S)


def main(argv: list[str]) -> int:
    """Runs a simulation; 1 if it raises."""
    name, seed, arguments = argv
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent.resolve()]
    world = _load("world").World(int(seed))
    _watch(world)
    for module_name in ("executor", "asyncio_waits"):
        _load(module_name)
    _load("standard_library").install(world)
    for module_name in ("event_loop", "network", "sockets"):
        _load(module_name)
    world.network = _load("descriptors").install_sockets(world)
    world.processes = _load("processes").install_processes(world, world.network)
    module, _, function = name.partition(":")

    def run() -> Any:
        return getattr(importlib.import_module(module), function)(world, **json.loads(arguments))

    try:
        answer = world.run(run)
    except BaseException:  # noqa: BLE001 -- printed: the process ends without Python's own end
        last_lines = "\n".join([*world.lines][-40:])
        sys.stdout.write(f"{traceback.format_exc()}\n{last_lines}\n")
        return 1
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Tasks that wait for ever would be ended one by one, and each would run its `finally` in a world that is over.
    os._exit(code)
