"""Prefill and decode apart on two GPUs: an engine on each and a tier that both read, against other uses of both GPUs.

    python3 tools/device/prefill_decode.py chats MODEL OUT.json --tier disk      tokens of chats, and what decode loads
    python3 tools/device/prefill_decode.py load MODEL OUT.json --tier disk       times under a mixed load
    python3 tools/device/prefill_decode.py load MODEL OUT.json --engines replicas
    python3 tools/device/prefill_decode.py killed MODEL OUT.json --tier nixl-gpu       prefill killed under load
    python3 tools/device/prefill_decode.py handover MODEL OUT.json --tier nixl-gpu     times of one long prompt alone

MODEL needs a config.json alone: weights are random. Chats of five turns are compared with an engine alone, in
arithmetic whose results do not depend on the batch. The load is long prompts with short answers among short prompts
with long ones, which arrive at random, the same for all ways; without HTTP. Tiers: `disk` (a folder in memory, which
prefill writes and decode reads), `nixl` (host memory of both engines), `nixl-gpu` (memory of both GPUs). Instead of a
pair, `load` takes one engine of two ranks, or two replicas, of which the one with fewer requests is asked. `killed`
ends the prefill engine's process in the middle of such requests, and compares with an engine alone. A handover is what
a prompt takes longer on two engines than on one: the time until prefill has answered, less what it takes to its first
token without a handover, and decode's time to its first token.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from openinfer_core import (
    EngineClosed,
    EngineHandle,
    Failed,
    Finished,
    GenerateRequest,
    RequestId,
    SamplingParams,
    Scheduled,
    Tokens,
    claim,
    list_plugins,
    read_config,
)
from openinfer_core.plugins import MODELS
from openinfer_core.provenance import provenance
from openinfer_engine.launch import launch

BLOCK_TOKENS = 16
CHATS, TURNS, USER_TOKENS, SAID_TOKENS = 3, 5, 300, 48
PROMPTS = 7
KILLED_REQUESTS, KILLED_PROMPT, KILLED_SAID, KILLED_EVERY_S = 32, 2000, 32, 0.04
HANDOVER = {"do_remote_decode": True}


@dataclass(slots=True)
class Said:
    """What one request got, and when."""

    token_ids: list[int] = field(default_factory=list[int])
    times_s: list[float] = field(default_factory=list[float])
    cached_tokens: int = 0
    transfer: dict[str, Any] | None = None
    begin_s: float = 0.0  # when this engine was asked


class Client:
    """An engine that several tasks ask."""

    def __init__(self, handle: EngineHandle) -> None:
        self.handle = handle
        self._next_id = 0
        self._asked: dict[int, tuple[Said, asyncio.Future[Said]]] = {}
        self._listening = asyncio.create_task(self._listen())

    async def ask(self, prompt: Sequence[int], *, max_tokens: int, transfer: dict[str, Any] | None = None) -> Said:
        self._next_id += 1
        request_id, done = self._next_id, asyncio.get_running_loop().create_future()
        self._asked[request_id] = Said(begin_s=time.perf_counter()), done
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.handle.submit(
            GenerateRequest(
                request_id=RequestId(request_id),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                transfer=transfer,
            )
        )
        return await done

    async def _listen(self) -> None:
        try:
            await self._listen_to_events()
        except EngineClosed as closed:
            for _, done in self._asked.values():
                if not done.done():
                    done.set_exception(closed)

    async def _listen_to_events(self) -> None:
        async for events in self.handle.events():
            now_s = time.perf_counter()
            for event in events:
                said, done = self._asked[event.request_id]
                match event:
                    case Scheduled():
                        said.cached_tokens = event.cached_tokens
                    case Tokens():
                        said.token_ids += event.token_ids
                        said.times_s += [now_s] * len(event.token_ids)
                    case Finished():
                        said.transfer = event.transfer
                        done.set_result(said)
                    case Failed():
                        done.set_exception(RuntimeError(event.message))
                    case _:
                        pass

    async def close(self) -> None:
        await self.handle.close()
        await self._listening


class Pair:
    """Prefill and decode, as a proxy uses them."""

    def __init__(self, prefill: Client, decode: Client) -> None:
        self.prefill, self.decode = prefill, decode

    async def ask(self, prompt: Sequence[int], *, max_tokens: int) -> Said:
        left = (await self.prefill.ask(prompt, max_tokens=1, transfer=HANDOVER)).transfer
        return await self.decode.ask(prompt, max_tokens=max_tokens, transfer=left)


class Replicas:
    """Engines, of which the one with the fewest requests is asked."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self.clients = clients
        self._open = [0] * len(clients)

    async def ask(self, prompt: Sequence[int], *, max_tokens: int) -> Said:
        chosen = self._open.index(min(self._open))
        self._open[chosen] += 1
        try:
            return await self.clients[chosen].ask(prompt, max_tokens=max_tokens)
        finally:
            self._open[chosen] -= 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("chats", "load", "killed", "handover"))
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tier", choices=("disk", "nixl", "nixl-gpu"), default="disk")
    parser.add_argument("--engines", choices=("pair", "tensor-parallel", "replicas"), default="pair", help="of `load`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus", nargs=2, default=["0", "1"])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--long", type=int, nargs=2, default=[3000, 32], help="tokens of prompt and answer")
    parser.add_argument("--short", type=int, nargs=2, default=[256, 192])
    parser.add_argument("--rates", type=float, nargs=2, default=[1.5, 8.0], help="long and short requests a second")
    parser.add_argument("--tier-mib", type=int, default=24 << 10)
    parser.add_argument("--options", type=json.loads, default={}, help="further options of the engines, as JSON")
    given = parser.parse_args()
    with tier_folder() as folder:
        found = {"chats": chats, "load": load, "killed": killed, "handover": handover}[given.what](given, folder)
    set_up = {name: value for name, value in vars(given).items() if name not in ("model", "out")}
    report = {**msgspec.to_builtins(provenance(commit=os.environ.get("COMMIT"))), "model": given.model.name}
    given.out.write_text(json.dumps({**report, "set_up": set_up, **found}, indent=2) + "\n")
    print(json.dumps(found), flush=True)


