"""Sizes and `NAME=VALUE` fields, as tiers are set up with them."""

import re
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from openinfer_kv_cache import KvLayout, KvTier
from openinfer_kv_offload.errors import TierConfigError

_SIZE = re.compile(r"(\d+)(KiB|MiB|GiB|TiB)")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_Options = TypeVar("_Options", bound=msgspec.Struct)
_Parsed = TypeVar("_Parsed")
_Tier = TypeVar("_Tier", bound=KvTier)


class TierOpener(Generic[_Parsed, _Tier]):
    """A `KvTierFactory` that can also check a setting: what it means is one function, opening that another.

    Args:
        parse: raises `TierConfigError` for a setting that means nothing, and touches nothing.
        open_tier: raises `LayoutMismatchError` or `StoreError` where what is there is not for this process.
        also_check: what else `check_setting` asks.
    """

    def __init__(
        self,
        parse: Callable[[str], _Parsed],
        open_tier: Callable[[KvLayout, _Parsed], _Tier],
        *,
        also_check: Callable[[KvLayout, _Parsed], None] | None = None,
    ) -> None:
        self._parse = parse
        self._open = open_tier
        self._also_check = also_check

    def __call__(self, layout: KvLayout, setting: str) -> _Tier:
        return self._open(layout, self._parse(setting))

    def check_setting(self, layout: KvLayout, setting: str) -> None:
        parsed = self._parse(setting)
        if self._also_check is not None:
            self._also_check(layout, parsed)


def parse_size(text: str) -> int:
    """Bytes of `64GiB`; raises `TierConfigError` for what is not a whole number and a unit."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise TierConfigError(f"{text!r} is not a size; write a whole number and KiB, MiB, GiB or TiB, as in 64GiB")
    return int(match.group(1)) * _UNITS[match.group(2)]


def parse_fields(given: dict[str, int | str], fields: Sequence[str]) -> dict[str, int | str]:
    """`given` and the fields `NAME=VALUE`; raises `TierConfigError` if one is not of that form, or is there twice."""
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals or name in given:
            raise TierConfigError(f"{field!r} is not one more NAME=VALUE")
        given[name] = value
    return given


def convert(given: dict[str, int | str], kind: type[_Options]) -> _Options:
    """The options that the fields mean; raises `TierConfigError` if a field is unknown or out of range."""
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise TierConfigError(f"{kind.__name__}: {error}; fields are {', '.join(kind.__struct_fields__)}") from error
