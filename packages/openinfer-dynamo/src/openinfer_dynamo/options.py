"""`DynamoOptions`: what a user can set about the worker, in one frozen Struct."""

import re
from enum import StrEnum

import msgspec

from openinfer_core import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST_PERIOD_S = 60.0


class Role(StrEnum):
    """What a worker does, by Dynamo's names (`dynamo.common.constants.DisaggregationMode`)."""

    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"


class DiscoveryBackend(StrEnum):
    """Where frontends find workers."""

    ETCD = "etcd"
    FILE = "file"
    """A folder: `DYN_FILE_KV`."""
    KUBERNETES = "kubernetes"
    MEM = "mem"


class RequestPlane(StrEnum):
    """How requests come from frontends."""

    TCP = "tcp"
    NATS = "nats"


class EventPlane(StrEnum):
    """How KV events and load reach routers."""

    ZMQ = "zmq"
    NATS = "nats"


class DynamoOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the worker is known to Dynamo. Addresses of its planes are Dynamo's own variables (`DYN_*`, `ETCD_*`).

    Raises:
        InvalidRequest: a value is out of range; `field` names it.
    """

    namespace: str = "dynamo"
    component: str = ""
    """Name of this kind of worker; empty: prefill for those of that role, backend for others."""
    endpoint: str = "generate"
    served_model_name: str = ""
    """What clients call the model; empty: the name of its folder, or of its repository."""
    role: Role = Role.AGGREGATED
    """What of a request it does: agg all, prefill its prompt, decode the rest, both of which need --kv-transfer."""
    discovery_backend: DiscoveryBackend = DiscoveryBackend.ETCD
    """Where frontends find workers; file is a folder (DYN_FILE_KV), for one machine."""
    request_plane: RequestPlane = RequestPlane.TCP
    event_plane: EventPlane | None = None
    """Empty: Dynamo's own choice."""
    endpoint_types: str = "chat,completions"
    """APIs that the frontend offers for the model."""
    tool_call_parser: str = ""
    """Dynamo's parser of tool calls, in its frontend."""
    reasoning_parser: str = ""
    """Dynamo's parser of reasoning, in its frontend."""
    router_events: bool = True
    """Whether the worker tells Dynamo's routers which prefixes it has cached."""
    load_period_s: float = 0.5
    """Seconds between two reports of how full the KV pool is."""

    def __post_init__(self) -> None:
        for name in ("namespace", "component", "endpoint"):
            value = getattr(self, name)
            if not _NAME.fullmatch(value) and (value or name != "component"):
                raise InvalidRequest(f"{name} is {value!r}; it must have 1 to 64 letters, digits, - and _", field=name)
        if not 0.05 <= self.load_period_s <= _LONGEST_PERIOD_S:  # also refuses NaN
            raise InvalidRequest(f"load_period_s must be in 0.05 .. {_LONGEST_PERIOD_S:g}", field="load_period_s")

    @property
    def worker_component(self) -> str:
        """Dynamo's frontends find workers of one role by their component."""
        return self.component or ("prefill" if self.role is Role.PREFILL else "backend")
