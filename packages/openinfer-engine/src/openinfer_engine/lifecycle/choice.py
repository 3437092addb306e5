"""What `--enable-sleep` excludes, held against the options before anything is loaded."""

from openinfer_core import Refused
from openinfer_engine.options import DeviceKind, EngineOptions


def check_sleep(options: EngineOptions) -> None:
    """Raises `Refused` for a composition on a GPU whose weights cannot change yet; on a CPU every one's can."""
    if not options.enable_sleep or options.device is not DeviceKind.CUDA:
        return
    if options.speculation is not None:
        raise Refused("--enable-sleep and --speculative exclude each other on a GPU so far; leave one of them out")
