"""`open_kv_events`: from what a user writes to a recorder that a scheduler talks to."""

from collections.abc import Sequence
from importlib.util import find_spec

from openinfer_core.errors import ContractViolation, Refused, brought_by
from openinfer_core.scheduling import Scheduler
from openinfer_engine.kv_events.recorder import KvEventRecorder
from openinfer_engine.kv_events.setting import parse_kv_events
from openinfer_kv_cache import KvEventSource, KvLayout, KvTier, TellingTier


def open_kv_events(
    text: str, scheduler: Scheduler, *, block_size_tokens: int, table_windows: Sequence[int | None] = (None,)
) -> KvEventRecorder:
    """Opens the sockets that `text` asks for and lets the scheduler tell of its blocks, which are in these tables.

    Raises:
        ContractViolation: the scheduler declares that it tells of its blocks, and has no `listen`.
        Refused: the scheduler does not tell of its blocks, pyzmq is not installed, or an endpoint cannot be had.
        ValueError: the text is not of its form.
    """
    setting = parse_kv_events(text)
    source = require_kv_events(scheduler, name=type(scheduler).__name__)
    from openinfer_engine.kv_events.publisher import KvEventPublisher

    publisher = KvEventPublisher(setting, block_size_tokens=block_size_tokens, table_windows=table_windows)
    recorder = KvEventRecorder(publisher)
    source.listen(recorder)
    return recorder


def require_kv_events(scheduler: Scheduler, *, name: str) -> KvEventSource:
    """The scheduler as one that tells of its blocks.

    Raises:
        ContractViolation: it declares that it tells, and has no `listen`.
        Refused: it does not tell, or pyzmq is not installed.
    """
    if not scheduler.capabilities.tells_kv_events:
        raise Refused(
            f"kv_events needs a scheduler that tells of its blocks, and {name} does not (it does not declare "
            "tells_kv_events); use token-budget, or leave kv_events out"
        )
    source: object = scheduler
    if not isinstance(source, KvEventSource):
        raise ContractViolation(f"{name} declares tells_kv_events and has no listen(listener)")
    if find_spec("zmq") is None:
        raise Refused(f"kv_events needs pyzmq, which is not installed: {brought_by('--kv-events')}")
    return source


def tell_of_tiers(tier: KvTier, recorder: KvEventRecorder, *, layout: KvLayout) -> None:
    """Lets a tier tell of its blocks, if it can, and if a prefix is one chain of blocks there.

    Of a model with recurrent states, or several block tables, a tier has other blocks beside those, which no router
    knows.
    """
    if isinstance(tier, TellingTier) and not layout.slot_bytes and layout.table_windows == (None,):
        tier.listen(recorder.of_tiers)
