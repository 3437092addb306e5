"""A vLLM made from its recorded interface: classes with its names and no more, so that nothing else is relied on."""

import enum
import json
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

RECORD = json.loads((Path(__file__).parents[1] / "fixtures" / "vllm_connector.json").read_text())["versions"]
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
BLOCK = 4


class Installed:
    """One release of vLLM, as far as a connector sees it."""

    def __init__(self, version, base):
        self.version = version
        self.methods = RECORD[version]["methods"]
        self.base = base

    def given(self, kind, **fields):
        """An object of vLLM with these fields, all of which the recorded class must have."""
        unknown = fields.keys() - set(RECORD[self.version]["given"][kind])
        assert not unknown, f"{kind} of vLLM {self.version} has no {unknown}"
        return SimpleNamespace(**fields)

    def connector(
        self, role, *, num_blocks=32, rank=0, ranks=1, policy="recompute", specs=("FullAttentionSpec",), **extra
    ):
        """A connector as vLLM's factory makes it."""
        from openinfer_kv_offload.vllm import OpenInferConnector

        groups = [self.given("KVCacheGroupSpec", layer_names=["a"], kv_cache_spec=make_spec(name)) for name in specs]
        config = SimpleNamespace(
            kv_transfer_config=self.given(
                "KVTransferConfig", kv_load_failure_policy=policy, kv_connector_extra_config=extra
            ),
            parallel_config=SimpleNamespace(rank=rank, world_size=ranks),
            model_config=SimpleNamespace(model="a/model", revision=None),
        )
        cache = self.given("KVCacheConfig", num_blocks=num_blocks, kv_cache_groups=groups)
        return OpenInferConnector(config, self.base.KVConnectorRole[role], cache)

    def engine(self, **settings):
        """A scheduler and workers around the two sides of the connector."""
        return MiniEngine(self, **settings)


class FullAttentionSpec:
    block_size = BLOCK


def make_spec(name):
    """A spec of vLLM by its class's name; those with "Full" or "RSWA" in it derive from its `FullAttentionSpec`."""
    bases = () if name in ("MambaSpec", "SlidingWindowSpec") else (FullAttentionSpec,)
    return type(name, bases, {})()


def make_base(methods):
    """The base class: abstract where vLLM's is; what is not overridden must not be called."""

    def method(name, facts):
        def call(self, *args, **kwargs):
            raise AssertionError(f"vLLM's own {name} was called")

        return abstractmethod(call) if facts["abstract"] else call

    class Bound:
        def __init__(self, vllm_config, role, kv_cache_config):
            self._connector_metadata = None

        def bind_connector_metadata(self, connector_metadata):
            self._connector_metadata = connector_metadata

        def clear_connector_metadata(self):
            self._connector_metadata = None

        def _get_connector_metadata(self):
            assert self._connector_metadata is not None
            return self._connector_metadata

    names = [name for name, facts in methods.items() if facts["kind"] == "method" and name not in vars(Bound)]
    return type("KVConnectorBase_V1", (Bound, ABC), {name: method(name, methods[name]) for name in names})


@pytest.fixture(params=list(RECORD), scope="module")
def vllm(request):
    """Each recorded release of vLLM, one after the other, is the one that is installed."""
    with pytest.MonkeyPatch.context() as patch:
        forget_ours()
        names = [BASE.rsplit(".", count)[0] for count in range(BASE.count("."), 0, -1)]
        for name in names:
            patch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["vllm"].__version__ = request.param
        base = ModuleType(BASE)
        base.KVConnectorBase_V1 = make_base(RECORD[request.param]["methods"])
        base.SupportsHMA = type("SupportsHMA", (ABC,), {})
        base.KVConnectorMetadata = type("KVConnectorMetadata", (ABC,), {})
        base.KVConnectorWorkerMetadata = type("KVConnectorWorkerMetadata", (ABC,), {})
        base.KVConnectorRole = enum.Enum("KVConnectorRole", ["SCHEDULER", "WORKER"])
        patch.setitem(sys.modules, BASE, base)
        yield Installed(request.param, base)
    forget_ours()


