"""`SchedulerSide`: asks the workers for prefixes, and says what is to be loaded and saved."""

from array import array
from collections.abc import Sequence
from typing import Any

from openinfer_kv_cache import Digest, PrefixHasher, table_digests
from openinfer_kv_cache.windows import first_visible_block
from openinfer_kv_offload.vllm.messages import Load, Query, Save, StepMetadata, WorkerAnswers
from openinfer_kv_offload.vllm.tables import CacheTables

# At first, and after preemptions or a partial load: a request whose blocks keep failing is computed.
MAX_QUERIES = 3


class TrackedRequest:
    """Digests, blocks and the state of the one query of a request that may be open."""

    def __init__(self, request: Any, hasher: PrefixHasher) -> None:
        self._request = request
        self._hasher = hasher
        lora = request.lora_request
        self._root = hasher.root(lora_name=None if lora is None else lora.name, cache_salt=request.cache_salt or None)
        self._ids = array("I")
        self._digests: list[Digest] = []
        # Else its KV depends on more than ids, and it is left alone.
        self.is_text = not request.mm_features and request.prompt_embeds is None
        self.block_ids: list[list[int]] = []  # by table
        self.saved_blocks = 0
        self.num_queries = 0
        self.first_block = 0  # of the query that is open or answered
        self.is_asked = False
        self.found_blocks: int | None = None

    def digests(self, num_blocks: int) -> Sequence[Digest]:
        """Digests of the first blocks, as far as their ids are known."""
        known = self._request.all_token_ids
        self._ids.extend(known[len(self._ids) : len(known)])
        num_blocks = min(num_blocks, len(self._ids) // self._hasher.block_size_tokens)
        self._hasher.extend_chain(self._digests, self._root, self._ids, num_blocks=num_blocks)
        return self._digests[:num_blocks]

    @property
    def matchable_blocks(self) -> int:
        return max(len(self._request.all_token_ids) - 1, 0) // self._hasher.block_size_tokens

    def forget_answer(self) -> None:
        self.is_asked = False
        self.found_blocks = None


class SchedulerSide:
    """Lives in the process of vLLM's scheduler; reads its requests and step outputs, and changes neither."""

    def __init__(self, hasher: PrefixHasher, tables: CacheTables) -> None:
        self._hasher = hasher
        self._tables = tables
        self._block_tokens = tables.block_tokens
        self._tracked: dict[str, TrackedRequest] = {}
        self._next = StepMetadata()

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded beyond those computed, and whether in the background; None: ask again."""
        tracked = self._track(request)
        end_blocks = tracked.matchable_blocks
        first_block, is_cut = divmod(num_computed_tokens, self._block_tokens)
        if not tracked.is_text or is_cut or first_block >= end_blocks:
            return 0, False
        if not tracked.is_asked:
            if tracked.num_queries == MAX_QUERIES:
                return 0, False
            tracked.is_asked = True
            tracked.num_queries += 1
            tracked.first_block = first_block
            self._next.queries[request.request_id] = Query(first_block, tracked.digests(end_blocks)[first_block:])
        if tracked.found_blocks is None:
            return None, False
        tokens = (tracked.first_block + tracked.found_blocks) * self._block_tokens - num_computed_tokens
        return (tokens, True) if tokens > 0 and first_block >= tracked.first_block else (0, False)

    def admitted(self, request: Any, by_group: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """The request has its blocks; what was promised to be loaded goes into the last of its full ones."""
        tracked = self._track(request)
        if not tracked.is_asked:
            return
        if num_external_tokens > 0 and tracked.found_blocks is not None:
            end_block = tracked.first_block + tracked.found_blocks
            first_block = end_block - num_external_tokens // self._block_tokens
            self._next.loads[request.request_id] = Load(
                first_block,
                end_block,
                [
                    block_ids[max(first_block, self._tables.first_block(table, end_block)) : end_block]
                    for table, block_ids in enumerate(self._tables.of_groups(by_group))
                ],
            )
        else:
            self._next.drops.append(request.request_id)
        tracked.forget_answer()

    def take_metadata(self, output: Any) -> StepMetadata:
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids, new.num_computed_tokens)
            self._save(new.req_id, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            new_ids, computed_tokens = cached.new_block_ids[index], cached.num_computed_tokens[index]
            if request_id in cached.resumed_req_ids:
                self._begin(request_id, new_ids, computed_tokens)
            elif new_ids is not None and request_id in self._tracked:
                for held, added in zip(
                    self._tracked[request_id].block_ids, self._tables.of_groups(new_ids), strict=True
                ):
                    held.extend(added)
            self._save(request_id, computed_tokens, output.num_scheduled_tokens[request_id])
        metadata, self._next = self._next, StepMetadata()
        return metadata

    def take_answers(self, answers: WorkerAnswers) -> None:
        for request_id, found_blocks in answers.found_blocks.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.is_asked:
                tracked.found_blocks = found_blocks

    def finished(self, request_id: str) -> None:
        """The request is over; a load of it that is under way goes on to its end."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None and tracked.is_asked and self._next.queries.pop(request_id, None) is None:
            self._next.drops.append(request_id)

    def _track(self, request: Any) -> TrackedRequest:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = TrackedRequest(request, self._hasher)
        return tracked

    def _begin(self, request_id: str, by_group: Sequence[Sequence[int]] | None, computed_tokens: int) -> None:
        # What is computed already was saved when it was computed.
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            no_blocks: list[list[int]] = [[] for _ in range(len(self._tables))]
            tracked.block_ids = no_blocks if by_group is None else self._tables.of_groups(by_group)
            tracked.saved_blocks = computed_tokens // self._block_tokens

    def _save(self, request_id: str, computed_tokens: int, step_tokens: int) -> None:
        # Digests end where ids are known: of a speculation only what was accepted is saved.
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.is_text:
            return
        held_blocks = min(map(len, tracked.block_ids), default=0)
        full_blocks = min((computed_tokens + step_tokens) // self._block_tokens, held_blocks)
        if full_blocks <= tracked.saved_blocks:
            return
        digests = tracked.digests(full_blocks)
        first, tracked.saved_blocks = tracked.saved_blocks, len(digests)
        for table, window in enumerate(self._tables.windows):
            # vLLM has given back by now what no token of this step sees; ids may be known a step late.
            begin = max(first, first_visible_block(computed_tokens, window, self._block_tokens))
            if begin < len(digests):
                block_ids = tracked.block_ids[table][begin : len(digests)]
                self._next.saves.append(Save(table_digests(digests[begin:], table), block_ids, table))
