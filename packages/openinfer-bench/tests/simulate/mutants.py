"""Mistakes in every layer of the stack, which the simulator must find; `main` is a scenario with one of them."""

# ruff: noqa: SLF001 - a mutant changes what is private

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from openinfer_bench.simulate import scenario
from openinfer_core.testing.simulation.world import World

MUTANTS: dict[str, Callable[[World], None]] = {}


def mutant(function: Callable[[World], None]) -> Callable[[World], None]:
    MUTANTS[function.__name__] = function
    return function


def main(world: World, *, mutant: str, **options: Any) -> dict[str, Any]:
    MUTANTS[mutant](world)
    return scenario.main(world, **options)


@mutant
def lost_wake_up(world: World) -> None:
    """Now and then the task that reads the engine's events is not woken."""
    from openinfer_core.process.mailbox import Mailbox

    wake = Mailbox._wake

    def forgetful(self: Mailbox) -> None:
        if world.random.random() > 0.05:
            wake(self)

    Mailbox._wake = forgetful  # type: ignore[method-assign]


@mutant
def ignored_deadline(world: World) -> None:
    from openinfer_core.process.deadlines import Deadlines

    def none_is_late(self: Deadlines, now_s: float, open_requests: Any) -> Iterator[Any]:
        return iter(())

    Deadlines.take_late = none_is_late  # type: ignore[method-assign]


@mutant
def usage_without_stop_token(world: World) -> None:
    from openinfer_core import ledger

    settle = ledger._settle

    def short(event: Any, account: Any) -> Any:
        import msgspec

        settled = settle(event, account)
        return msgspec.structs.replace(settled, completion_tokens=account.completion_tokens)

    ledger._settle = short


@mutant
def torn_stream(world: World) -> None:
    """What was held back for a slow reader is lost when it reads on."""
    from openinfer_server.http.writers import DirectWriter

    resume = DirectWriter.resume

    def torn(self: DirectWriter) -> None:
        self._held.clear()
        resume(self)

    DirectWriter.resume = torn  # type: ignore[method-assign]


@mutant
def another_streams_tokens(world: World) -> None:
    """Two streams of one wake-up are exchanged, seldom."""
    from openinfer_core.events import Tokens
    from openinfer_server.output.engine_link import EngineLink

    dispatch = EngineLink.dispatch

    def mixed(self: EngineLink, events: list[Any]) -> None:
        tokens = [index for index, event in enumerate(events) if type(event) is Tokens]
        if len(tokens) > 1 and world.random.random() < 0.01:
            import msgspec

            first, second = events[tokens[0]], events[tokens[1]]
            events = [*events]
            events[tokens[0]] = msgspec.structs.replace(first, token_ids=second.token_ids)
        dispatch(self, events)

    EngineLink.dispatch = mixed  # type: ignore[method-assign]


@mutant
def leaked_block(world: World) -> None:
    from openinfer_kv_cache.blocks import BlockPool

    release = BlockPool.release

    def leaky(self: BlockPool, block_ids: Any) -> None:
        release(self, block_ids[1:] if len(block_ids) > 8 and world.random.random() < 0.02 else block_ids)

    BlockPool.release = leaky  # type: ignore[method-assign]


@mutant
def forgotten_salt(world: World) -> None:
    from openinfer_kv_cache.digest import PrefixHasher

    root = PrefixHasher.root

    def unsalted(self: Any, **names: Any) -> Any:
        return root(self, **{**names, "cache_salt": None})

    PrefixHasher.root = unsalted  # type: ignore[method-assign]


@mutant
def block_sealed_early(world: World) -> None:
    """A block can be found before its last token is computed."""
    from openinfer_kv_cache.sequence import BlockSequence

    seal = BlockSequence.seal

    def early(self: BlockSequence, num_computed_tokens: int) -> Any:
        return seal(self, min(num_computed_tokens + 4, self.capacity_tokens))

    BlockSequence.seal = early  # type: ignore[method-assign]


