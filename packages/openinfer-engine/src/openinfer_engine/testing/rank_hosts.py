"""`check_rank_host`: the conformance kit of rank hosts, for packages that offer one in `openinfer.rank_hosts`.

No model is loaded: each rank is told to build a family that no package has, says so, and ends.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitTimeoutError
from typing import TypeVar

import msgspec

from openinfer_core.process.wire import encode_frame
from openinfer_core.testing.errors import ConformanceError
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.ranks.contract import RankHost, RankLink, RankSpec
from openinfer_engine.ranks.placement import Placement, nodes_in_order
from openinfer_engine.worker.messages import Build, Fault, FaultKind, Heartbeat, Leave, from_rank_decoder

Result = TypeVar("Result")
NO_FAMILY = "no-family-of-any-package"


def check_rank_host(open_host: Callable[[], RankHost], *, num_ranks: int = 3, deadline_s: float = 120.0) -> None:
    """Starts ranks at hosts that `open_host` makes, one after the other, and ends them in each way there is.

    Raises:
        ConformanceError: the host breaks the contract; the message says how.
    """
    for ending in (_end_after_a_fault, _kill, _end_unasked):
        host = open_host()
        with contextlib.ExitStack() as undo:
            undo.callback(host.close)
            links = _start(host, num_ranks, undo)
            for rank, link in enumerate(links, 1):
                link.send(_build(rank, host.placement()))
            for link in links:
                ending(link, deadline_s)
        host.close()  # is idempotent


def _start(host: RankHost, num_ranks: int, undo: contextlib.ExitStack) -> list[RankLink]:
    spec = RankSpec(num_ranks=num_ranks, on_gpu=False)
    links: list[RankLink] = []
    for rank in range(1, num_ranks):
        links.append(host.start(rank, spec))
        undo.callback(links[-1].end, deadline_s=0.0)
    placement = host.placement()
    _require(len(placement.places) == num_ranks, f"the placement has {len(placement.places)} of {num_ranks} ranks")
    _require(placement.nodes[0] == 0, f"rank 0 is on node {placement.nodes[0]}, which must be 0")
    try:
        nodes_in_order(placement.nodes)
    except ValueError as error:
        raise ConformanceError(str(error)) from error
    has_addresses = all(place.address for place in placement.places)
    _require(has_addresses or not placement.spans_nodes, "ranks are on several nodes, and places have no address")
    _require(all(link.name for link in links), "a link has no name")
    return links


def _build(rank: int, placement: Placement) -> bytes:
    spec = EngineSpec(family=NO_FAMILY, model_dir="/", options=msgspec.Raw(b"{}"))
    build = Build(msgspec.json.encode(spec), rank, placement, timeout_s=60.0, wants_composition=False)
    return bytes(encode_frame(build))


def _end_after_a_fault(link: RankLink, deadline_s: float) -> None:
    heard = [from_rank_decoder.decode(body) for body in _all(link, deadline_s)]
    faults = [each for each in heard if not isinstance(each, Heartbeat)]
    is_told = len(faults) == 1 and isinstance(faults[0], Fault) and faults[0].kind is FaultKind.FAILED
    _require(is_told and NO_FAMILY in str(faults), f"a rank that cannot build must say so once, and said {faults}")
    _require(bool(link.how_it_ended()), "a link that has ended does not say how")
    _end(link, deadline_s)


def _kill(link: RankLink, deadline_s: float) -> None:
    link.kill()
    link.kill()
    list(_all(link, deadline_s))
    with contextlib.suppress(OSError):
        link.send(bytes(encode_frame(Leave())))
    _end(link, deadline_s)


def _end_unasked(link: RankLink, deadline_s: float) -> None:
    """While a thread listens, as one always does."""
    with ThreadPoolExecutor(1) as threads:
        listening = threads.submit(lambda: list(link.frames()))
        _end(link, deadline_s)
        _wait(lambda: listening.exception(deadline_s), "frames() does not end with the link")


def _all(link: RankLink, deadline_s: float) -> Iterator[bytes]:
    threads = ThreadPoolExecutor(1)
    try:
        listening = threads.submit(lambda: list(link.frames()))
        return iter(_wait(lambda: listening.result(deadline_s), "frames() does not end when the rank has"))
    finally:
        threads.shutdown(wait=False)


def _end(link: RankLink, deadline_s: float) -> None:
    threads = ThreadPoolExecutor(1)
    for _ in range(2):  # is idempotent
        ending = threads.submit(link.end, deadline_s=0.1)
        _wait(lambda ending=ending: ending.result(deadline_s), "end() does not return")
    threads.shutdown(wait=False)


def _wait(call: Callable[[], Result], complaint: str) -> Result:
    try:
        return call()
    except WaitTimeoutError as late:
        raise ConformanceError(complaint) from late


def _require(is_so: object, complaint: str) -> None:
    if not is_so:
        raise ConformanceError(complaint)
