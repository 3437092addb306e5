"""What an engine is refused for whose `--kv-transfer` hands its KV to others."""

from openinfer_core.errors import Refused
from openinfer_core.scheduling import Scheduler
from openinfer_kv_cache import KvLayout, PinsPrefixes


def require_pins(scheduler: Scheduler, *, name: str) -> PinsPrefixes:
    """The scheduler as one that keeps a prefix while it is handed on.

    Raises:
        Refused: it cannot.
    """
    pinning: object = scheduler
    if not isinstance(pinning, PinsPrefixes):
        raise Refused(
            f"--kv-transfer: the scheduler {name} cannot keep a prefix while it is handed to another engine (it has no "
            "pin_prefix(digests)); use token-budget, or leave --kv-transfer out"
        )
    return pinning


def require_whole_prefixes(layout: KvLayout) -> None:
    """Refuses models whose prefixes are more than one chain of blocks, which is all that is handed on.

    Raises:
        Refused: the layout has recurrent states, or several block tables.
    """
    if layout.slot_bytes:
        raise Refused(
            "--kv-transfer: the model keeps recurrent states beside its KV, and only blocks are handed on; its engines "
            "can share a --kv-tier without it"
        )
    if layout.table_windows != (None,):
        raise Refused(
            f"--kv-transfer: the model's layers have block tables of their own ({layout.num_tables}), and only one is "
            "handed on; its engines can share a --kv-tier without it"
        )
