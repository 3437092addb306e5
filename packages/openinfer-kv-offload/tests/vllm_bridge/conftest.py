"""A vLLM made from its recorded interface: classes with its names and no more, so that nothing else is relied on."""

import contextlib
import enum
import json
import os
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import field, make_dataclass
from itertools import product
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

        groups = [
            self.given("KVCacheGroupSpec", layer_names=[f"layer{index}"], kv_cache_spec=make_spec(name))
            for index, name in enumerate(specs)
        ]
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
    """A spec of vLLM by its class's name; those with "Full" or "RSWA" in it derive from its `FullAttentionSpec`.

    `SlidingWindowSpec:6` has a window of six tokens.
    """
    name, _, window = name.partition(":")
    if name == "SlidingWindowSpec":
        return type(name, (), {"block_size": BLOCK, "sliding_window": int(window or 1)})()
    bases = () if name == "MambaSpec" else (FullAttentionSpec,)
    return type(name, bases, {"block_size": BLOCK})()


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
        results = RECORD[request.param]["given"].get("KVConnectorTransferResults")
        if results is not None:
            base.KVConnectorTransferResults = make_dataclass(
                "KVConnectorTransferResults", [(name, set, field(default_factory=set)) for name in results]
            )
        base.KVConnectorRole = enum.Enum("KVConnectorRole", ["SCHEDULER", "WORKER"])
        patch.setitem(sys.modules, BASE, base)
        yield Installed(request.param, base)
    forget_ours()


def forget_ours():
    """So that the connector is made anew from the base that is there."""
    for name in [each for each in sys.modules if each.startswith("openinfer_kv_offload.vllm")]:
        del sys.modules[name]


@pytest.fixture
def engines(vllm):
    """Starts engines and closes them."""
    started = []

    def start(**settings):
        started.append(vllm.engine(**{"tiers": ["host=1MiB"], "staging_bytes": 64 * 256, **settings}))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def damage():
    """Makes a function that flips one byte of one segment of a disk tier."""

    def flip(rng, store):
        segments = sorted(store.glob("segment-*.kv"))
        path = rng.choice(segments) if segments else None
        if path is None:
            return
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:  # the tier gives up segments meanwhile
            if num_bytes := file.seek(0, os.SEEK_END):
                file.seek(rng.randrange(num_bytes))
                file.write(b"\xa5")

    return flip


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
    """NumPy arrays with the face of `TorchCopies`; blocks come first, or behind keys and values.

    All tables have the same memory, as in vLLM: a block belongs to one of them at a time. Tables after the first have a
    layer less.
    """

    identity = "two layers of float16, named at length " * 100  # as those of a real model are

    def __init__(self, num_blocks):
        self.layers = [np.zeros((num_blocks, BLOCK, 2), np.float16), np.zeros((2, num_blocks, BLOCK, 3), np.float16)]
        self.block_bytes = BLOCK * (2 + 2 * 3) * 2
        self.loaded = Counter()  # blocks by table

    def allocate_staging(self, num_blocks):
        self.staging = np.zeros((num_blocks, self.block_bytes), np.uint8)
        return [memoryview(row) for row in self.staging]

    def block(self, block_id, table):
        parts = (self.layers[0][block_id], self.layers[1][:, block_id])[: 1 if table else 2]
        return np.concatenate([np.ascontiguousarray(each).view(np.uint8).reshape(-1) for each in parts])

    def fill(self, block_id, content, table=0):
        first = BLOCK * 2 * 2
        self.layers[0][block_id] = content[:first].view(np.float16).reshape(BLOCK, 2)
        if not table:
            self.layers[1][:, block_id] = content[first:].view(np.float16).reshape(2, BLOCK, 3)

    def to_staging(self, block_ids, staging_ids, *, table):
        gathered = [self.block(block_id, table) for block_id in block_ids]  # on the model's stream: what is there now

        def copy():
            for staging_id, content in zip(staging_ids, gathered, strict=True):
                self.staging[staging_id, : len(content)] = content

        return LateCopy(copy)

    def to_pool(self, staging_ids, block_ids, *, table):
        self.loaded[table] += len(block_ids)

        def copy():
            for staging_id, block_id in zip(staging_ids, block_ids, strict=True):
                self.fill(block_id, self.staging[staging_id], table)

        return LateCopy(copy)


