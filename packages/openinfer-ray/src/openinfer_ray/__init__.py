"""openinfer-ray: replicas of an engine on a Ray cluster, behind one server.

    client ─HTTP─► server (tokenizes, chooses a replica) ─TCP─► replica (Ray Serve places it) ─► its engine's process

Ray carries placement, life and addresses alone. Requests and tokens go over `openinfer_core.process.wire`, between ends
that have shown each other one token. Ray is imported where a command needs it, never with this package.
"""

from openinfer_ray.options import RayOptions
from openinfer_ray.replica_spec import ReplicaAddress, ReplicaSpec, ReplicaState

__all__ = ["RayOptions", "ReplicaAddress", "ReplicaSpec", "ReplicaState"]
