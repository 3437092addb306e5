"""`RequestFields`: what every object of a request says about its own fields."""

from collections.abc import Mapping
from typing import ClassVar

import msgspec


class RequestFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object of a request: each of its fields is honoured unless it is named here."""

    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Fields that are known and cannot be honoured, and why; `null` is taken."""
    IGNORED: ClassVar[Mapping[str, str]] = {}
    """Fields that are taken and change nothing, and why that is harmless."""
