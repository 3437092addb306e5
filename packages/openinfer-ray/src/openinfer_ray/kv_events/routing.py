"""`KvRouting`: a router that knows by KV events what each replica holds."""

import logging

from openinfer_core import EngineInfo, EngineStats
from openinfer_core.replicas import PrefixHoldings, PrefixRouter
from openinfer_ray.kv_events.identity import KvIdentity
from openinfer_ray.kv_events.keys import curve_secrets
from openinfer_ray.kv_events.subscription import KvEventSubscription
from openinfer_ray.kv_events.told_prefixes import ToldPrefixes
from openinfer_ray.replica_spec import ReplicaAddress

logger = logging.getLogger("openinfer.engine")


class KvRouting:
    """Belongs to a server's event loop.

    Args:
        info: of a replica; all have one layout.
        key: what replicas name their blocks with.
        token: of the application.
        patience_s: what a replica may take to say what it holds.

    Raises:
        Refused: the engine does not say what its KV is.
    """

    def __init__(self, info: EngineInfo, *, key: bytes, token: bytes, patience_s: float) -> None:
        self._identity = KvIdentity(info, key=key)
        self._held: dict[str, ToldPrefixes] = {}
        self._subscription = KvEventSubscription(curve_secrets(token), patience_s=patience_s)
        self.router = PrefixRouter(
            block_size_tokens=info.block_size_tokens, key=key, digests=self._identity.digests, hold=self._hold
        )

    def told(self, stats: EngineStats) -> None:
        """What a replica says of itself; see `KvIdentity.told`."""
        self._identity.told(stats)

    def num_told(self, name: str) -> int:
        """Blocks that a replica has told of, and has."""
        held = self._held.get(name)
        return 0 if held is None else held.num_told

    async def follow(self, replica: ReplicaAddress) -> None:
        """Hears what a replica holds, which the router has, until it is cancelled."""
        held = self._held.get(replica.name)
        if replica.events is None or held is None:
            return
        try:
            await self._subscription.follow(replica.name, replica.host, replica.events, held)
        except Exception:  # the fault boundary: events are advice, and what was sent still counts
            logger.exception("what replica %s holds is not heard any more", replica.name)
            held.clear()
        finally:
            self._held.pop(replica.name, None)

    def close(self) -> None:
        """After all that follow have ended."""
        self._subscription.close()

    def _hold(self, name: str, num_blocks: int) -> PrefixHoldings:
        held = self._held[name] = ToldPrefixes(num_blocks)
        return held
