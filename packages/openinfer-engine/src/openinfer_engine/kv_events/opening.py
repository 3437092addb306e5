"""`open_kv_events`: from what a user writes to a recorder that a scheduler talks to."""

from importlib.util import find_spec

from openinfer_core.errors import Refused
from openinfer_core.scheduling import Scheduler
from openinfer_engine.kv_events.recorder import KvEventRecorder
from openinfer_engine.kv_events.setting import parse_kv_events
from openinfer_kv_cache import KvEventSource


def open_kv_events(text: str, scheduler: Scheduler, *, block_size_tokens: int) -> KvEventRecorder:
    """Opens the sockets that `text` asks for and lets the scheduler tell of its blocks.

    Raises:
        Refused: the scheduler does not tell of its blocks, pyzmq is not installed, or an endpoint cannot be had.
        ValueError: the text is not of its form.
    """
    setting = parse_kv_events(text)
    if not isinstance(scheduler, KvEventSource):
        raise Refused(
            f"kv_events needs a scheduler that tells of its blocks (KvEventSource), and {type(scheduler).__name__} "
            "does not; use token-budget"
        )
    if find_spec("zmq") is None:
        raise Refused("kv_events needs pyzmq; install it with pip install 'openinfer-engine[kv-events]'")
    from openinfer_engine.kv_events.publisher import KvEventPublisher

    recorder = KvEventRecorder(KvEventPublisher(setting, block_size_tokens=block_size_tokens))
    scheduler.listen(recorder)
    return recorder
