"""The benchmark's server process: the real frontend before the stamped engine.

    python -m openinfer_bench.frontend.server MODEL_DIR ENGINE_JSON SERVER_JSON

Prints its URL when it serves; ends on SIGTERM.
"""

import sys
from pathlib import Path

import msgspec

from openinfer_bench.frontend.stamps import StampedOptions
from openinfer_core.process.remote import spawn_engine
from openinfer_server import ServerOptions, run


def main() -> int:
    """Serves until SIGTERM."""
    options = msgspec.json.decode(sys.argv[2], type=StampedOptions)
    handle = spawn_engine("openinfer_bench.frontend.engine", options)
    served = msgspec.json.decode(sys.argv[3], type=ServerOptions)
    return run(handle, Path(sys.argv[1]), served, on_ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    raise SystemExit(main())
