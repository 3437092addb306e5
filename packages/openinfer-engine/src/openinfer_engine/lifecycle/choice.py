"""What `--enable-sleep` excludes, held against the options before anything is loaded."""

from openinfer_core import Refused
from openinfer_engine.options import DeviceKind, EngineOptions, LowBitActivations


def check_sleep(options: EngineOptions) -> None:
    """Raises `Refused` for a composition on a GPU whose weights cannot change yet; on a CPU every one's can."""
    if not options.enable_sleep or options.device is not DeviceKind.CUDA:
        return
    excluded = {
        "--speculative": options.speculation is not None,
        "--low-bit-activations": options.low_bit_activations is not LowBitActivations.OFF,
        "--fp8-head": options.fp8_head,
    }
    for option in (name for name, is_asked in excluded.items() if is_asked):
        raise Refused(f"--enable-sleep and {option} exclude each other on a GPU so far; leave one of them out")
