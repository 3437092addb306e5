"""What several engines of one model, or several ranks of one engine, are together."""

from collections.abc import Hashable, Sequence
from typing import Any

import msgspec

from openinfer_core.engine import AdapterStats, EngineInfo, EngineStats, KvTierStats, PluginFaults

_SUMMED = ("num_blocks", "max_num_seqs", "max_waiting")


def info_of_all(infos: Sequence[EngineInfo]) -> EngineInfo:
    """The first one's, with the blocks, sequences and queues of all."""
    sums = {name: sum(getattr(info, name) for info in infos) for name in _SUMMED}
    return msgspec.structs.replace(infos[0], **sums)


def stats_of_all(stats: Sequence[EngineStats]) -> EngineStats:
    """Numbers added up, lists joined, with one entry for each tier, plug-in and adapter.

    The age is that of the oldest step; whatever is neither, such as grammars and the slow call, is the first one's that
    has any.
    """
    totals: dict[str, Any] = {}
    for field in msgspec.structs.fields(EngineStats):
        values = [getattr(each, field.name) for each in stats]
        totals[field.name] = max(values) if field.name == "step_age_s" else _total(values)
    return EngineStats(**totals)


def _total(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, str):
        return first
    if isinstance(first, int | float):
        return sum(values)
    if isinstance(first, tuple):
        return _joined(values)
    if isinstance(first, dict):
        names = dict.fromkeys(name for each in values for name in each)
        return {name: sum(each.get(name, 0) for each in values) for name in names}
    return next((each for each in values if each is not None), None)


def _joined(lists: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Numbers by place; entries of one thing as one."""
    items = [item for each in lists for item in each]
    if items and isinstance(items[0], int):
        longest = max(map(len, lists))
        return tuple(sum(each[at] for each in lists if at < len(each)) for at in range(longest))
    alike: dict[Hashable, list[Any]] = {}
    for item in items:
        alike.setdefault(_name_of(item), []).append(item)
    return tuple(map(_as_one, alike.values()))


def _name_of(item: AdapterStats | KvTierStats | PluginFaults) -> Hashable:
    if isinstance(item, KvTierStats):
        return item.tier
    return (item.group, item.plugin) if isinstance(item, PluginFaults) else (item.name, item.digest)


def _as_one(items: Sequence[Any]) -> Any:
    """Numbers added up, but for an adapter's rank; the first text that is not `ok`, or the first one's."""
    totals: dict[str, Any] = {}
    for field in msgspec.structs.fields(items[0]):
        values = [getattr(each, field.name) for each in items]
        if field.name == "condition":
            totals[field.name] = next((each for each in values if each != "ok"), "ok")
        elif field.name == "rank" or isinstance(values[0], tuple):
            totals[field.name] = values[0]
        else:
            totals[field.name] = _total(values)
    return msgspec.structs.replace(items[0], **totals)
