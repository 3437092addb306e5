"""What the two sides of the connector tell each other, once per step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from openinfer_kv_cache import Digest
from openinfer_kv_offload.vllm.host import ConnectorMetadata, ConnectorWorkerMetadata


@dataclass(slots=True)
class Load:
    """Blocks of a hit to bring into the pool."""

    skip_blocks: int  # leading ones of the hit that the pool has by now
    block_ids: Sequence[int]  # where the next ones go, in order: as many as all workers have


@dataclass(slots=True)
class Save:
    """Sealed blocks of one request, to be copied after this step's work."""

    digests: Sequence[Digest]
    block_ids: Sequence[int]


@dataclass
class StepMetadata(ConnectorMetadata):
    """From the scheduler to every worker."""

    # By request: which prefix to find and to hold.
    queries: dict[str, Sequence[Digest]] = field(default_factory=dict[str, Sequence[Digest]])
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