@mutant
def landing_after_its_end(world: World) -> None:
    """A transfer that was cancelled or came too late still writes to blocks that others have by now."""
    from openinfer_kv_offload.transfer.block_transfer import BlockTransfer

    @contextlib.contextmanager
    def touching(self: BlockTransfer) -> Iterator[None]:
        yield

    BlockTransfer.touching = touching  # type: ignore[method-assign]


@mutant
def unchecked_checksum(world: World) -> None:
    from openinfer_kv_offload.format.checksum import BlockChecksum

    BlockChecksum.is_intact = lambda self, *what: True  # type: ignore[method-assign]


@mutant
def wrong_place_of_a_load(world: World) -> None:
    """The second block of a load goes where the third belongs."""
    from openinfer_engine.kv_tiers.port import PoolTierPort

    memory = PoolTierPort._memory

    def exchanged(self: PoolTierPort, places: Any) -> Any:
        places = list(places)
        if len(places) > 3:
            places[1], places[2] = places[2], places[1]
        return memory(self, places)

    load = PoolTierPort.load

    def loaded(self: PoolTierPort, found: Any, places: Any) -> Any:
        PoolTierPort._memory = exchanged  # type: ignore[method-assign]
        with contextlib.ExitStack() as undo:
            undo.callback(setattr, PoolTierPort, "_memory", memory)
            return load(self, found, places)

    PoolTierPort.load = loaded  # type: ignore[method-assign]


@mutant
def leaked_descriptor(world: World) -> None:
    from openinfer_kv_offload.disk.segment import Segment

    Segment.close_unused = lambda self: None  # type: ignore[method-assign]


@mutant
def preempted_for_ever(world: World) -> None:
    """What was preempted is not admitted again."""
    from openinfer_engine.scheduler.run_queue import RunQueue

    step_back = RunQueue._step_back

    def away(self: Any, sequence: Any) -> None:
        step_back(self, sequence)
        if world.random.random() < 0.2:
            self.preempted.remove(sequence)

    RunQueue._step_back = away  # type: ignore[method-assign]


@mutant
def impatient_drain(world: World) -> None:
    """A server that is asked to end tells those who wait that it has."""
    from openinfer_core.events import FailureKind
    from openinfer_server.output.engine_link import EngineLink

    drained = EngineLink.drained

    async def at_once(self: EngineLink) -> None:
        self.fail_all(FailureKind.SHUTDOWN, "the server is shutting down")
        await drained(self)

    EngineLink.drained = at_once  # type: ignore[method-assign]


@mutant
def queues_first_come_first_served(world: World) -> None:
    """All tenants wait in one line for the compiler, and for what reads and tokenizes."""
    from openinfer_core.fair_queue import FairQueue

    submit = FairQueue.submit

    def as_one(self: FairQueue, owner: str, work: Any, **options: Any) -> Any:
        return submit(self, "all", work, **options)

    FairQueue.submit = as_one  # type: ignore[method-assign]


@mutant
def mask_of_a_token_ago(world: World) -> None:
    """A matcher is not told the tokens of an event, seldom."""
    from openinfer_engine.grammars.row_masks import FollowedOutput

    follow = FollowedOutput.follow

    def forgetful(self: FollowedOutput, token_ids: Any) -> None:
        if world.random.random() >= 0.01:
            follow(self, token_ids)

    FollowedOutput.follow = forgetful  # type: ignore[method-assign]


@mutant
def our_fault_is_the_clients(world: World) -> None:
    """A guard process that was not there is told as a bad grammar."""
    from openinfer_core import InvalidRequest, Unavailable
    from openinfer_core.fair_queue import FairQueue

    submit = FairQueue.submit

    def blamed(self: FairQueue, owner: str, work: Any, **options: Any) -> Any:
        def blaming() -> Any:
            try:
                return work()
            except Unavailable as fault:
                raise InvalidRequest(str(fault), field="grammar") from fault

        return submit(self, owner, blaming, **options)

    FairQueue.submit = blamed  # type: ignore[method-assign]


