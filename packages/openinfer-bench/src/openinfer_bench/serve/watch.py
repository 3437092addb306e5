"""Looking at a server while it is under load: leaks show as a slope, lost requests as open ones when all have ended."""

import contextlib
import http.client
import threading
import time
from types import TracebackType
from typing import Any, Self

from openinfer_bench.processes import device_memory_mib, tree_memory
from openinfer_bench.serve.messages import Target
from openinfer_core import InvalidRequest, Refused

_GAUGES = {
    "open": "openinfer_requests_open",
    "running": "openinfer_num_requests_running",
    "waiting": "openinfer_num_requests_waiting",
    "kv_blocks_used": "openinfer_kv_blocks_used",
}
"""What a sample takes from `/metrics` -> the metric's name there."""
_METRICS_S = 10.0


class Watch:
    """Takes a sample of a server every so often, in a thread. A context manager.

    Args:
        target: the server; a sample has None for each gauge that its `/metrics` does not have.
        pid: its process; None if it is not known.
        every_s: seconds between samples; 0 takes none.

    Raises:
        InvalidRequest: samples are asked for and the process is not known.
    """

    def __init__(self, target: Target, pid: int | None, *, every_s: float) -> None:
        if every_s and pid is None:
            raise InvalidRequest("--watch needs the server's process: --model starts one, --server-pid names one")
        self.samples: list[dict[str, Any]] = []
        """`t_s`, `resident_mib`, `proportional_mib`, `device_mib`, and the gauges."""
        self._target = target
        self._pid = pid
        self._every_s = every_s
        self._begin_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="openinfer-watch", daemon=True)

    def __enter__(self) -> Self:
        if self._every_s:
            self._sample()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._every_s:
            self._thread.join()
            self._sample()

    def summary(self) -> str:
        """Memory and open requests at the first, the middle and the last sample."""
        shown = (self.samples[0], self.samples[len(self.samples) // 2], self.samples[-1])
        lines = [
            f"{sample['t_s']:>8.0f} s {sample['resident_mib']:>10.1f} MiB resident "
            f"{'-' if sample['device_mib'] is None else format(sample['device_mib'], ',.0f'):>10} MiB on the device "
            f"{'-' if sample['open'] is None else format(sample['open'], '.0f'):>5} requests open"
            for sample in shown
        ]
        return "\n".join(lines)

    def _look(self) -> None:
        while not self._ended.wait(self._every_s):
            self._sample()

    def _sample(self) -> None:
        if self._pid is None:
            return
        try:
            memory = tree_memory(self._pid)
        except Refused:
            if self.samples:  # the server has ended: what it did to requests is told elsewhere
                return
            raise
        self.samples.append(
            {
                "t_s": round(time.monotonic() - self._begin_s, 1),
                "resident_mib": memory.resident_mib,
                "proportional_mib": memory.proportional_mib,
                "device_mib": device_memory_mib(),
                **_gauges(self._target),
            }
        )


def _gauges(target: Target) -> dict[str, float | None]:
    values = read_metrics(target)
    return {name: values.get(metric) for name, metric in _GAUGES.items()}


def read_metrics(target: Target) -> dict[str, float]:
    """Name -> value of a server's `/metrics`, of several series with one name the last; empty if it does not answer."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=_METRICS_S)
    try:
        connection.request("GET", f"{target.path}/metrics", headers=target.headers)
        text = connection.getresponse().read().decode(errors="replace")
    except OSError:
        text = ""
    finally:
        connection.close()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if " " in line and not line.startswith("#")]
    found: dict[str, float] = {}
    for series, value in lines:
        with contextlib.suppress(ValueError):  # a page of another kind
            found[series.partition("{")[0]] = float(value)
    return found
