"""What `--speculative` says: `off`, `auto` or a drafter's name, and options as in `ngram,k=6,n_max=3`."""

from collections.abc import Mapping
from dataclasses import dataclass

from openinfer_core.scheduling import MAX_DRAFTS

AUTO, OFF = "auto", "off"
DEFAULT_MAX_DRAFTS = 4
_MAX_DRAFTS_OPTION, _ADAPTIVE_OPTION = "k", "adaptive"
_SWITCH = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A drafter and its options."""

    name: str
    """A name in the group `openinfer.drafters`, or `AUTO`."""
    max_drafts: int = DEFAULT_MAX_DRAFTS
    """Drafts of a sequence in one step at most."""
    is_adaptive: bool = True
    """Whether rows have fewer drafts, or none, where they are not worth what they cost."""
    options: Mapping[str, str]
    """The drafter's own."""


def parse_speculative(setting: str) -> Speculation | None:
    """None is off.

    Raises:
        ValueError: the setting has no name, an option without a value or twice, or k out of range.
    """
    name, *parts = (part.strip() for part in setting.split(","))
    if not name or "=" in name:
        raise ValueError(f"{setting!r} does not begin with auto, off or the name of a drafter")
    options: dict[str, str] = {}
    for part in parts:
        key, separator, value = (each.strip() for each in part.partition("="))
        if not (key and separator and value):
            raise ValueError(f"{part!r} is no option: NAME=VALUE, as in {name},k=4")
        if key in options:
            raise ValueError(f"{key} is given twice")
        options[key] = value
    if name == OFF:
        if options:
            raise ValueError(f"off takes no options, and {', '.join(options)} was given")
        return None
    max_drafts = read_integer(options.pop(_MAX_DRAFTS_OPTION, str(DEFAULT_MAX_DRAFTS)), "k", 1, MAX_DRAFTS)
    adaptive = options.pop(_ADAPTIVE_OPTION, "true")
    if adaptive not in _SWITCH:
        raise ValueError(f"adaptive is {adaptive}; possible are true and false")
    return Speculation(name=name, max_drafts=max_drafts, is_adaptive=_SWITCH[adaptive], options=options)


def read_integer(value: str, name: str, low: int, high: int) -> int:
    """Raises `ValueError`: it is no integer, or out of range."""
    is_number = value.isascii() and value.isdecimal() and len(value) <= 9
    if not is_number or not low <= int(value) <= high:
        raise ValueError(f"{name} is {value}; it must be between {low} and {high}")
    return int(value)
