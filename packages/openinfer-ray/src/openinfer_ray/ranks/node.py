"""`RankNode`: an actor on each node that has ranks; it does what `openinfer rank --join` does, and hears of no step."""

import logging
import os
from typing import Any

import msgspec

from openinfer_core import OpenInferError
from openinfer_core.process.logs import set_up_logs
from openinfer_engine.ranks.joining import Joining, join_head
from openinfer_ray.cluster import import_ray
from openinfer_ray.model_paths import path_here
from openinfer_ray.ranks.messages import Invitation

logger = logging.getLogger("openinfer.engine")

_CONNECT_S = 60.0  # for a rank to reach the head, which listens already


class RankNode:
    """Its ranks end with it: they are processes that the kernel ends with the one that started them.

    Args:
        cpus: that Ray keeps for its ranks.
    """

    def __init__(self, cpus: int) -> None:
        set_up_logs(os.environ)
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(cpus))

    def where(self) -> tuple[str, str]:
        """Address and id of its node."""
        ray: Any = import_ray()
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def join(self, invitation: bytes) -> str:
        """Joins the head and waits for the end of the ranks; returns why they could not join, empty if they have.

        How they ended is not told: the head has heard it from them, and sees the end of their links.
        """
        asked = msgspec.json.decode(invitation, type=Invitation)
        ranks = [Joining(name=asked.node, index=asked.node_index, gpu=gpu) for gpu in range(asked.ranks)]
        try:
            address = (asked.to.host, asked.to.port)
            model_dir = path_here(asked.model, os.environ) if asked.model else None
            codes = join_head(address, ranks, token=asked.to.token, model_dir=model_dir, wait_s=_CONNECT_S)
        except OpenInferError as error:
            return str(error)
        logger.info("the ranks of this node have ended with the exit codes %s", codes)
        return ""
