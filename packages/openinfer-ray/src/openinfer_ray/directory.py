"""`Directory`: the addresses of an application's replicas, as they tell them; runs in an actor of its own.

A replica says again and again that it is there. What has not been heard of for a while is left out, so that a replica
whose node has died is not asked for ever. An empty directory, such as one that was started again, ends nothing: a
server keeps the replicas that it is connected to.
"""

import time
from collections.abc import Callable

import msgspec

from openinfer_ray.replica_spec import ReplicaAddress

_decoder = msgspec.json.Decoder(ReplicaAddress)
_listing: msgspec.json.Decoder[list[ReplicaAddress]] = msgspec.json.Decoder(list[ReplicaAddress])


class Directory:
    """Addresses by name, with the time when each was heard of. What Ray carries is bytes of JSON."""

    def __init__(self, forget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._forget_s = forget_s
        self._clock = clock
        self._heard: dict[str, tuple[float, ReplicaAddress]] = {}

    def announce(self, address: bytes) -> None:
        """Notes an address, or what has changed of it."""
        replica = _decoder.decode(address)
        self._heard[replica.name] = (self._clock(), replica)

    def listing(self) -> bytes:
        """All that were heard of lately, by name."""
        oldest_s = self._clock() - self._forget_s
        self._heard = {name: heard for name, heard in self._heard.items() if heard[0] >= oldest_s}
        return msgspec.json.encode([replica for _, (_, replica) in sorted(self._heard.items())])


def read_listing(listing: bytes) -> list[ReplicaAddress]:
    """What `Directory.listing` said; raises `msgspec.MsgspecError`."""
    return _listing.decode(listing)
