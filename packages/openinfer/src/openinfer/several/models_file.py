"""The file of `openinfer serve --models FILE`.

max_awake = 1
turn_s = 10.0

[[models]]
name = "tiny"
arguments = ["--model", "tiny", "--num-blocks", "512"]
"""

from itertools import pairwise
from pathlib import Path

import msgspec

from openinfer_core import InvalidRequest

# What the router itself says to each server.
_OWN_FLAGS = ("--host", "--port", "--api-keys-file", "--model-name", "--models", "--workers", "--tls-cert-file")
MAX_MODELS = 64


class ServedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model.

    Raises:
        ValueError: a value is out of range, or a flag is the router's own.
    """

    name: str
    """What requests call it, in their field `model`."""
    arguments: list[str]
    """Of `openinfer serve`, for this model."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= 200 or not self.name.isprintable():
            raise ValueError("name must have 1 to 200 printable characters")
        for argument in self.arguments:
            if "\0" in argument:
                raise ValueError(f"model {self.name}: no argument of a process has a NUL")
            if argument.partition("=")[0] in _OWN_FLAGS:
                raise ValueError(f"model {self.name}: {argument.partition('=')[0]} is what the router gives")

    @property
    def flags(self) -> tuple[str, ...]:
        """The model's own, and what lets it sleep: on a GPU an engine must know that it will when it starts."""
        given = [part for argument in self.arguments for part in argument.split("=", 1)]
        is_on_gpu = any(pair == ("--device", "cuda") for pair in pairwise(given))
        return (*(("--enable-sleep", "true") if is_on_gpu else ()), *self.arguments)


class ModelsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All models, and how they share.

    Raises:
        ValueError: a value is out of range.
    """

    models: list[ServedModel]
    max_awake: int = 1
    """Models awake at a time: as many as fit into memory together."""
    max_waiting: int = 64
    """Requests that wait for one model at most; more are answered 429."""
    wait_s: float = 300.0
    """Seconds after which a request that waits for its model is answered 503."""
    turn_s: float = 10.0
    """Seconds that a model keeps taking requests while another one is waited for."""

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if not 1 <= len(names) <= MAX_MODELS or len(set(names)) < len(names):
            raise ValueError(f"there must be 1 to {MAX_MODELS} models, each of its own name")
        if not 1 <= self.max_awake <= MAX_MODELS:
            raise ValueError(f"max_awake must be 1 to {MAX_MODELS}")
        if not 1 <= self.max_waiting <= 100_000:
            raise ValueError("max_waiting must be 1 to 100000")
        if not 0 < self.wait_s <= 86_400 or not 0 <= self.turn_s <= 86_400:
            raise ValueError("wait_s and turn_s must be seconds of a day at most")


def read_models_file(path: Path) -> ModelsFile:
    """Raises `InvalidRequest`: the file cannot be read, or means nothing."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=ModelsFile)
    except OSError as error:
        raise InvalidRequest(f"--models {path} cannot be read: {error.strerror}", field="models") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"--models {path}: {error}", field="models") from error
