"""What a user says about adapters."""

from collections.abc import Sequence

from openinfer_core import InvalidRequest
from openinfer_core.request import MAX_NAME_LENGTH

MAX_RANK = 512
DEFAULT_MAX_LORAS = 4


def parse_adapters(settings: Sequence[str]) -> dict[str, str]:
    """`NAME=DIR` of each: name -> folder; raises `InvalidRequest` for another shape, and for a name twice."""
    found: dict[str, str] = {}
    for setting in settings:
        name, separator, folder = setting.partition("=")
        if not (separator and name and folder) or len(name) > MAX_NAME_LENGTH:
            raise InvalidRequest(f"lora is {setting[:200]!r}; it must be NAME=DIR", field="lora")
        if name in found:
            raise InvalidRequest(f"lora names {name[:200]!r} twice", field="lora")
        found[name] = folder
    return found
