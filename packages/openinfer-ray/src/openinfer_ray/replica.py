"""`Replica`: what Ray Serve places, watches and replaces: an engine's process, and the port by which servers reach it.

No request reaches it through Ray.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from openinfer_core import EngineClosed, EngineHandle, Refused, find_plugin, load_family
from openinfer_core.plugins import MODELS
from openinfer_core.process.logs import set_up_logs
from openinfer_core.process.remote import EngineAccess, RemoteEngine, open_link
from openinfer_ray import cluster
from openinfer_ray.kv_events.keys import curve_secrets, digest_key
from openinfer_ray.relay import Relay
from openinfer_ray.replica_spec import EventPorts, ReplicaAddress, ReplicaSpec, ReplicaState, Routing
from openinfer_ray.scaling import BUSY, WAITING_TOKENS

logger = logging.getLogger("openinfer.engine")

_NAME_BYTES = 8


class Replica:
    """Loads the model when it is made, which may take minutes; it is called by Ray Serve alone.

    Raises:
        OpenInferError: the engine cannot be had.
    """

    def __init__(self, spec: bytes) -> None:
        set_up_logs(os.environ)
        if cluster.RECONNECT_VARIABLE not in os.environ:
            logger.warning(
                "this node was started without %s: its replicas end a minute after Ray's control store",
                cluster.RECONNECT_VARIABLE,
            )
        self._spec = msgspec.json.decode(spec, type=ReplicaSpec)
        token = self._spec.read_token()
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(self._spec.cpus))
        self._ends = contextlib.ExitStack()
        ray: Any = cluster.import_ray()
        host: str = ray.util.get_node_ip_address()
        ports, changed = None, rank_options(self._spec)
        if self._spec.routing is Routing.KV_EVENTS:
            folder = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="openinfer-kv-")))
            changed |= events_options(self._spec, folder, token=token)
            self._engine, access = launch(self._spec, changed=changed)
            ports = self._tell_events(folder, host, token)
        else:
            self._engine, access = launch(self._spec, changed=changed)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        self._relay = Relay(listener, token=token, open_link=lambda: open_link(access))
        self._relay.start()
        name = f"{host}-{secrets.token_hex(_NAME_BYTES)}"
        self._address = ReplicaAddress(name=name, host=host, port=self._relay.address[1], events=ports)
        cluster.announce(self._spec.app, self._address)

    async def check_health(self) -> None:
        """Raises `EngineClosed` if the engine has ended or hangs: Ray Serve replaces the replica then."""
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                stats = await self._engine.stats()
        except TimeoutError as error:
            raise EngineClosed(f"the engine has not answered for {self._spec.timeout_s:g} s") from error
        if stats.step_age_s > self._spec.max_step_age_s:
            raise EngineClosed(f"the engine's loop has hung for {stats.step_age_s:.0f} s")
        await self._announce(self._address)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray Serve hands to `WaitingTokensPolicy`; it does not ask where the number of replicas is fixed."""
        stats = await self._engine.stats()
        busy = stats.running / self._engine.info.max_num_seqs
        return {WAITING_TOKENS: float(stats.waiting_tokens), BUSY: busy}

    async def __del__(self) -> None:
        # Ray Serve calls and awaits it before it ends a replica that it does not want any more.
        await self._announce(msgspec.structs.replace(self._address, state=ReplicaState.LEAVING))
        deadline_s = self._spec.drain_deadline_s
        if not await asyncio.to_thread(self._relay.wait_until_left, timeout_s=deadline_s):
            logger.error("%d servers have not left within %g s", self._relay.num_links, deadline_s)
        self._relay.close()
        await self._engine.close()
        self._ends.close()

    def _tell_events(self, folder: Path, host: str, token: bytes) -> EventPorts:
        from openinfer_ray.kv_events.relay import KvEventsRelay  # needs pyzmq

        relay = KvEventsRelay(folder, host=host, secrets=curve_secrets(token))
        self._ends.callback(relay.close)
        return relay.ports

    async def _announce(self, address: ReplicaAddress) -> None:
        """Without the directory the replica goes on: servers that are connected do not need it."""
        try:
            await asyncio.to_thread(cluster.announce, self._spec.app, address)
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds
            logger.warning("the directory of replicas does not answer: %s", error)


def rank_options(spec: ReplicaSpec) -> dict[str, str]:
    """Options of an engine whose ranks are on the nodes of this actor's placement group."""
    if not spec.shares:
        return {}
    from openinfer_ray.ranks.setting import RaySetting  # imports the engine

    address, group = cluster.own_group()
    setting = RaySetting(address=address, shares=spec.shares, cpus=spec.cpus, group=group, model=spec.model_dir)
    return {"rank_host": f"ray={setting.text}"}


def events_options(spec: ReplicaSpec, folder: Path, *, token: bytes) -> dict[str, str]:
    """Options of an engine that tells of its KV through a folder of its user alone, with the digest key of all."""
    from openinfer_ray.kv_events.relay import events_setting  # needs pyzmq

    key_file = spec.kv_key_file
    if not key_file:
        path = folder / "digest-key"
        path.write_bytes(digest_key(token))
        key_file = str(path)
    return {"kv_events": events_setting(folder), "kv_key_file": key_file}


def launch(spec: ReplicaSpec, *, changed: Mapping[str, Any] | None = None) -> tuple[EngineHandle, EngineAccess]:
    """Starts the engine, in a process of its own, and says how others join it; raises `OpenInferError`.

    Of the spec's options some may be `changed`.
    """
    family = load_family(find_plugin(MODELS, spec.family))
    options = msgspec.json.decode(spec.options, type=family.options_type)
    options = msgspec.structs.replace(options, **changed or {})
    engine = family.launch(spec.require_model(), options)
    access = engine.access if isinstance(engine, RemoteEngine) else None
    if access is None:
        asyncio.run(engine.close())
        raise Refused("replicas need an engine in a process of its own: --engine-host process")
    return engine, access
