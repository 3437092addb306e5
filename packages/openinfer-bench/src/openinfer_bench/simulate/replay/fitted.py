"""`openinfer simulate fit --offline FILE … --frontend FILE`: the times that a replay runs with, as one JSON file.

    steps       `StepLatency`, fitted to results of `openinfer bench offline`
    streaming   a step's frame and each token of it, from a result of `openinfer bench frontend`
    host        what prompts take on the host (`host_times.py`), measured here, or elsewhere (`--host-only`)

Results of served runs are not among what it takes. Without `--offline` and `--host-only` it measures what computing
takes on the processors here, which every simulation charges (`simulate/cpu.py`), into `--output` or its own table.
"""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from openinfer_bench.simulate.latency import EngineLimits, FitOrigin, FittedRow, StepLatency
from openinfer_bench.simulate.latency_fit import fit_steps, read_offline
from openinfer_bench.simulate.replay.host_times import HostTimes, measure
from openinfer_core import InvalidRequest
from openinfer_core.provenance import provenance


class StreamingTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of the server's processor for a step's tokens, and on their way."""

    wake_s: float
    """Of a step's frame."""
    streamed_token_s: float
    """Of each token, on a stream of its own."""
    link_s: float
    """From the engine to the client, beside these."""


class MeasuredHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`HostTimes` of a machine."""

    machine: str
    commit: str
    times: HostTimes


class FittedServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `simulate fit` writes and `simulate replay` reads."""

    commit: str
    """Of the program that fitted."""
    origins: list[FitOrigin]
    limits: EngineLimits
    steps: StepLatency
    streaming: StreamingTimes
    host: MeasuredHost
    rows: list[FittedRow]
    """How well `steps` fits."""


def read_fitted(path: Path) -> FittedServer:
    """Raises `InvalidRequest`: the file is none that `simulate fit` wrote."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FittedServer)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{path} is no result of `simulate fit --offline`: {error}", field="fit") from error


def run(argv: Sequence[str]) -> int:
    """Fits, says how well, and writes the file."""
    arguments = _parser().parse_args(argv)
    if arguments.host_only:
        _write(arguments.output, MeasuredHost(machine=_machine(), commit=provenance().commit, times=measure()))
        return 0
    if not arguments.offline or arguments.frontend is None:
        raise InvalidRequest("a fit needs --offline and --frontend, results of these benchmarks", field="offline")
    results = [read_offline(Path(file)) for file in arguments.offline]
    steps, rows = fit_steps(results)
    origin, streaming = read_frontend(Path(arguments.frontend))
    host = (
        MeasuredHost(machine=_machine(), commit=provenance().commit, times=measure())
        if arguments.host is None
        else _read_host(Path(arguments.host))
    )
    fitted = FittedServer(
        commit=provenance().commit,
        origins=[*(result.origin for result in results), origin],
        limits=results[0].limits,
        steps=steps,
        streaming=streaming,
        host=host,
        rows=rows,
    )
    sys.stdout.write(_table(rows))
    _write(arguments.output, fitted)
    return 0


def read_frontend(path: Path) -> tuple[FitOrigin, StreamingTimes]:
    """Where a result of `openinfer bench frontend` is from, and its times: least squares of relative errors.

    The server's processor time per token is `streamed_token_s + wake_s / streams`, as a step has a token per stream.

    Raises:
        InvalidRequest: the file is none.
    """
    try:
        report: Any = msgspec.json.decode(path.read_bytes())
        rows = [row for row in report["rows"] if row.get("answer", "text") == "text"]
        streams = np.array([row["streams"] for row in rows], np.float64)
        seconds = np.array([row["server_cpu_s_per_100k"] for row in rows], np.float64) / 1e5
        lag_s = float(rows[0]["lag_p50_ms"]) / 1e3
    except (OSError, KeyError, IndexError, TypeError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{path} is no result of `bench frontend`: {error!r}", field="frontend") from error
    matrix = np.stack([1 / seconds, 1 / streams / seconds], axis=1)
    token_s, wake_s = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)[0].tolist()
    if wake_s < 0:
        token_s, wake_s = float(np.median(seconds)), 0.0
    link_s = max(0.0, lag_s - wake_s - token_s * streams[0] / 2)
    times = {"wake_s": wake_s, "streamed_token_s": token_s, "link_s": link_s}
    streaming = StreamingTimes(**{name: float(f"{value:.3g}") for name, value in times.items()})
    return FitOrigin(file=path.name, commit=report.get("commit", ""), date=report.get("date", "")), streaming


def _read_host(path: Path) -> MeasuredHost:
    try:
        return msgspec.json.decode(path.read_bytes(), type=MeasuredHost)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{path} is no result of `simulate fit --host-only`: {error}", field="host") from error


def _machine() -> str:
    return f"{os.cpu_count()} x {platform.machine()}, Python {platform.python_version()}"


def _write(path: str, result: msgspec.Struct) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def _table(rows: Sequence[FittedRow]) -> str:
    lines = [f"{'':>26} {'measured ms':>12} {'fitted ms':>12} {'ratio':>7}"]
    for row in rows:
        ratio = row.fitted_s / row.measured_s
        lines.append(f"{row.what:>26} {1e3 * row.measured_s:>12.3f} {1e3 * row.fitted_s:>12.3f} {ratio:>7.3f}")
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openinfer simulate fit",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--offline", nargs="+", default=[], metavar="FILE", help="results of bench offline on one kind of GPU")
    add("--frontend", metavar="FILE", help="a result of bench frontend, on the machine that serves")
    add("--host", metavar="FILE", help="what --host-only wrote there; by default it is measured here")
    add("--host-only", action="store_true", help="measure what prompts take on this host, and nothing else")
    add("--output", required=True, metavar="FILE", help="where the result goes")
    return parser
