"""What the first worker and a further one say to each other, one JSON object per line.

    first ──stdin──► WorkerLaunch, then AskCounts, Others; end of file: drain and end
    further ──stdout──► Ready, then Counts, AskOthers, WantLarge

`/metrics` of any worker answers for all: the first asks each further one; a further one asks the first for all others.
"""

from typing import TypeAlias

import msgspec

from openinfer_core.process.remote import EngineAccess
from openinfer_server.limits.worker_table import TableAccess
from openinfer_server.observability.metrics_snapshot import MetricsSnapshot
from openinfer_server.options import ServerOptions

MAX_LINE_BYTES = 16 * 2**20


class WorkerLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First line to a further worker.

    Attributes:
        options: with the port that the first worker listens on.
        large: paths of the sockets on which large requests are taken; none where they are answered like others.
        takes_large: that of them on which this worker takes them, and nothing elsewhere; empty for others.
    """

    engine: EngineAccess
    model_dir: str
    table: TableAccess
    options: ServerOptions
    large: tuple[str, ...] = ()
    takes_large: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker takes connections."""


class AskCounts(msgspec.Struct, frozen=True, tag="ask_counts"):
    """Asks a further worker what it counted."""


class Counts(msgspec.Struct, frozen=True, tag="counts"):
    """The answer; answers come in the order of the questions."""

    snapshot: MetricsSnapshot


class AskOthers(msgspec.Struct, frozen=True, tag="ask_others"):
    """Asks the first worker what all others counted, and says what this one did."""

    own: MetricsSnapshot


class Others(msgspec.Struct, frozen=True, tag="others"):
    """The answer; None if one of them did not say."""

    snapshots: list[MetricsSnapshot] | None


class WantLarge(msgspec.Struct, frozen=True, tag="want_large"):
    """A large request has come, and no worker takes them."""


ToWorker: TypeAlias = AskCounts | Others
FromWorker: TypeAlias = Ready | Counts | AskOthers | WantLarge

to_worker_decoder: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)
from_worker_decoder: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)


def line_of(message: WorkerLaunch | ToWorker | FromWorker) -> bytes:
    return msgspec.json.encode(message) + b"\n"
