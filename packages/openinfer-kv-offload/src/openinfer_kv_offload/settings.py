"""Tiers from what a user writes: `host=64GiB,policy=lfu` or `disk=/var/cache/kv,500GiB`."""

from collections.abc import Sequence
from typing import cast

from openinfer_core.plugins import find_plugin
from openinfer_kv_cache import CopyingTier, KvLayout, KvTier, KvTierFactory
from openinfer_kv_cache.tiers import KV_TIERS, TierSettingCheck
from openinfer_kv_offload.disk.tier import DiskTier, DiskTierOptions
from openinfer_kv_offload.errors import TierConfigError
from openinfer_kv_offload.host.options import HostTierOptions
from openinfer_kv_offload.host.tier import HostTier
from openinfer_kv_offload.setting_fields import TierOpener, convert, parse_fields, parse_size
from openinfer_kv_offload.stack.tier import StackOptions, TierStack, WriteMode

OPENINFER_CONTRACT = 1


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
    tiers = _open_all(settings, layout)
    try:
        return tiers[0] if len(tiers) == 1 else TierStack(tiers, options)
    except BaseException:
        _close_all(tiers)
        raise


def _parse_stack(setting: str) -> tuple[list[str], dict[str, int | str]]:
    parts = setting.split(";")
    fields = [part for part in parts if part.partition("=")[0] in StackOptions.__struct_fields__]
    chosen = parse_fields({}, fields)
    convert({"write": WriteMode.THROUGH, **chosen}, StackOptions)
    return [part for part in parts if part not in fields], chosen


def _open_stack(layout: KvLayout, parsed: tuple[list[str], dict[str, int | str]]) -> KvTier:
    parts, chosen = parsed
    tiers = _open_all(parts, layout)
    try:
        # Write-behind where it is possible: a save then waits for the fastest tier alone.
        may_follow = isinstance(tiers[0], CopyingTier) and tiers[0].accepts_saves and "shared_in" not in chosen
        chosen.setdefault("write", WriteMode.BEHIND if may_follow else WriteMode.THROUGH)
        return TierStack(tiers, convert(chosen, StackOptions))
    except BaseException:
        _close_all(tiers)
        raise


def _check_stack(layout: KvLayout, parsed: tuple[list[str], dict[str, int | str]]) -> None:
    for name, setting in _named(parsed[0]):
        factory = find_plugin(KV_TIERS, name).load()
        if isinstance(factory, TierSettingCheck):
            factory.check_setting(layout, setting)


def _parse_host(setting: str) -> HostTierOptions:
    size, *fields = setting.split(",")
    return convert(parse_fields({"capacity_bytes": parse_size(size)}, fields), HostTierOptions)


def _parse_disk(setting: str) -> DiskTierOptions:
    folder, *rest = setting.split(",")
    if not folder or not rest:
        raise TierConfigError(f"disk={setting}: write FOLDER,SIZE, as in disk=/var/cache/kv,500GiB")
    return convert(parse_fields({"folder": folder, "budget_bytes": parse_size(rest[0])}, rest[1:]), DiskTierOptions)


# `NAME=SETTING;NAME=SETTING…`, fastest first, with fields of `StackOptions` among them:
# `host=64GiB;disk=/var/cache/kv,500GiB;write=back` is a stack that hands blocks down when it evicts them. Without
# `write` it is write-behind, or write-through where the first tier cannot be copied from.
open_stack = TierOpener(_parse_stack, _open_stack, also_check=_check_stack)

# `SIZE[,policy=lru|lfu][,ttl_s=SECONDS]`
open_host = TierOpener(_parse_host, HostTier)

# `FOLDER,SIZE[,access=write|read][,segment_bytes=BYTES][,refresh_s=SECONDS]`
open_disk = TierOpener(_parse_disk, DiskTier)


def _open_all(settings: Sequence[str], layout: KvLayout) -> list[KvTier]:
    """The tiers that settings name, or none if one of them cannot be opened."""
    tiers: list[KvTier] = []
    try:
        for name, setting in _named(settings):
            factory = cast("KvTierFactory", find_plugin(KV_TIERS, name).load())
            tiers.append(factory(layout, setting))
    except BaseException:
        _close_all(tiers)
        raise
    return tiers


def _named(settings: Sequence[str]) -> list[tuple[str, str]]:
    if not settings:
        raise TierConfigError("no tier was named; write for example host=64GiB")
    pairs = [each.partition("=") for each in settings]
    for each, (_, equals, _) in zip(settings, pairs, strict=True):
        if not equals:
            raise TierConfigError(f"{each!r} is not NAME=SETTING, as in host=64GiB or disk=/var/cache/kv,500GiB")
    return [(name, setting) for name, _, setting in pairs]


def _close_all(tiers: Sequence[KvTier]) -> None:
    for tier in tiers:
        tier.close()
