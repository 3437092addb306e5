"""The process of one model's server: `openinfer serve`, which ends when the router has ended, however that did.

python -m openinfer.several.model_server ROUTER serve FLAGS     ROUTER: its process id
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of `openinfer`."""
    router, *arguments = sys.argv[1:] if argv is None else argv
    # The router's main thread has started this process; Linux sends the signal when that ends.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(router):
        return 1  # it had ended before
    from openinfer.commands.main import main as openinfer  # after the signal is set: imports take a second

    return openinfer(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
