"""`Ingress`: a server of an application that Ray Serve places; its proxies pass requests on to it.

    client ─HTTP─► a proxy of Ray Serve ─► Ingress: APIs, tokenizer, router ═ TCP ═► replica ─► its engine's process

Several of them learn by KV events what each other's requests have left on the replicas.
"""

import os
from typing import Any

import msgspec

from openinfer_core.process.logs import set_up_logs
from openinfer_ray.application import join_application
from openinfer_ray.replica_spec import ReplicaSpec
from openinfer_server import ServerOptions


class Ingress:
    """Is called by Ray Serve alone, on a cluster whose replicas run.

    Args:
        spec: of the replicas, as JSON.
        server: `ServerOptions`, as JSON; Ray Serve listens.

    Raises:
        OpenInferError: no replica can be reached.
    """

    def __init__(self, spec: bytes, server: bytes) -> None:
        set_up_logs(os.environ)
        self._spec = msgspec.json.decode(spec, type=ReplicaSpec)
        self._server = msgspec.json.decode(server, type=ServerOptions)
        self._engine = join_application(self._spec, end=lambda: None)

    async def __serve_build_asgi_app__(self) -> Any:
        """The ASGI application, whose lifespan Ray Serve begins and ends."""
        from openinfer_server import load_app

        return load_app(self._engine, self._spec.require_model(), self._server)
