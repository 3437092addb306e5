"""What a replica is told to run, and what is told of it: both as JSON, which Ray carries as bytes."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from openinfer_core import Refused
from openinfer_core.process.mutual_proof import read_token


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each replica of an application runs."""

    app: str
    family: str  # name in the group `openinfer.models`
    model_dir: str  # on every node
    options: msgspec.Raw  # the family's own options type, as JSON
    cpus: int
    token: str | None  # None: it is in `token_file`
    token_file: str
    drain_deadline_s: float
    max_step_age_s: float
    timeout_s: float  # for the engine to answer

    def read_token(self) -> bytes:
        """The secret; raises `InvalidRequest` if there is no file of it on this node."""
        if self.token is not None:
            return self.token.encode()
        return read_token(Path(self.token_file), field="replica_token_file")

    def require_model(self) -> Path:
        """The folder of the model; raises `Refused` if this node does not have it."""
        folder = Path(self.model_dir)
        if not folder.is_dir():
            raise Refused(f"this node has no folder {folder}: every node needs the model at the same path")
        return folder


class ReplicaState(StrEnum):
    """Whether a replica gets requests."""

    SERVING = "serving"
    LEAVING = "leaving"
    """It takes no more, and ends when those that it has are answered."""


class ReplicaAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a replica listens. There is no secret in it."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[0-9A-Za-z.:_-]+$")]
    """Never used again, by no other replica."""
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    state: ReplicaState = ReplicaState.SERVING
