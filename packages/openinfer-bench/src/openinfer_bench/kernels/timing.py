"""Timing a case: copies of its arrays take turns in a CUDA graph, to measure neither host time nor a warm L2."""

import statistics
from typing import Any

from openinfer_bench.kernels.cases import Call, Case, Filler
from openinfer_kernels.cuda import CudaOps
from openinfer_kernels.cuda.common.libraries import cupy

_L2_TIMES = 2
"""All copies of a case together are at least so many times the L2 cache, where `_MOST_COPIES` allows."""
_MOST_COPIES = 32
_LEAST_CALLS = 20
_REPLAYS = 5
_LONGEST_S = 0.02
"""Of one replay, roughly: long cases need fewer calls."""


class Timer:
    """Times cases on one device."""

    def __init__(self, ops: CudaOps) -> None:
        self._ops = ops
        self._fill = Filler(ops)
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def time_s(self, case: Case) -> float:
        """Seconds of one call: the median over replays of a graph of calls."""
        with self._stream:
            calls = [case.prepare(self._ops, self._fill) for _ in range(self._num_copies(case))]
            with self._ops.tuning():
                calls[0]()
            once_s = self._replay_s(self._captured(calls[:1]))
            num_calls = max(len(calls), min(_LEAST_CALLS, int(_LONGEST_S / once_s)))
            graph = self._captured([calls[index % len(calls)] for index in range(num_calls)])
            self._replay_s(graph)
            return statistics.median(self._replay_s(graph) for _ in range(_REPLAYS)) / num_calls

    def _num_copies(self, case: Case) -> int:
        wanted = -(-_L2_TIMES * self._ops.device.l2_bytes // case.bytes)
        return min(_MOST_COPIES, max(1, wanted))

    def _captured(self, calls: list[Call]) -> Any:
        self._stream.begin_capture()
        for call in calls:
            call()
        return self._stream.end_capture()

    def _replay_s(self, graph: Any) -> float:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        graph.launch()
        end.record()
        end.synchronize()
        return cupy.cuda.get_elapsed_time(begin, end) / 1e3
