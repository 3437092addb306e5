"""`--kv-events`: where KV events go, as a user writes it."""

import msgspec

_EXAMPLE = "write a port of loopback, as in 5557, or an endpoint, as in tcp://*:5557,replay=tcp://*:5558"
_TRANSPORTS = ("tcp://", "ipc://")


class KvEventsSetting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `ENDPOINT[,connect=true][,replay=ENDPOINT][,topic=TEXT][,buffer_steps=N]` says.

    Raises:
        ValueError: a value is out of range.
    """

    endpoint: str
    """Of the PUB socket."""
    connect: bool = False
    """Whether the router listens and this engine connects; else the engine listens."""
    replay: str | None = None
    """Of the ROUTER socket, at which a subscriber asks for what it has missed; always listens."""
    topic: str = ""
    """First frame of every message; llm-d wants kv@POD@MODEL."""
    buffer_steps: int = 10_000
    """Batches kept for replay."""

    def __post_init__(self) -> None:
        for endpoint in (self.endpoint, self.replay):
            if endpoint is not None and not endpoint.startswith(_TRANSPORTS):
                raise ValueError(f"{endpoint!r} is no endpoint; {_EXAMPLE}")
        if self.endpoint == self.replay:
            raise ValueError(f"events and replay need two endpoints; both are {self.endpoint}")
        if self.connect and "*" in self.endpoint:
            raise ValueError(f"connect=true needs the address of the router, not {self.endpoint}")
        if not 1 <= self.buffer_steps <= 1_000_000:
            raise ValueError(f"buffer_steps is {self.buffer_steps}; it must be between 1 and 1000000")


def parse_kv_events(text: str) -> KvEventsSetting:
    """Reads a setting; a bare port is one of loopback.

    Raises:
        ValueError: it is not of that form.
    """
    endpoint, *fields = text.split(",")
    given: dict[str, str] = {"endpoint": _with_loopback(endpoint)}
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals or name in given:
            raise ValueError(f"{field!r} is not one more NAME=VALUE; {_EXAMPLE}")
        given[name] = _with_loopback(value) if name == "replay" else value
    try:
        return msgspec.convert(given, KvEventsSetting, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}; fields are {', '.join(KvEventsSetting.__struct_fields__)}") from error


def _with_loopback(endpoint: str) -> str:
    return f"tcp://127.0.0.1:{endpoint}" if endpoint.isdecimal() else endpoint
