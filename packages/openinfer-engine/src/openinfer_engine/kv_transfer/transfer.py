"""`KvTransfer`: the requests of a loop that hand their KV to other engines, or begin on what these have left.

submitted ──► looked up ──► scheduler ──► finished ──► handover ──► told
              (both kinds)                             (those that another engine decodes)
"""

import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from openinfer_core.engine import KvTransferStats
from openinfer_core.events import Failed, Finished, FinishReason, TokenEvent
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_engine.kv_transfer.handovers import HandedOver, Handovers
from openinfer_engine.kv_transfer.look_ups import LookUps
from openinfer_engine.kv_transfer.params import StoredPrefix, TransferAsked, handover_answer, read_transfer
from openinfer_kv_cache import Digest, PrefixHasher

logger = logging.getLogger("openinfer.engine")


class KvTransfer:
    """Of one engine; used by the loop's thread, but for what `look_up` does. Closed with it.

    Args:
        tier: name of the tier that other engines read.
        layout_digest: of its blocks.
        hasher: of the scheduler's blocks.
        handovers: of the engine.
        look_up: asks the tiers for a chain; see `LookUps`.
        timeout_s: that a request waits for that at most.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        tier: str,
        layout_digest: str,
        hasher: PrefixHasher,
        handovers: Handovers,
        look_up: Callable[[Sequence[Digest]], None],
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._tier = tier
        self._layout_digest = layout_digest
        self._hasher = hasher
        self._handovers = handovers
        self._look_ups = LookUps(lambda digests: _asked(look_up, digests), timeout_s=timeout_s)
        self._clock = clock
        self._handing_over: dict[RequestId, Sequence[Digest]] = {}  # digests of the prompt's blocks
        self._stats = KvTransferStats()

    @property
    def is_busy(self) -> bool:
        return bool(self._look_ups) or bool(self._handovers)

    @property
    def is_handing_over(self) -> bool:
        """Whether blocks of the pool are kept for other engines."""
        return bool(self._handovers)

    @property
    def open_ids(self) -> set[RequestId]:
        """Requests that are here, and not the scheduler's."""
        return self._look_ups.waiting_ids | self._handovers.open_ids

    @property
    def num_waiting(self) -> int:
        return len(self._look_ups)

    def take(self, request: GenerateRequest) -> bool:
        """Whether the request waits here before it runs; `take_ready` gives it back.

        Raises:
            InvalidRequest: its `transfer` is not what can be asked.
        """
        if request.transfer is None:
            return False
        asked = read_transfer(request.transfer)
        if not (asked.do_remote_decode or asked.do_remote_prefill):
            return False
        digests = self._chain(request)
        if asked.do_remote_decode:
            self._handing_over[request.request_id] = digests
        expected = self._expected(asked, digests)
        if expected:
            self._look_ups.begin(request, expected, now_s=self._clock())
        return bool(expected)

    def take_ready(self) -> list[tuple[GenerateRequest, float]]:
        """Requests that may run now, each with the time of its arrival."""
        return self._look_ups.take_ready(now_s=self._clock()) if self._look_ups else []

    def withhold(self, events: Iterable[TokenEvent]) -> list[TokenEvent]:
        """The events without the ends of those requests whose blocks are to land first."""
        if not self._handing_over:
            return list(events)
        return [event for event in events if not self._is_withheld(event)]

    def settle(self) -> list[TokenEvent]:
        """The ends of requests whose blocks are stored, or are not waited for any longer."""
        return [self._told(handed) for handed in self._handovers.settle(now_s=self._clock())]

    def withdraw(self, request_id: RequestId) -> Finished | None:
        """Ends a request that is here; None if it is the scheduler's."""
        self._handing_over.pop(request_id, None)
        if (finished := self._handovers.withdraw(request_id)) is not None:
            return msgspec.structs.replace(finished, reason=FinishReason.ABORT)
        request = self._look_ups.withdraw(request_id)
        return (
            None if request is None else Finished(request_id, FinishReason.ABORT, len(request.prompt_token_ids), 0, 0)
        )

    def renew(self, weights_version: str) -> None:
        """KV is that of other weights from now on; what was computed before is not handed on.

        Nothing may be being handed over.

        Args:
            weights_version: as the scheduler's hasher has it.
        """
        self._hasher.weights_version = weights_version
        self._handing_over = dict.fromkeys(self._handing_over, ())

    def wait(self, timeout_s: float) -> None:
        """Until a look-up has its answer, at most so long; does not wait for handovers."""
        self._look_ups.wait(timeout_s)

    def stats(self) -> KvTransferStats:
        return msgspec.structs.replace(self._stats, late_look_ups=self._look_ups.late)

    def close(self) -> None:
        self._look_ups.close()

    def _chain(self, request: GenerateRequest) -> list[Digest]:
        root = self._hasher.root(
            lora_name=request.lora,
            adapter_digest=None if request.adapter is None else request.adapter.digest,
            cache_salt=request.cache_salt,
        )
        return self._hasher.chain(root, request.prompt_token_ids)

    def _expected(self, asked: TransferAsked, digests: Sequence[Digest]) -> Sequence[Digest]:
        """What of a prompt's blocks another engine may have saved."""
        if asked.openinfer is None:
            return digests
        num_blocks = asked.openinfer.tokens // self._hasher.block_size_tokens
        if self._is_ours(asked.openinfer, digests, num_blocks):
            return digests[:num_blocks]
        self._count(mismatches=1)
        return ()

    def _is_ours(self, stored: StoredPrefix, digests: Sequence[Digest], num_blocks: int) -> bool:
        """Whether the blocks that another engine tells of are this prompt's, in this engine's layout."""
        if stored.layout != self._layout_digest:
            logger.warning("a prefill engine's blocks have another layout, and are computed: %.64s", stored.layout)
            return False
        if not num_blocks or stored.digest is None:
            return not num_blocks
        return num_blocks <= len(digests) and digests[num_blocks - 1].hex() == stored.digest

    def _is_withheld(self, event: TokenEvent) -> bool:
        if not isinstance(event, Finished | Failed):
            return False
        digests = self._handing_over.pop(event.request_id, None)
        if digests is None or isinstance(event, Failed) or event.reason is FinishReason.ABORT:
            return False
        self._handovers.begin(event, digests, now_s=self._clock())
        return True

    def _told(self, handed: HandedOver) -> Finished:
        digests = handed.digests
        tokens = len(digests) * self._hasher.block_size_tokens
        self._count(prompts=1, tokens=tokens, partial=int(not handed.is_whole))
        answer = handover_answer(
            layout=self._layout_digest, tier=self._tier, tokens=tokens, digest=digests[-1] if digests else None
        )
        return msgspec.structs.replace(handed.finished, transfer=answer)

    def _count(self, *, prompts: int = 0, tokens: int = 0, partial: int = 0, mismatches: int = 0) -> None:
        before = self._stats
        self._stats = KvTransferStats(
            prompts=before.prompts + prompts,
            tokens=before.tokens + tokens,
            partial_prompts=before.partial_prompts + partial,
            mismatches=before.mismatches + mismatches,
        )


def _asked(look_up: Callable[[Sequence[Digest]], None], digests: Sequence[Digest]) -> None:
    try:
        look_up(digests)
    except OSError as error:
        logger.warning("a KV tier could not be asked for another engine's blocks: %s", error)
    except Exception:  # the fault boundary: what a tier does not say is computed
        logger.exception("a KV tier raised when it was asked for another engine's blocks")