@mutant
def bodies_decoded_on_the_event_loop(world: World) -> None:
    from openinfer_server.http.request import HttpRequest

    async def at_once(self: HttpRequest, work: Callable[[], Any], **_: Any) -> Any:
        return work()

    HttpRequest.aside = at_once  # type: ignore[method-assign]


@mutant
def double_terminal_event(world: World) -> None:
    """A message is said to have ended twice, seldom."""
    from openinfer_server.anthropic.builder import MessageBuilder
    from openinfer_server.anthropic.objects import MessageStop

    conclude = MessageBuilder.conclude

    def twice(self: MessageBuilder, choice: Any, reason: Any) -> None:
        conclude(self, choice, reason)
        if world.random.random() < 0.05:
            self._emit(MessageStop())

    MessageBuilder.conclude = twice  # type: ignore[method-assign]


@mutant
def number_of_an_event_taken_twice(world: World) -> None:
    """Two events of a response have one number, seldom."""
    from openinfer_server.responses.builder import ResponseBuilder

    take = ResponseBuilder.take

    def repeated(self: ResponseBuilder, deltas: Any, logprobs: Any = ()) -> None:
        if world.random.random() < 0.01:
            self._number -= 1
        take(self, deltas, logprobs)

    ResponseBuilder.take = repeated  # type: ignore[method-assign]


@mutant
def torn_frame(world: World) -> None:
    """What a frame begins with is lost when the rest of it comes in another piece, seldom."""
    from openinfer_core.process.wire import FrameBuffer

    feed = FrameBuffer.feed

    def torn(self: FrameBuffer, data: bytes) -> list[bytes]:
        if len(self) > 8 and world.random.random() < 0.02:
            del self._data[4:8]
        return feed(self, data)

    FrameBuffer.feed = torn  # type: ignore[method-assign]


@mutant
def links_sleep_over_what_is_unsent(world: World) -> None:
    """What a worker's socket did not take at once is sent with the next event, and no earlier."""
    from openinfer_core.process.links import LinkServer

    LinkServer._wake = lambda self: None  # type: ignore[method-assign]


@mutant
def worker_is_not_told_of_an_answer(world: World) -> None:
    """The task of a worker that reads the engine's events is not woken, seldom."""
    from openinfer_core.process.remote import RemoteEngine

    received = RemoteEngine.received

    def asleep(self: RemoteEngine, message: Any) -> None:
        from openinfer_core.process.wire import Events

        if isinstance(message, Events) and world.random.random() < 0.01:
            self._mailbox._events += message.events
            return
        received(self, message)

    RemoteEngine.received = asleep  # type: ignore[method-assign]


@mutant
def rank_out_of_step(world: World) -> None:
    """A rank is told one row less than rank 0, seldom."""
    from openinfer_engine.worker import process

    serve = process._serve

    def behind(worker: Any, share: Any, orders: Any) -> None:
        launch = worker.launch

        def launch_another(plan: Any) -> Any:
            import dataclasses

            if len(plan.slots) > 1 and world.random.random() < 0.01:
                plan = dataclasses.replace(plan, starts=plan.starts[::-1])
            return launch(plan)

        worker.launch = launch_another
        serve(worker, share, orders)

    process._serve = behind


@mutant
def worker_restart_leaks_a_descriptor(world: World) -> None:
    from openinfer_server.workers.group import WorkerGroup

    start = WorkerGroup._start_worker
    kept: list[Any] = []

    async def leaky(self: WorkerGroup, *arguments: Any) -> None:
        import socket

        kept.extend(socket.socketpair() for _ in range(2))
        await start(self, *arguments)

    WorkerGroup._start_worker = leaky  # type: ignore[method-assign]


@mutant
def dead_worker_is_not_replaced(world: World) -> None:
    from openinfer_server.workers.group import WorkerGroup

    async def mourned(self: WorkerGroup, worker: Any, what: str) -> None:
        self._workers.remove(worker)

    WorkerGroup._replace = mourned  # type: ignore[method-assign]


