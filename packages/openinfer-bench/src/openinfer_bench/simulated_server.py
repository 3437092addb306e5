"""A server before the simulated engine, in a process of its own.

    python -m openinfer_bench.simulated_server MODEL_DIR ENGINE_JSON SERVER_JSON

Prints its URL when it serves; ends on SIGTERM.
"""

import sys
from pathlib import Path

import msgspec

from openinfer_core.simulated import SimulatedOptions, spawn_simulated
from openinfer_server import ServerOptions, run


def main() -> int:
    """Serves until SIGTERM."""
    handle = spawn_simulated(msgspec.json.decode(sys.argv[2], type=SimulatedOptions))
    served = msgspec.json.decode(sys.argv[3], type=ServerOptions)
    return run(handle, Path(sys.argv[1]), served, on_ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    raise SystemExit(main())
