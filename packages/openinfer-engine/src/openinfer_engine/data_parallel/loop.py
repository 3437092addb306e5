"""`DataParallelLoop`: the step loops of data-parallel ranks as one engine.

    step():  each rank's loop: plan N+1 ─► all ranks: launch N+1, those without a plan join it ─► each: wait N, apply N

Each rank has a scheduler, a pool, a prefix cache and tiers of its own, and gets requests by `RankRouter`. A request
stays with its rank: preempted, it is computed again there, where its prefix is.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor

import msgspec

from openinfer_core import EngineInfo, EngineStats, Failed, Finished, GenerateRequest, RequestId, TokenEvent, Tokens
from openinfer_core.control import ControlCommand, FlushCache, refusal_of
from openinfer_core.replicas.totals import info_of_all, stats_of_all
from openinfer_engine.data_parallel.routing import RankRouter
from openinfer_engine.data_parallel.runner import StepRound
from openinfer_engine.loop import BegunStep, StepLoop
from openinfer_engine.worker.runner import raise_first


class DataParallelLoop:
    """Implements `openinfer_core.process.host.EngineLoop`.

    Args:
        loops: of the ranks, whose runners are those of `step_round`; closed with it.
        step_round: launches their plans together.
        router: chooses a rank for each request.
    """

    def __init__(self, loops: Sequence[StepLoop], *, step_round: StepRound, router: RankRouter) -> None:
        self._loops = list(loops)
        self._round = step_round
        self._router = router
        info = info_of_all([loop.info for loop in loops])
        self._info = msgspec.structs.replace(info, max_waiting=loops[0].info.max_waiting)

    @property
    def info(self) -> EngineInfo:
        """Blocks and sequences of all ranks together; each rank's queue has `max_waiting` places."""
        return self._info

    @property
    def loops(self) -> Sequence[StepLoop]:
        """Of each rank."""
        return self._loops

    @property
    def busy(self) -> bool:
        return any(loop.busy for loop in self._loops)

    def rank_of(self, request_id: RequestId) -> int | None:
        """The rank that has a request; None for one that is not open."""
        return self._router.rank_of(request_id)

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        rank = self._router.choose(request)
        return self._noted(self._loops[rank].submit(request))

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        rank = self._router.rank_of(request_id)
        events = [] if rank is None else self._noted(self._loops[rank].abort(request_id))
        self._router.ended(request_id)
        return events

    def control(self, command: ControlCommand) -> list[TokenEvent]:
        """Has all ranks obey; they can flush their caches."""
        if not isinstance(command, FlushCache):
            raise refusal_of(command, self._info.capabilities)
        events = [event for loop in self._loops for event in loop.control(command)]
        self._router.forget()
        return self._noted(events)

    def step(self) -> list[TokenEvent]:
        """Plans for all ranks, launches their step, then waits for the one before it.

        Raises:
            PluginFault: a scheduler raised, planned what cannot be, or has unfinished requests and nothing to run.
            GroupBroken: a rank has failed.
        """
        begun = [(loop, loop.begin_step()) for loop in self._loops if loop.busy]
        is_running = self._round.launch() or any(each.before is not None for _, each in begun)
        self._rest(begun, is_running=is_running)
        return self._noted([event for loop, each in begun for event in loop.end_step(each)])

    def reconcile(self, open_ids: AbstractSet[RequestId]) -> list[TokenEvent]:
        events = [
            event
            for rank, loop in enumerate(self._loops)
            for event in loop.reconcile(open_ids & self._router.open_ids(rank))
        ]
        return self._noted(events)

    def stats(self) -> EngineStats:
        """The sum over all ranks."""
        return stats_of_all([loop.stats() for loop in self._loops])

    def close(self) -> None:
        # At a time: ranks leave a group together.
        with ThreadPoolExecutor(len(self._loops)) as threads:
            closing = [threads.submit(loop.close) for loop in self._loops]
        raise_first(closing)

    def _rest(self, begun: Iterable[tuple[StepLoop, BegunStep]], *, is_running: bool) -> None:
        """Of ranks that have requests and nothing to run: only the first waits, and only if no other rank runs."""
        waits = not is_running
        for loop in [loop for loop, each in begun if each.is_idle]:
            loop.rest(waits=waits)
            waits = False

    def _noted(self, events: list[TokenEvent]) -> list[TokenEvent]:
        for event in events:
            if isinstance(event, Finished | Failed):
                self._router.ended(event.request_id)
            elif isinstance(event, Tokens):
                self._router.shown(event.request_id)
        return events
