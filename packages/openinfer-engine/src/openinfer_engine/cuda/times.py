"""`StepTimes`: when a GPU began and ended each step, for a trace."""

from collections.abc import Callable
from typing import Any

from openinfer_core.scheduling import StepPlan
from openinfer_engine.tracing.trace import DEVICE, Span, Tracer
from openinfer_kernels.cuda.common.graphs import Stream, Timer


class StepTimes:
    """Marks the stream around each step if a tracer is on; nothing is waited for."""

    def __init__(self, stream: Stream, tracer: Tracer) -> None:
        self._tracer = tracer
        self._timer: Timer | None = None
        if tracer.is_on:
            with stream:
                self._timer = Timer(tracer.clock)

    def begin(self, plan: StepPlan) -> Callable[[], Callable[[], None]]:
        """Marks a step's beginning; returns what marks its end, which returns what tells the tracer once it is over."""
        timer = self._timer
        if timer is None:
            return _no_end
        begin = timer.mark()

        def end() -> Callable[[], None]:
            mark = timer.mark()
            return lambda: self._tell(timer, plan, begin, mark)

        return end

    def _tell(self, timer: Timer, plan: StepPlan, begin: Any, end: Any) -> None:
        begin_s, end_s = timer.seconds(begin), timer.seconds(end)
        details = {"step": plan.step, "rows": plan.num_rows, "tokens": plan.num_tokens}
        self._tracer.add(Span(DEVICE, "step", begin_s, end_s, details))


def _nothing() -> None:
    """No tracer listens."""


def _no_end() -> Callable[[], None]:
    return _nothing
