"""The host of an engine's ranks, by name."""

from openinfer_core import find_plugin
from openinfer_engine.options import THREAD_RANKS, DeviceKind, EngineOptions
from openinfer_engine.ranks.contract import PlansPlacement, RankHost, RankSpec
from openinfer_engine.ranks.placement import Placement

RANK_HOSTS = "openinfer.rank_hosts"
PROCESS = "process"


def open_rank_host(options: EngineOptions) -> RankHost:
    """What `--rank-host` asks for, of ranks that are processes.

    Raises:
        InvalidRequest: the setting is not one.
        Refused: it cannot be had.
        PluginError: no package offers the name, or it cannot be made.
    """
    name, setting = _asked_host(options)
    return find_plugin(RANK_HOSTS, name).make(setting, contract=RankHost)


def check_rank_host(options: EngineOptions) -> None:
    """For an engine without ranks that are processes; raises `PluginError`: no package offers the name."""
    if options.rank_host not in (None, THREAD_RANKS):
        find_plugin(RANK_HOSTS, _asked_host(options)[0])


def planned_placement(options: EngineOptions) -> Placement:
    """Where the ranks of an engine would be, without starting any; on this machine where their host does not say.

    Raises:
        InvalidRequest: the setting is not one.
        Refused: so many ranks cannot be had.
        PluginError: no package offers the name.
    """
    on_gpu = options.device is DeviceKind.CUDA
    if options.rank_host not in (None, PROCESS, THREAD_RANKS):
        name, setting = _asked_host(options)
        factory: object = find_plugin(RANK_HOSTS, name).load()
        if isinstance(factory, PlansPlacement):
            return factory.planned(setting, RankSpec(num_ranks=options.num_ranks, on_gpu=on_gpu))
    return Placement.on_one_node(options.num_ranks)


def _asked_host(options: EngineOptions) -> tuple[str, str]:
    """The name and the setting of `--rank-host NAME=SETTING`; a setting that is not given is empty."""
    name, _, setting = (options.rank_host or PROCESS).partition("=")
    return name, setting
