"""`LookUps`: requests that wait until a tier has been asked for what other engines have saved of their prompts.

A tier finds blocks by a list in memory, which is seconds old where other processes save. So a request that another
engine has prefilled, or that goes on where another one has decoded, asks the medium first, in a thread. It waits no
longer than for a load: what is not known by then is computed.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from openinfer_core.request import GenerateRequest, RequestId
from openinfer_kv_cache import Digest

_THREADS = 4  # so that a server that hangs holds up others' requests as late as it can


@dataclass(frozen=True, slots=True, eq=False)
class _LookUp:
    request: GenerateRequest
    arrived_s: float
    latest_s: float
    future: Future[None]


class LookUps:
    """Waiting requests, in the order of their arrival.

    Args:
        look_up: asks the tiers; waits for their media, and is called by several threads at once.
        timeout_s: after which a request goes on without.
    """

    def __init__(self, look_up: Callable[[Sequence[Digest]], None], *, timeout_s: float) -> None:
        self._look_up = look_up
        self._timeout_s = timeout_s
        self._waiting: dict[RequestId, _LookUp] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="openinfer-kv-look-up")
        self.late = 0  # requests that went on without an answer

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting_ids(self) -> set[RequestId]:
        return set(self._waiting)

    def begin(self, request: GenerateRequest, digests: Sequence[Digest], *, now_s: float) -> None:
        future = self._threads.submit(self._look_up, digests)
        self._waiting[request.request_id] = _LookUp(request, now_s, now_s + self._timeout_s, future)

    def take_ready(self, *, now_s: float) -> list[tuple[GenerateRequest, float]]:
        """Requests that may run now, each with the time of its arrival."""
        ready = [each for each in self._waiting.values() if each.future.done() or now_s >= each.latest_s]
        for each in ready:
            del self._waiting[each.request.request_id]
            if not each.future.done():
                each.future.cancel()
                self.late += 1
        return [(each.request, each.arrived_s) for each in ready]

    def withdraw(self, request_id: RequestId) -> GenerateRequest | None:
        """The request, which does not wait any longer; None if it does not wait here."""
        found = self._waiting.pop(request_id, None)
        if found is None:
            return None
        found.future.cancel()
        return found.request

    def wait(self, timeout_s: float) -> None:
        """Until one of them has its answer, at most so long."""
        wait([each.future for each in self._waiting.values()], timeout_s, return_when="FIRST_COMPLETED")

    def close(self) -> None:
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
