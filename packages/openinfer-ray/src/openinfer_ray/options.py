"""`RayOptions`: what a user can set about replicas, in one frozen Struct."""

import re

import msgspec

from openinfer_core import InvalidRequest
from openinfer_ray.replica_spec import Routing
from openinfer_ray.scaling import ScaleLimits
from openinfer_ray.shares import AUTO, parse_shares

LOCAL = "local"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_MOST_REPLICAS = 1024
_MOST_SERVERS = 256
_MOST_CPUS = 1024
_MOST_WAITING_TOKENS = 10**9
_LONGEST_PERIOD_S = 3600.0
_LONGEST_SCALE_S = 86_400.0


def is_cluster(address: str) -> bool:
    """Whether it may name a cluster that runs: auto, or HOST:PORT."""
    return bool(address) and "://" not in address and address != LOCAL


class RayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas there are, and where.

    Raises:
        InvalidRequest: a value is out of range; `field` names it.
    """

    replicas: int = 1
    """Engines, each with --tensor-parallel-size GPUs, of one node unless --ranks-per-node says otherwise."""
    max_replicas: int | None = None
    """Replicas at most: more than --replicas while tokens wait; by default there are always as many."""
    scale_waiting_tokens: int = 16384
    """Tokens that wait, per replica, beyond which there are more replicas."""
    scale_up_after_s: float = 10.0
    """Seconds for which more must have waited before there are more replicas."""
    scale_down_after_s: float = 300.0
    """Seconds for which nothing must have waited, and one replica less would have done, before there is one less."""
    ranks_per_node: str | None = None
    """Ranks of a replica on one node; the others are on other nodes and join over TCP. N: on each, N+N+...: on the node
    of the replica and on the others, auto: on as few nodes as GPUs allow. By default all are on one node."""
    replica_cpus: int = 1
    """CPUs that Ray keeps for each replica, on each of its nodes."""
    replica_routing: Routing = Routing.KV_EVENTS
    """By what it is known what each replica holds: kv-events (it says so, which needs pyzmq), or sent (what was sent
    there)."""
    replica_token_file: str = ""
    """The secret that the server and the replicas show each other, at this path on every node; empty: one is drawn, and
    reaches the replicas through Ray."""
    replica_health_period_s: float = 2.0
    """Seconds between two looks of Ray Serve at a replica; after three bad ones it is replaced."""
    replica_timeout_s: float = 10.0
    """Seconds that a replica may take to answer before the server, or Ray Serve, takes it for gone."""
    ray_address: str = "auto"
    """Of the cluster: auto for the one that runs on this machine, HOST:PORT, or local for a new one, on this machine
    alone, that ends with the command."""
    ray_servers: int = 0
    """Servers that Ray Serve places, with its own proxies before them, at --host and --port; 0: this process serves."""
    ray_app: str = "openinfer"
    """Name of the application in Ray Serve."""

    def __post_init__(self) -> None:
        for name, most in (("replicas", _MOST_REPLICAS), ("replica_cpus", _MOST_CPUS)):
            if not 1 <= getattr(self, name) <= most:
                raise InvalidRequest(f"{name} must be in 1 .. {most}", field=name)
        self._check_shares()
        if not 0 <= self.ray_servers <= _MOST_SERVERS:
            raise InvalidRequest(f"ray_servers must be in 0 .. {_MOST_SERVERS}", field="ray_servers")
        self._check_scaling()
        for name in ("replica_health_period_s", "replica_timeout_s"):
            if not 0.1 <= getattr(self, name) <= _LONGEST_PERIOD_S:  # also refuses NaN
                raise InvalidRequest(f"{name} must be in 0.1 .. {_LONGEST_PERIOD_S:g}", field=name)
        if self.ray_address != LOCAL and not is_cluster(self.ray_address):
            raise InvalidRequest(
                f"ray_address is {self.ray_address!r}; it must be auto, HOST:PORT or local: the command runs on a "
                "node, not through Ray's client",
                field="ray_address",
            )
        if not _NAME.fullmatch(self.ray_app):
            raise InvalidRequest(
                f"ray_app is {self.ray_app!r}; it must have 1 to 63 letters, digits, - and _", field="ray_app"
            )

    def _check_shares(self) -> None:
        if self.ranks_per_node in (None, AUTO):
            return
        try:
            parse_shares(self.ranks_per_node)
        except ValueError as error:
            raise InvalidRequest(f"ranks_per_node: {error}; or it is {AUTO}", field="ranks_per_node") from error

    def _check_scaling(self) -> None:
        if self.max_replicas is not None and not self.replicas <= self.max_replicas <= _MOST_REPLICAS:
            raise InvalidRequest(
                f"max_replicas must be in {self.replicas} (replicas) .. {_MOST_REPLICAS}", field="max_replicas"
            )
        if not 1 <= self.scale_waiting_tokens <= _MOST_WAITING_TOKENS:
            raise InvalidRequest(
                f"scale_waiting_tokens must be in 1 .. {_MOST_WAITING_TOKENS}", field="scale_waiting_tokens"
            )
        for name in ("scale_up_after_s", "scale_down_after_s"):
            if not 0 <= getattr(self, name) <= _LONGEST_SCALE_S:  # also refuses NaN
                raise InvalidRequest(f"{name} must be in 0 .. {_LONGEST_SCALE_S:g}", field=name)

    @property
    def most_replicas(self) -> int:
        """That there may be at a time."""
        return self.max_replicas or self.replicas

    @property
    def scale_limits(self) -> ScaleLimits | None:
        """None if there are always as many replicas."""
        if self.max_replicas is None:
            return None
        return ScaleLimits(
            min_replicas=self.replicas,
            max_replicas=self.max_replicas,
            waiting_tokens=self.scale_waiting_tokens,
            up_after_s=self.scale_up_after_s,
            down_after_s=self.scale_down_after_s,
        )
