"""The host of an engine's ranks, by name."""

from openinfer_core import find_plugin
from openinfer_engine.options import EngineOptions
from openinfer_engine.ranks.contract import RankHost

RANK_HOSTS = "openinfer.rank_hosts"
PROCESS = "process"


def open_rank_host(options: EngineOptions) -> RankHost:
    """What `--rank-host` asks for, of ranks that are processes.

    Raises:
        InvalidRequest: the setting is not one.
        Refused: it cannot be had.
        PluginError: no package offers the name, or it cannot be made.
    """
    name, _, setting = (options.rank_host or PROCESS).partition("=")
    return find_plugin(RANK_HOSTS, name).make(setting, contract=RankHost)
