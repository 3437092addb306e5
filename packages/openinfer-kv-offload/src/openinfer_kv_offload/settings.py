"""Tiers from what a user writes: `host=64GiB,policy=lfu` or `disk=/var/cache/kv,500GiB`."""

import re
from collections.abc import Sequence
from typing import TypeVar, cast

import msgspec

from openinfer_core.plugins import find_plugin
from openinfer_kv_cache import KvLayout, KvTier, KvTierFactory
from openinfer_kv_cache.tiers import KV_TIERS
from openinfer_kv_offload.disk import DiskTier, DiskTierOptions
from openinfer_kv_offload.errors import TierConfigError
from openinfer_kv_offload.host import HostTier, HostTierOptions
from openinfer_kv_offload.stack import StackOptions, TierStack

_SIZE = re.compile(r"(\d+)(KiB|MiB|GiB|TiB)")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_Options = TypeVar("_Options", HostTierOptions, DiskTierOptions)


def open_tiers(settings: Sequence[str], layout: KvLayout, *, options: StackOptions | None = None) -> KvTier:
    """Opens the tiers that `settings` name, fastest first; several are a stack.

    Args:
        settings: `NAME=SETTING` each; NAME is an entry point of `openinfer.kv_tiers`.
        layout: of the blocks.
        options: of the stack, where there is one.

    Raises:
        TierConfigError: a setting has no name or means nothing. UnknownPlugin: no installed package has such a tier.
        LayoutMismatchError: what is stored has another layout. StoreError: a folder cannot be opened.
    """
    if not settings:
        raise TierConfigError("no tier was named; write for example host=64GiB")
    tiers: list[KvTier] = []
    try:
        for each in settings:
            name, equals, setting = each.partition("=")
            if not equals:
                raise TierConfigError(f"{each!r} is not NAME=SETTING, as in host=64GiB or disk=/var/cache/kv,500GiB")
            factory = cast("KvTierFactory", find_plugin(KV_TIERS, name).load())
            tiers.append(factory(layout, setting))
        return tiers[0] if len(tiers) == 1 else TierStack(tiers, options)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise


def open_host(layout: KvLayout, setting: str) -> HostTier:
    """`SIZE[,policy=lru|lfu][,ttl_s=SECONDS]`.

    Raises:
        TierConfigError: it is not of that form.
    """
    size, *fields = setting.split(",")
    return HostTier(layout, _convert({"capacity_bytes": parse_size(size)}, fields, HostTierOptions))


def open_disk(layout: KvLayout, setting: str) -> DiskTier:
    """`FOLDER,SIZE[,access=write|read][,segment_bytes=BYTES][,refresh_s=SECONDS]`.

    Raises:
        TierConfigError: it is not of that form. LayoutMismatchError, StoreError: the folder is not for this process.
    """
    folder, *rest = setting.split(",")
    if not folder or not rest:
        raise TierConfigError(f"disk={setting}: write FOLDER,SIZE, as in disk=/var/cache/kv,500GiB")
    given = {"folder": folder, "budget_bytes": parse_size(rest[0])}
    return DiskTier(layout, _convert(given, rest[1:], DiskTierOptions))


def parse_size(text: str) -> int:
    """Bytes of `64GiB`.

    Raises:
        TierConfigError: it is not a whole number and a unit.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise TierConfigError(f"{text!r} is not a size; write a whole number and KiB, MiB, GiB or TiB, as in 64GiB")
    return int(match.group(1)) * _UNITS[match.group(2)]


def _convert(given: dict[str, int | str], fields: Sequence[str], kind: type[_Options]) -> _Options:
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals or name in given:
            raise TierConfigError(f"{field!r} is not one more NAME=VALUE")
        given[name] = value
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise TierConfigError(f"{kind.__name__}: {error}; fields are {', '.join(kind.__struct_fields__)}") from error