def forget_ours():
    """So that the connector is made anew from the base that is there."""
    for name in [each for each in sys.modules if each.startswith("openinfer_kv_offload.vllm")]:
        del sys.modules[name]


class LateCopy:
    """Ends when it was asked twice."""

    def __init__(self, copy):
        self._copy = copy
        self._asked = 0

    def is_done(self):
        self._asked += 1
        if self._asked == 2:
            self._copy()
        return self._asked >= 2


class ArrayCopies:
    """NumPy arrays with the face of `TorchCopies`; blocks come first, or behind keys and values."""

    identity = "two layers of float16"

    def __init__(self, num_blocks):
        self.layers = [np.zeros((num_blocks, BLOCK, 2), np.float16), np.zeros((2, num_blocks, BLOCK, 3), np.float16)]
        self.block_bytes = BLOCK * (2 + 2 * 3) * 2

    def allocate_staging(self, num_blocks):
        self.staging = np.zeros((num_blocks, self.block_bytes), np.uint8)
        return [memoryview(row) for row in self.staging]

    def block(self, block_id):
        parts = (self.layers[0][block_id], self.layers[1][:, block_id])
        return np.concatenate([np.ascontiguousarray(each).view(np.uint8).reshape(-1) for each in parts])

    def fill(self, block_id, content):
        first = BLOCK * 2 * 2
        self.layers[0][block_id] = content[:first].view(np.float16).reshape(BLOCK, 2)
        self.layers[1][:, block_id] = content[first:].view(np.float16).reshape(2, BLOCK, 3)

    def to_staging(self, block_ids, staging_ids):
        gathered = [self.block(block_id) for block_id in block_ids]  # on the model's stream: what is there now

        def copy():
            for staging_id, content in zip(staging_ids, gathered, strict=True):
                self.staging[staging_id] = content

        return LateCopy(copy)

    def to_pool(self, staging_ids, block_ids):
        def copy():
            for staging_id, block_id in zip(staging_ids, block_ids, strict=True):
                self.fill(block_id, self.staging[staging_id])

        return LateCopy(copy)


