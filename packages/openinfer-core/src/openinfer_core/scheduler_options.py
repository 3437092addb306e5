"""Options of a scheduler's own: text by name, from `--scheduler-option NAME=VALUE`, in `SchedulerConfig.options`."""

import re
from collections.abc import Collection, Mapping, Sequence

from openinfer_core.errors import InvalidRequest, Refused

MAX_OPTIONS = 64
MAX_VALUE_CHARACTERS = 4096
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")


def parse_scheduler_options(settings: Sequence[str], *, field: str) -> dict[str, str]:
    """The options that settings `NAME=VALUE` mean; a value may hold further `=`.

    Raises:
        InvalidRequest: one is not of that form, named twice or out of range.
    """
    options: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InvalidRequest(f"{setting!r} is not NAME=VALUE", field=field)
        if name in options:
            raise InvalidRequest(f"the scheduler option {name!r} is given twice", field=field)
        options[name] = value
    check_scheduler_options(options, field=field)
    return options


def check_scheduler_options(options: Mapping[str, str], *, field: str) -> None:
    """Raises `InvalidRequest`: too many, a name that is none, or a value too long or with control characters."""
    if len(options) > MAX_OPTIONS:
        raise InvalidRequest(f"{len(options)} scheduler options; at most {MAX_OPTIONS} are possible", field=field)
    for name, value in options.items():
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name!r} is no name of a scheduler option: a-z, then a-z, 0-9, _ and -, 64 at most", field=field
            )
        if len(value) > MAX_VALUE_CHARACTERS or not value.isprintable():
            raise InvalidRequest(
                f"the scheduler option {name} must be at most {MAX_VALUE_CHARACTERS} printable characters", field=field
            )


def refuse_unknown_options(options: Mapping[str, str], known: Collection[str]) -> None:
    """Raises `Refused` if an option is none of those that a scheduler knows; the message has both."""
    unknown = sorted(options.keys() - set(known))
    if unknown:
        possible = f"it has {', '.join(sorted(known))}" if known else "it has no options"
        raise Refused(f"the scheduler knows no option {', '.join(unknown)}; {possible}")