@contextlib.contextmanager
def tier_folder() -> Iterator[Path]:
    """In memory, where there is room: a disk's speed is not what is measured."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 40 << 30
    with tempfile.TemporaryDirectory(dir=shared if roomy else None) as name:
        yield Path(name)


def start(given: argparse.Namespace, gpus: str, **options: Any) -> EngineHandle:
    family: Any = claim(read_config(given.model), list_plugins(MODELS))[0]
    asked = {"device": given.device, "load_format": "dummy", "grammar_compiler": "none"}
    asked |= {"block_size_tokens": BLOCK_TOKENS, **options, **given.options}
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    begin_s = time.perf_counter()
    try:
        handle = launch(family.definition, given.model, msgspec.convert(asked, family.options_type))
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    print(f"an engine on GPU {gpus} started in {time.perf_counter() - begin_s:.1f} s", flush=True)
    return handle


def start_pair(given: argparse.Namespace, folder: Path, **options: Any) -> list[EngineHandle]:
    (folder / "key").write_bytes(b"k" * 32)
    (folder / "token").write_bytes(b"t" * 32)
    size = f"{given.tier_mib}MiB"
    if given.tier == "disk":
        setting = f"disk={folder / 'blocks'},{size}"
        tiers = [setting, f"{setting},access=read,refresh_s=60"]
    else:
        ports = [free_port(), free_port()]
        each = f"{size},token_file={folder / 'token'},timeout_s=20"
        tiers = [f"{given.tier}=127.0.0.1:{a},{each},peers=127.0.0.1:{b}" for a, b in (ports, ports[::-1])]
    shared = {"kv_key_file": str(folder / "key"), "kv_transfer": given.tier, "kv_load_timeout_ms": 20_000, **options}
    return [start(given, gpu, kv_tier=[tier], **shared) for gpu, tier in zip(given.gpus, tiers, strict=True)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


# --- chats --------------------------------------------------------------------------------------------------


def chats(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    # Two engines share the first GPU: each takes what its blocks need.
    shared = {"batch_invariant": True, "num_blocks": 2048, "max_num_seqs": 16, "max_model_tokens": 4096}
    shared |= {"gpu_memory_fraction": 0.45}
    engines = start_pair(given, folder, kv_handover_timeout_ms=20_000, **shared)
    engines.append(start(given, given.gpus[0], **shared))
    return asyncio.run(run_chats(engines))


async def run_chats(engines: Sequence[EngineHandle]) -> dict[str, Any]:
    prefill, decode, alone = map(Client, engines)
    pair, rng = Pair(prefill, decode), np.random.default_rng(1)
    equal = loaded = sealed = requests = 0
    for _ in range(CHATS):
        history: list[int] = []
        for _ in range(TURNS):
            history += rng.integers(0, alone.handle.info.num_token_ids, USER_TOKENS).tolist()
            said = await pair.ask(history, max_tokens=SAID_TOKENS)
            expected = await alone.ask(history, max_tokens=SAID_TOKENS)
            equal += said.token_ids == expected.token_ids
            loaded += said.cached_tokens
            sealed += (len(history) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            requests += 1
            history += expected.token_ids
    stats = await prefill.handle.stats(), await decode.handle.stats()
    found = {
        "requests": requests,
        "equal": equal,
        "sealed_prompt_tokens": sealed,
        "found_by_decode": loaded,
        "loaded_from_tier": [each.tier_tokens for each in stats],
        "transfer": [msgspec.to_builtins(each.kv_transfer) for each in stats],
    }
    for client in (prefill, decode, alone):
        await client.close()
    return found


# --- a prefill engine that is killed --------------------------------------------------------------------------


def killed(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shared = {"batch_invariant": True, "num_blocks": 3072, "max_num_seqs": 32, "max_model_tokens": 4096}
    shared |= {"gpu_memory_fraction": 0.45}
    engines = start_pair(given, folder, kv_handover_timeout_ms=20_000, **shared)
    engines.append(start(given, given.gpus[0], **shared))
    return asyncio.run(run_killed(engines))


async def run_killed(engines: Sequence[EngineHandle]) -> dict[str, Any]:
    """Requests come at even times; when half of them have been sent, prefill is killed."""
    prefill, decode, alone = map(Client, engines)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, alone.handle.info.num_token_ids, KILLED_PROMPT).tolist() for _ in range(KILLED_REQUESTS)]
    await Pair(prefill, decode).ask(prompts[0][::-1], max_tokens=2)  # opens what peers open of each other
    counted = {"prefill_answered": 0, "prefill_failed": 0}
    took_s: list[float] = []

    async def one(number: int) -> Said:
        """As a proxy: what prefill does not answer, decode is asked alone."""
        await asyncio.sleep(number * KILLED_EVERY_S)
        begin_s, left = time.perf_counter(), None
        try:
            left = (await prefill.ask(prompts[number], max_tokens=1, transfer=HANDOVER)).transfer
            counted["prefill_answered"] += 1
        except (RuntimeError, EngineClosed):
            counted["prefill_failed"] += 1
        said = await decode.ask(prompts[number], max_tokens=KILLED_SAID, transfer=left)
        took_s.append(time.perf_counter() - begin_s)
        return said

    tasks = [asyncio.create_task(one(number)) for number in range(KILLED_REQUESTS)]
    await asyncio.sleep(KILLED_REQUESTS * KILLED_EVERY_S / 2)
    pid: int = getattr(prefill.handle, "pid")  # noqa: B009 - of an engine in a process of its own
    os.kill(pid, signal.SIGKILL)
    said = await asyncio.gather(*tasks)
    expected = [await alone.ask(prompt, max_tokens=KILLED_SAID) for prompt in prompts]
    sealed = (KILLED_PROMPT - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    found = {
        "requests": KILLED_REQUESTS,
        **counted,
        "equal": sum(a.token_ids == b.token_ids for a, b in zip(said, expected, strict=True)),
        "loaded_whole": sum(each.cached_tokens == sealed for each in said),
        "loaded_in_part": sum(0 < each.cached_tokens < sealed for each in said),
        "computed": sum(each.cached_tokens == 0 for each in said),
        "longest_s": round(max(took_s), 3),
        # It goes on with what it has saved itself.
        "found_again": (await decode.ask(prompts[-1], max_tokens=2)).cached_tokens,
    }
    for client in (prefill, decode, alone):
        await client.close()
    return found


# --- one prompt ---------------------------------------------------------------------------------------------


def handover(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return asyncio.run(run_handover(start_pair(given, folder, kv_handover_timeout_ms=20_000), given))


async def run_handover(engines: Sequence[EngineHandle], given: argparse.Namespace) -> dict[str, Any]:
    prefill, decode = map(Client, engines)
    rng, tokens = np.random.default_rng(3), given.long[0]
    times: dict[str, list[float]] = {
        name: [] for name in ("alone_ms", "prefill_ms", "decode_ms", "again_ms", "handover_ms")
    }
    loaded: list[int] = []
    for number in range(PROMPTS + 1):  # the first warms up, and opens what peers open of each other
        prompts = [rng.integers(0, prefill.handle.info.num_token_ids, tokens).tolist() for _ in range(2)]
        begin_s = time.perf_counter()
        await prefill.ask(prompts[0], max_tokens=1)
        alone_s = time.perf_counter()
        await asyncio.sleep(0.5)  # what it saves is not to be in the way of the next
        prefill_begin_s = time.perf_counter()
        left = (await prefill.ask(prompts[1], max_tokens=1, transfer=HANDOVER)).transfer
        answered_s = time.perf_counter()
        said = await decode.ask(prompts[1], max_tokens=2, transfer=left)
        again_s = time.perf_counter()
        again = await decode.ask(prompts[1], max_tokens=2)  # what of decode's time is not the blocks' way
        alone_ms, prefill_ms = 1e3 * (alone_s - begin_s), 1e3 * (answered_s - prefill_begin_s)
        decode_ms, again_ms = 1e3 * (said.times_s[0] - answered_s), 1e3 * (again.times_s[0] - again_s)
        if number:
            ms = alone_ms, prefill_ms, decode_ms, again_ms, prefill_ms - alone_ms + decode_ms
            for name, value in zip(times, ms, strict=True):
                times[name].append(round(value, 2))
            loaded.append(said.cached_tokens)
        await asyncio.sleep(0.5)
    stats = [await client.handle.stats() for client in (prefill, decode)]
    for client in (prefill, decode):
        await client.close()
    return {
        "prompt_tokens": tokens,
        "median": {name: float(np.median(values)) for name, values in times.items()},
        "all": times,
        "loaded_tokens": loaded,
        "sealed_tokens": (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS,
        "transfer": [msgspec.to_builtins(each.kv_transfer) for each in stats],
    }


# --- a mixed load -------------------------------------------------------------------------------------------


def load(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if given.engines == "tensor-parallel":
        return asyncio.run(run_load([start(given, ",".join(given.gpus), tensor_parallel_size=2)], given))
    if given.engines == "replicas":
        return asyncio.run(run_load([start(given, gpu) for gpu in given.gpus], given))
    return asyncio.run(run_load(start_pair(given, folder, kv_handover_timeout_ms=5000), given))


async def run_load(engines: Sequence[EngineHandle], given: argparse.Namespace) -> dict[str, Any]:
    clients = [Client(each) for each in engines]
    asked = Pair(clients[0], clients[1]) if given.engines == "pair" else Replicas(clients)
    kinds, rng = {"long": given.long, "short": given.short}, np.random.default_rng(7)
    num_ids = clients[0].handle.info.num_token_ids

    async def one(kind: str, at_s: float, prompt: Sequence[int]) -> tuple[str, float, Said]:
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
        begin_s = time.perf_counter()
        return kind, begin_s, await asked.ask(prompt, max_tokens=kinds[kind][1])

    def prompt_of(kind: str) -> list[int]:
        return rng.integers(0, num_ids, kinds[kind][0]).tolist()

    now_s = time.perf_counter()
    await asyncio.gather(*(one(kind, now_s, prompt_of(kind)) for kind in ("short", "long", "short", "long")))
    begin_s, tasks = time.perf_counter() + 0.1, list[Any]()
    for kind, rate in zip(kinds, given.rates, strict=True):
        arrivals = np.cumsum(rng.exponential(1 / rate, int(rate * given.seconds)))
        tasks += [one(kind, begin_s + at_s, prompt_of(kind)) for at_s in arrivals]
    done = await asyncio.gather(*tasks)
    end_s = time.perf_counter()
    stats = [await client.handle.stats() for client in clients]
    for client in clients:
        await client.close()
    tokens = sum(len(said.token_ids) for _, _, said in done)
    found: dict[str, Any] = {"tokens_per_s": round(tokens / (end_s - begin_s), 1), "requests": len(done)}
    for kind, (prompt, _) in kinds.items():
        found[kind] = times_of([each for each in done if each[0] == kind])
        found[kind]["found_of_sealed"] = round(
            float(np.mean([said.cached_tokens for name, _, said in done if name == kind]))
            / ((prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS),
            4,
        )
    found["transfer"] = [msgspec.to_builtins(each.kv_transfer) for each in stats]
    return found


def times_of(done: Sequence[tuple[str, float, Said]]) -> dict[str, Any]:
    first = np.asarray([said.times_s[0] - begin_s for _, begin_s, said in done]) * 1e3
    each = np.asarray([(said.times_s[-1] - said.times_s[0]) / (len(said.times_s) - 1) for _, _, said in done]) * 1e3
    gaps = np.concatenate([np.diff(said.times_s) for _, _, said in done]) * 1e3
    asked = np.asarray([said.begin_s - begin_s for _, begin_s, said in done]) * 1e3
    named = {"ttft_ms": first, "tpot_ms": each, "gap_ms": gaps}
    if asked.max() > 1:  # of a pair: until prefill has answered, and from there to decode's first token
        named |= {"prefill_ms": asked, "decode_ms": first - asked}
    return {"requests": len(done)} | {
        name: {f"p{q}": round(float(np.percentile(values, q)), 2) for q in (50, 95, 99)}
        for name, values in named.items()
    }


if __name__ == "__main__":
    sys.exit(main())
