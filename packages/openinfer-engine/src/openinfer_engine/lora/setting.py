"""What a user says about adapters."""

from collections.abc import Sequence

from openinfer_core import InvalidRequest
from openinfer_core.request import MAX_NAME_LENGTH

MAX_RANK = 512
DEFAULT_MAX_LORAS = 4


def is_adapter_name(name: str) -> bool:
    """Whether clients can ask for it, and pages and logs show it as it is."""
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable() and name == name.strip()


def parse_adapters(settings: Sequence[str]) -> dict[str, str]:
    """`NAME=DIR` of each: name -> folder; raises `InvalidRequest` for another shape, for a name twice, and for none."""
    found: dict[str, str] = {}
    for setting in settings:
        name, separator, folder = setting.partition("=")
        if not (separator and name and folder):
            raise InvalidRequest(f"lora is {setting[:200]!r}; it must be NAME=DIR", field="lora")
        if not is_adapter_name(name):
            raise InvalidRequest(
                f"lora has the name {name[:200]!r}; a name of an adapter has at most {MAX_NAME_LENGTH} printable "
                "characters, and begins and ends with none that is white",
                field="lora",
            )
        if name in found:
            raise InvalidRequest(f"lora names {name[:200]!r} twice", field="lora")
        found[name] = folder
    return found