@mutant
def worker_replaced_for_ever(world: World) -> None:
    """Deaths of workers are not counted."""
    from openinfer_server.workers.group import WorkerGroup

    WorkerGroup._are_many_deaths = lambda self, deaths: False  # type: ignore[method-assign]


@mutant
def engine_outlives_its_server(world: World) -> None:
    """An engine does not notice that its parent has died."""
    from openinfer_core.process.engine_process import _ParentWatch

    _ParentWatch._watch = lambda self: None  # type: ignore[method-assign]


@mutant
def no_descriptor_and_no_pause(world: World) -> None:
    """A connection that finds no descriptor ends the acceptor."""
    from openinfer_server.http.acceptor import Acceptor

    Acceptor._go_on = lambda self: None  # type: ignore[method-assign]


@mutant
def worker_joins_on_its_loop(world: World) -> None:
    """A worker that starts waits in its event loop for an engine that is short of memory."""
    from openinfer_server.workers import worker

    class OnTheLoop:
        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def to_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
            return function(*arguments)

    worker.asyncio = OnTheLoop()  # type: ignore[attr-defined]


@mutant
def leaked_budget(world: World) -> None:
    """What a request held of a server's budget is not given back, seldom."""
    from openinfer_server.limits.shared_budget import SharedBudget

    give_back = SharedBudget.give_back

    def forgetful(self: SharedBudget, owner: str, amount: int) -> None:
        if world.random.random() >= 0.02:
            give_back(self, owner, amount)

    SharedBudget.give_back = forgetful  # type: ignore[method-assign]


@mutant
def budget_of_a_dead_worker(world: World) -> None:
    """What a worker held that has died is counted for ever."""
    from openinfer_server.limits.worker_table import WorkerTable

    WorkerTable.clear = lambda self, worker: None  # type: ignore[method-assign]


@mutant
def account_left_open(world: World) -> None:
    """The ledger goes on with a request that has failed."""
    from openinfer_core.events import Failed
    from openinfer_core.ledger import Ledger

    admit = Ledger._admit

    def kept(self: Ledger, event: Any) -> Any:
        account = self._open.get(event.request_id)
        admitted = admit(self, event)
        if admitted is not None and isinstance(event, Failed) and account is not None:
            self._open[event.request_id] = account
        return admitted

    Ledger._admit = kept  # type: ignore[method-assign]


@mutant
def usage_under_preemption(world: World) -> None:
    """A token of a request that was preempted counts twice."""
    from openinfer_core.events import Tokens
    from openinfer_core.ledger import Ledger
    from openinfer_engine.scheduler.run_queue import RunQueue

    admit, step_back = Ledger._admit, RunQueue._step_back
    preempted: set[Any] = set()

    def noting(self: RunQueue, sequence: Any) -> None:
        preempted.add(sequence.request_id)
        step_back(self, sequence)

    def twice(self: Ledger, event: Any) -> Any:
        account = self._open.get(event.request_id)
        if account is not None and isinstance(event, Tokens) and event.request_id in preempted:
            preempted.remove(event.request_id)
            account.completion_tokens += 1
        return admit(self, event)

    Ledger._admit, RunQueue._step_back = twice, noting  # type: ignore[method-assign]


@mutant
def cached_tokens_of_a_resumption(world: World) -> None:
    """A request that was preempted is told what was cached of its prompt and its output."""
    from openinfer_core.events import Scheduled
    from openinfer_core.ledger import Ledger
    from openinfer_engine.scheduler.run_queue import RunQueue

    admit, start = Ledger._admit, RunQueue._start

    def told_again(self: Ledger, event: Any) -> Any:
        account = self._open.get(event.request_id)
        if account is not None and isinstance(event, Scheduled):
            account.cached_tokens = event.cached_tokens
        return admit(self, event)

    def start_anew(self: RunQueue, sequence: Any, cached_tokens: int) -> Any:
        sequence.has_run = False
        return start(self, sequence, cached_tokens)

    Ledger._admit, RunQueue._start = told_again, start_anew  # type: ignore[method-assign]


