"""What the two sides of the connector tell each other, once per step. Tables are those of `CacheTables`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from openinfer_kv_cache import Digest
from openinfer_kv_offload.vllm.host import ConnectorMetadata, ConnectorWorkerMetadata


@dataclass(slots=True)
class Query:
    """A prefix to find and to hold; the blocks before it are computed or not asked for."""

    first_block: int
    digests: Sequence[Digest]  # of the chain, from that block on


@dataclass(slots=True)
class Load:
    """What to bring into the pool of the prefix that a query has found."""

    first_block: int  # the pool has those before it by now
    end_block: int  # as many as all workers have
    # By table: where the blocks go that a token after `end_block` sees, in order.
    block_ids: Sequence[Sequence[int]]


@dataclass(slots=True)
class Save:
    """Sealed blocks of one table of a request, to be copied after this step's work."""

    digests: Sequence[Digest]  # the table's
    block_ids: Sequence[int]
    table: int


@dataclass
class StepMetadata(ConnectorMetadata):
    """From the scheduler to every worker."""

    queries: dict[str, Query] = field(default_factory=dict[str, Query])  # by request
    loads: dict[str, Load] = field(default_factory=dict[str, Load])
    saves: list[Save] = field(default_factory=list[Save])
    drops: list[str] = field(default_factory=list[str])  # requests whose hit is of no use any more


@dataclass
class WorkerAnswers(ConnectorWorkerMetadata):
    """From a worker to the scheduler."""

    # By request: how many blocks of what was asked for are held.
    found_blocks: dict[str, int] = field(default_factory=dict[str, int])

    def aggregate(self, other: "WorkerAnswers") -> "WorkerAnswers":
        # Every rank holds its part of each block: what one lacks, no other can complete.
        return WorkerAnswers(
            {
                request_id: min(self.found_blocks.get(request_id, 0), other.found_blocks.get(request_id, 0))
                for request_id in self.found_blocks | other.found_blocks
            }
        )
