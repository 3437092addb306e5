"""Server-sent events that have a name, which is the tag of their type."""

from functools import cache

import msgspec

_encoder = msgspec.json.Encoder()


class NamedEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """An event whose data says its name again, under `type`."""

    def frame(self) -> bytes:
        return b"%b%b\n\n" % (_head(type(self)), _encoder.encode(self))


@cache
def _head(kind: type[NamedEvent]) -> bytes:
    return f"event: {kind.__struct_config__.tag}\ndata: ".encode()