NULL_BLOCK = 0


class MiniEngine:
    """What vLLM does around a connector: steps, blocks, requests; its KV is a hash of all tokens up to a position.

    A request has blocks of each KV cache group, position by position. Where no token from the next one on sees a block,
    the null block stands in its place, and the block has another owner at once.
    """

    def __init__(self, installed, *, num_blocks=48, ranks=1, specs=("FullAttentionSpec",), **extra):
        self._installed = installed
        self._ranks = ranks
        common = {"num_blocks": num_blocks, "ranks": ranks, "specs": specs, **extra}
        self.scheduler = installed.connector("SCHEDULER", **common)
        self.workers = [installed.connector("WORKER", rank=rank, **common) for rank in range(ranks)]
        self.pools = [ArrayCopies(num_blocks) for _ in range(ranks)]
        for worker, pool in zip(self.workers, self.pools, strict=True):
            worker.attach(pool)
        self._windows = [int(each.partition(":")[2]) if ":" in each else None for each in specs]
        # A layer less in all but the connector's first table, which is the first group of full attention.
        self._largest_group = self._windows.index(None)
        self._free = list(range(NULL_BLOCK + 1, num_blocks))
        self._received = Counter()
        self._invalid = set()
        self._failed = set()
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

    def run(self, request, *, new_token_ids=(), local_tokens=0, local_tokens_at_first=None, chunk_tokens=1000):
        """Serves one request to its end and checks its KV; returns how many tokens came from the tiers."""
        name = request.request_id
        asked_with = local_tokens if local_tokens_at_first is None else local_tokens_at_first
        computed, held = None, []
        while computed is None:
            while (matched := self.scheduler.get_num_new_matched_tokens(request, asked_with))[0] is None:
                self.step()
                asked_with = local_tokens
            held = self._begin(request, local_tokens, matched[0])
            self._admit(request, held, matched[0])
            computed = self._load(request, held, local_tokens + matched[0]) if matched[1] else local_tokens
            if computed is None:  # what failed of several groups is all computed again
                self._give_back([block_id for blocks in held for block_id in blocks])
                local_tokens = asked_with = 0
        came, is_new, end = computed - local_tokens, True, len(request.all_token_ids)
        for token_id in (None, *new_token_ids):
            if token_id is not None:
                request.all_token_ids.append(token_id)
                end += 1
            while computed < end:
                self._forget(held, computed)
                step_end = min(computed + chunk_tokens, end)
                new = self._extend(held, step_end)
                self._compute(request, held, range(computed, step_end))
                if is_new:
                    given = self._installed.given(
                        "NewRequestData", req_id=name, block_ids=copied(held), num_computed_tokens=computed
                    )
                    self.step(new=[given], scheduled={name: step_end - computed})
                else:
                    self.step(running={name: (new, computed)}, scheduled={name: step_end - computed})
                computed, is_new = step_end, False
        self._check(request, held, len(request.all_token_ids))
        assert self.scheduler.request_finished_all_groups(request, copied(held)) == (False, None)
        self._give_back([block_id for blocks in held for block_id in blocks])
        return came

    def step(self, *, new=(), running=None, scheduled=None):
        """One step of scheduler and workers."""
        given = self._installed.given
        running = running or {}
        cached = given(
            "CachedRequestData",
            req_ids=list(running),
            resumed_req_ids=set(),
            new_block_ids=[new_ids if any(new_ids) else None for new_ids, _ in running.values()],
            num_computed_tokens=[computed for _, computed in running.values()],
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
            self._received.update(self._finished(worker))
            self._invalid |= worker.get_block_ids_with_load_errors()
            assert not self._invalid or len(self._windows) == 1, "vLLM has no block ids that are of all groups"
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

    def block_bytes_of(self, request, index, *, group):
        """How the first layer's part of a block begins."""
        values = [self._value(request, position, 0, group) for position in range(index * BLOCK, (index + 1) * BLOCK)]
        return np.array(values, np.float16).repeat(2).tobytes()

    def _finished(self, worker):
        if "get_transfer_results" not in self._installed.methods:
            sent, received = worker.get_finished(set())
            assert sent is None
            return received
        results = worker.get_transfer_results(set())
        assert not results.finished_sending
        assert results.failed_recving <= results.finished_recving
        self._failed |= results.failed_recving
        return results.finished_recving

    def _begin(self, request, local_tokens, external_tokens):
        """Blocks of the tokens that are there or will be; those of local ones are filled, as if cached."""
        computed = local_tokens + external_tokens
        held = [[] for _ in self._windows]
        self._extend(held, local_tokens)
        self._compute(request, held, range(local_tokens))
        self._forget(held, computed)
        for group, blocks in enumerate(held):
            skipped = self._first_block(group, computed)
            blocks.extend([NULL_BLOCK] * (skipped - len(blocks)))
        self._extend(held, computed)
        return held

    def _load(self, request, held, end):
        """Waits for what was promised; returns the tokens that are there then, None if all are to be computed."""
        name = request.request_id
        while self._received[name] < self._ranks:
            self.step()
        del self._received[name]
        self._admit(request, held, 0)
        if name in self._failed:
            self._failed.remove(name)
            return None
        if len(held) == 1:
            failed = [index for index, block_id in enumerate(held[0]) if block_id in self._invalid]
            end = min([end, *(index * BLOCK for index in failed)])
        self._check(request, held, end)
        return end

    def _admit(self, request, held, external):
        blocks = self._installed.given("KVCacheBlocks", get_block_ids=lambda: copied(held))
        self.scheduler.update_state_after_alloc(request, blocks, external)

    def _extend(self, held, num_tokens):
        """Blocks for so many tokens, of each group; returns the new ones."""
        new = [[self._free.pop(0) for _ in range(-(-num_tokens // BLOCK) - len(blocks))] for blocks in held]
        for blocks, added in zip(held, new, strict=True):
            blocks.extend(added)
        return tuple(new)

    def _forget(self, held, computed_tokens):
        for group, blocks in enumerate(held):
            end = min(self._first_block(group, computed_tokens), len(blocks))
            self._give_back([block_id for block_id in blocks[:end] if block_id != NULL_BLOCK])
            blocks[:end] = [NULL_BLOCK] * end

    def _first_block(self, group, computed_tokens):
        window = self._windows[group]
        return 0 if window is None else max(0, computed_tokens - window + 1) // BLOCK

    def _give_back(self, block_ids):
        block_ids = [block_id for block_id in block_ids if block_id != NULL_BLOCK]
        for pool in self.pools:  # the next owner writes over them at once
            for block_id in block_ids:
                pool.fill(block_id, np.full(pool.block_bytes, 0xEE, np.uint8))
        self._free += block_ids

    def _compute(self, request, held, positions):
        self.computed_tokens += len(positions)
        for rank, pool in enumerate(self.pools):
            for group, position in product(range(len(held)), positions):
                block_id, offset = held[group][position // BLOCK], position % BLOCK
                pool.layers[0][block_id, offset] = self._value(request, position, rank, group)
                pool.layers[1][:, block_id, offset] = self._value(request, position, rank, group) + 0.5

    def _check(self, request, held, num_tokens):
        """The KV that the token after so many sees."""
        for rank, pool in enumerate(self.pools):
            for group, blocks in enumerate(held):
                for position in range(self._first_block(group, num_tokens) * BLOCK, num_tokens):
                    block_id, offset = blocks[position // BLOCK], position % BLOCK
                    value = self._value(request, position, rank, group)
                    assert block_id != NULL_BLOCK, f"NO KV at {position} of group {group}"
                    assert (pool.layers[0][block_id, offset] == value).all(), f"WRONG KV at {position} of group {group}"
                    if group == self._largest_group:
                        assert (pool.layers[1][:, block_id, offset] == value + 0.5).all(), f"WRONG KV at {position}"

    @staticmethod
    def _value(request, position, rank, group):
        lora = request.lora_request and request.lora_request.name
        # the hashes of texts and of None are others in each process, those of integers are not
        words = zlib.crc32(repr((request.cache_salt, lora, request.mm_features)).encode())
        return hash((*request.all_token_ids[: position + 1], words, rank, group)) % 997


def copied(held):
    """Block ids as vLLM tells them: a list for each group."""
    return tuple(list(blocks) for blocks in held)