class MiniEngine:
    """What vLLM does around a connector: steps, blocks, requests; its KV is a hash of all tokens up to a position."""

    def __init__(self, installed, *, num_blocks=32, ranks=1, **extra):
        self._installed = installed
        self._ranks = ranks
        self.scheduler = installed.connector("SCHEDULER", num_blocks=num_blocks, ranks=ranks, **extra)
        self.workers = [
            installed.connector("WORKER", num_blocks=num_blocks, rank=rank, ranks=ranks, **extra)
            for rank in range(ranks)
        ]
        self.pools = [ArrayCopies(num_blocks) for _ in range(ranks)]
        for worker, pool in zip(self.workers, self.pools, strict=True):
            worker.attach(pool)
        self._free = list(range(num_blocks))
        self._received = Counter()
        self._invalid = set()
        self.computed_tokens = 0

    def request(self, request_id, token_ids, *, salt=None, lora=None, images=()):
        return self._installed.given(
            "Request",
            request_id=request_id,
            all_token_ids=list(token_ids),
            cache_salt=salt,
            lora_request=None if lora is None else SimpleNamespace(name=lora, lora_path=f"/{lora}"),
            mm_features=list(images),
            prompt_embeds=None,
        )

    def run(self, request, *, new_token_ids=(), local_tokens=0, local_tokens_at_first=None):
        """Serves one request to its end and checks its KV; returns how many tokens came from the tiers."""
        name = request.request_id
        asked_with = local_tokens if local_tokens_at_first is None else local_tokens_at_first
        while (matched := self.scheduler.get_num_new_matched_tokens(request, asked_with))[0] is None:
            self.step()
            asked_with = local_tokens
        external, is_async = matched
        prompt_tokens = len(request.all_token_ids)
        blocks = [self._free.pop(0) for _ in range(-(-(prompt_tokens + len(new_token_ids)) // BLOCK))]
        for index in range(local_tokens // BLOCK):
            self._compute(request, blocks, range(index * BLOCK, (index + 1) * BLOCK))
        self._admit(request, blocks, external)
        computed = local_tokens + external
        if is_async:
            while self._received[name] < self._ranks:
                self.step()
            failed = [index for index, block_id in enumerate(blocks) if block_id in self._invalid]
            computed = min([computed, *(index * BLOCK for index in failed)])
            self._admit(request, blocks, 0)
        came = computed - local_tokens
        new = self._new(name, blocks, computed)
        self._compute(request, blocks, range(computed, prompt_tokens))
        self.step(new=[new], scheduled={name: prompt_tokens - computed})
        for token_id in new_token_ids:
            request.all_token_ids.append(token_id)
            last = len(request.all_token_ids) - 1
            self._compute(request, blocks, range(last, last + 1))
            self.step(running={name: last}, scheduled={name: 1})
        self._check(request, blocks)
        assert self.scheduler.request_finished_all_groups(request, (blocks,)) == (False, None)
        for pool in self.pools:  # the next owner writes over them at once
            for block_id in blocks:
                pool.fill(block_id, np.full(pool.block_bytes, 0xEE, np.uint8))
        self._free += blocks
        return came

    def step(self, *, new=(), running=None, scheduled=None):
        """One step of scheduler and workers."""
        given = self._installed.given
        running = running or {}
        cached = given(
            "CachedRequestData",
            req_ids=list(running),
            resumed_req_ids=set(),
            new_block_ids=[None] * len(running),
            num_computed_tokens=list(running.values()),
        )
        output = given(
            "SchedulerOutput",
            scheduled_new_reqs=list(new),
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled or {},
        )
        metadata = self.scheduler.build_connector_meta(output)
        answers = None
        for worker in self.workers:
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            worker.wait_for_save()
            sent, received = worker.get_finished(set())
            assert sent is None
            self._received.update(received)
            self._invalid |= worker.get_block_ids_with_load_errors()
            mine = worker.build_connector_worker_meta()
            answers = mine if answers is None else answers.aggregate(mine)
            worker.clear_connector_metadata()
        self.scheduler.update_connector_output(given("KVConnectorOutput", kv_connector_worker_meta=answers))

    def settle(self):
        """Steps until nothing is on its way into the tiers."""
        self.step()
        give_up_s = time.monotonic() + 30
        while any(worker.is_moving for worker in self.workers):
            assert time.monotonic() < give_up_s, "a copy does not end"
            self.step()

    def close(self):
        for each in (*self.workers, self.scheduler):
            each.shutdown()

    def _new(self, name, blocks, computed):
        return self._installed.given(
            "NewRequestData", req_id=name, block_ids=(list(blocks),), num_computed_tokens=computed
        )

    def _admit(self, request, blocks, external):
        held = self._installed.given("KVCacheBlocks", get_block_ids=lambda: (list(blocks),))
        self.scheduler.update_state_after_alloc(request, held, external)

    def _compute(self, request, blocks, positions):
        self.computed_tokens += len(positions)
        for rank, pool in enumerate(self.pools):
            for position in positions:
                block_id, offset = blocks[position // BLOCK], position % BLOCK
                pool.layers[0][block_id, offset] = self._value(request, position, rank)
                pool.layers[1][:, block_id, offset] = self._value(request, position, rank) + 0.5

    def _check(self, request, blocks):
        for rank, pool in enumerate(self.pools):
            for position in range(len(request.all_token_ids)):
                block_id, offset = blocks[position // BLOCK], position % BLOCK
                value = self._value(request, position, rank)
                assert (pool.layers[0][block_id, offset] == value).all(), f"WRONG KV at {position}"
                assert (pool.layers[1][:, block_id, offset] == value + 0.5).all(), f"WRONG KV at {position}"

    @staticmethod
    def _value(request, position, rank):
        lora = request.lora_request and request.lora_request.name
        context = (*request.all_token_ids[: position + 1], request.cache_salt, lora, tuple(request.mm_features), rank)
        return hash(context) % 997
