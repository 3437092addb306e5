"""What a replica is told to run, and what is told of it: both as JSON, which Ray carries as bytes."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from openinfer_core import InvalidRequest, Refused
from openinfer_core.process.mutual_proof import read_token
from openinfer_ray.kv_events.keys import digest_key
from openinfer_ray.model_paths import VARIABLE, path_here


class Routing(StrEnum):
    """By what a server knows what replicas hold."""

    KV_EVENTS = "kv-events"
    """They say it."""
    SENT = "sent"
    """They were sent it."""


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each replica of an application runs."""

    app: str
    family: str  # name in the group `openinfer.models`
    model_dir: str  # on every node, but for those that have another path of it: `model_paths`
    options: msgspec.Raw  # the family's own options type, as JSON
    cpus: int  # of each node
    shares: tuple[int, ...] = ()  # ranks of each of its nodes; empty: all are on one
    token: str | None  # None: it is in `token_file`
    token_file: str
    drain_deadline_s: float
    max_step_age_s: float
    timeout_s: float  # for the engine to answer
    routing: Routing = Routing.SENT
    kv_key_file: str = ""  # on every node; empty: blocks are named with a key made from the token

    def read_digest_key(self, token: bytes) -> bytes:
        """What all replicas name their blocks with; raises `InvalidRequest` if the file cannot be read here."""
        if not self.kv_key_file:
            return digest_key(token)
        try:
            return Path(self.kv_key_file).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"--kv-key-file {self.kv_key_file}: {error.strerror}", field="kv_key_file") from error

    def read_token(self) -> bytes:
        """The secret; raises `InvalidRequest` if there is no file of it on this node."""
        if self.token is not None:
            return self.token.encode()
        return read_token(Path(self.token_file), field="replica_token_file")

    def require_model(self) -> Path:
        """The folder of the model; raises `Refused` if this node does not have it."""
        folder = path_here(self.model_dir, os.environ)
        if not folder.is_dir():
            raise Refused(
                f"this node has no folder {folder}: every node needs the model, at the path that the command has or "
                f"where {VARIABLE} of the node says"
            )
        return folder


class ReplicaState(StrEnum):
    """Whether a replica gets requests."""

    SERVING = "serving"
    LEAVING = "leaving"
    """It takes no more, and ends when those that it has are answered."""


_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class EventPorts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a replica tells of its KV: as it changes, and again what was missed."""

    events: _Port
    replay: _Port


class ReplicaAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a replica listens. There is no secret in it."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[0-9A-Za-z.:_-]+$")]
    """Never used again, by no other replica."""
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: _Port
    events: EventPorts | None = None
    state: ReplicaState = ReplicaState.SERVING
