"""Memory of a server's processes, as Linux tells it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from openinfer_core import Refused

_KIB_PER_MIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMemory:
    """Of a process and everything it started."""

    processes: int
    resident_mib: float
    """Sum of resident sets (RSS): pages that two processes share count twice."""
    proportional_mib: float
    """Sum of proportional sets (PSS): shared pages count once."""


def tree_memory(pid: int) -> TreeMemory:
    """Memory of `pid` and its descendants now.

    Raises:
        Refused: not on Linux, or the process has ended.
    """
    if not sys.platform.startswith("linux"):
        raise Refused("the memory of processes is read from /proc, which Linux has")
    try:
        found = [_rollup(each) for each in descendants(pid)]
    except OSError as error:
        raise Refused(f"process {pid} cannot be looked at: {error}") from error
    return TreeMemory(
        processes=len(found),
        resident_mib=round(sum(resident for resident, _ in found) / _KIB_PER_MIB, 1),
        proportional_mib=round(sum(proportional for _, proportional in found) / _KIB_PER_MIB, 1),
    )


def tree_processor_s(pid: int) -> float:
    """Processor time of `pid` and its descendants so far; of those that have ended it is missing.

    Raises:
        Refused: not on Linux, or the process has ended.
    """
    if not sys.platform.startswith("linux"):
        raise Refused("the processor time of processes is read from /proc, which Linux has")
    try:
        ticks = sum(_ticks(each) for each in descendants(pid))
    except OSError as error:
        raise Refused(f"process {pid} cannot be looked at: {error}") from error
    return ticks / os.sysconf("SC_CLK_TCK")


def device_memory_mib() -> float | None:
    """Memory in use on the first GPU that this process may see, by everyone; None without `nvidia-smi`."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    command = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout)  # noqa: S603
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def descendants(pid: int) -> list[int]:
    """`pid` first, then the processes that it and they have started; raises `OSError` if one ends meanwhile."""
    found = [pid]
    for thread in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
            found += descendants(int(child))
    return found


def _ticks(pid: int) -> int:
    """Of processor time, the system's and its own."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])


def _rollup(pid: int) -> tuple[int, int]:
    """RSS and PSS in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    fields = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines[1:])}
    return int(fields["Rss"]), int(fields["Pss"])
