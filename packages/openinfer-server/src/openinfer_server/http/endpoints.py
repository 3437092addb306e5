"""Routes that other packages bring: entry-point group `openinfer.endpoints`.

A plug-in is a function `(service: Service) -> Iterable[Route]`. Installing a package opens no route: the one who starts
the server names the plug-ins in `--endpoints`.
"""

from collections.abc import Iterable, Sequence

from openinfer_core.plugins import Lister, find_plugin, installed
from openinfer_server.http.routes import Endpoints

ENDPOINTS = "openinfer.endpoints"


def load_endpoints(names: Iterable[str], *, lister: Lister = installed) -> Sequence[Endpoints]:
    """The plug-ins of these names.

    Raises:
        UnknownPlugin: none has a name; the message lists those that are there.
        AmbiguousPlugin: two packages offer one name.
        BrokenPlugin: its import failed.
    """
    return [find_plugin(ENDPOINTS, name, lister=lister).load() for name in names]