@mutant
def starved_tenant(world: World) -> None:
    """One tenant is hardly ever served while another runs or waits."""
    from openinfer_core.scheduling.waiting_queue import WaitingQueue

    following = WaitingQueue.next

    def others_first(self: Any, full: Any) -> Any:
        item = following(self, {*full, "b"})
        is_passed_over = item is not None and item.request.tenant == "b" and world.random.random() > 1 / 400
        return None if is_passed_over else item

    WaitingQueue.next = others_first  # type: ignore[method-assign]


@mutant
def deadline_by_the_wall_clock(world: World) -> None:
    import time

    from openinfer_core.process.host import LoopRunner

    begin = LoopRunner.__init__

    def by_the_wall(self: LoopRunner, loop: Any) -> None:
        begin(self, loop, clock=time.time)

    LoopRunner.__init__ = by_the_wall  # type: ignore[method-assign]


@mutant
def no_time_to_try_again(world: World) -> None:
    """A refusal that passes does not say when."""
    from openinfer_server.http.api_errors import ApiError

    begin = ApiError.__init__

    def without(self: ApiError, *arguments: Any, headers: Any = (), **named: Any) -> None:
        begin(self, *arguments, headers=tuple(each for each in headers if each[0] != b"retry-after"), **named)

    ApiError.__init__ = without  # type: ignore[method-assign]


@mutant
def connection_left_in_its_table(world: World) -> None:
    """A connection that has ended is counted on, seldom."""
    from openinfer_server.http.connections import ConnectionTable

    leave = ConnectionTable.leave

    def forgetful(self: ConnectionTable, slot: Any) -> None:
        if world.random.random() >= 0.02:
            leave(self, slot)

    ConnectionTable.leave = forgetful  # type: ignore[method-assign]


@mutant
def block_evicted_while_it_is_used(world: World) -> None:
    """A block that is found again stays where blocks are given up from."""
    from openinfer_kv_cache.eviction.fair import FairLeastRecentlyUsed

    reuse = FairLeastRecentlyUsed.reuse

    def forgetful(self: FairLeastRecentlyUsed, block_ids: Any) -> None:
        reuse(self, block_ids[1:] if len(block_ids) > 1 and world.random.random() < 0.05 else block_ids)

    FairLeastRecentlyUsed.reuse = forgetful  # type: ignore[method-assign]


@mutant
def record_of_another_block(world: World) -> None:
    """The disk tier reads the record before the one that was asked for, seldom, and takes its word for what it is."""
    from openinfer_kv_offload.disk import segment
    from openinfer_kv_offload.format.checksum import BlockChecksum

    read = segment.SegmentFile.read

    def beside(self: Any, offset_bytes: int, into: memoryview) -> None:
        is_there = offset_bytes >= len(into) and world.random.random() < 0.1
        read(self, offset_bytes - len(into) if is_there else offset_bytes, into)

    segment.SegmentFile.read = beside  # type: ignore[method-assign]
    BlockChecksum.is_intact = lambda self, *what: True  # type: ignore[method-assign]


@mutant
def tiers_end_in_their_own_time(world: World) -> None:
    """The end of an engine waits for its tiers, and write-behind for each of its threads, however slow a disk is."""
    from openinfer_kv_cache.tiers.closing import BackgroundCall
    from openinfer_kv_offload.stack.write_behind import WriteBehindWorker

    def waited_for(self: BackgroundCall, timeout_s: float) -> bool:
        self._thread.join()
        return True

    def one_by_one(self: WriteBehindWorker, flush_s: float, timeout_s: float) -> bool:
        self.flush(self._timeout_s)
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(self._timeout_s)
        return True

    BackgroundCall.wait = waited_for  # type: ignore[method-assign]
    WriteBehindWorker.close = one_by_one  # type: ignore[method-assign]
