"""What adapters cost an engine on a GPU: TPOT and prefill in turns with one that serves none, and what loading takes.

    python3 tools/device/lora_engine.py MODEL [--sizes 1x1024 ...] [--rank R] [--adapters N] [--ranks N]
                                        [--turns N] [--in-product] [--before-prompts] [--device cuda|cpu]
                                        [--json FILE] [--commit C]

MODEL is a folder with a config.json; weights are random. Four kinds of steps, one after the other in each turn:
`plain`, of an engine without `--lora`; `none`, of one with `--lora` whose requests name no adapter; `one` and `all`,
whose requests name one, or all in turn. Every adapter has all projections. With `--in-product` a fifth, `in_product`:
as `all`, of an engine in which no kernel after a product adds adapters (`DeferredAdapters` serves none). With
`--before-prompts` one more, `before`: as `all`, of an engine that multiplies prompts as `earlier_prompts.py` says.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = folders()


from earlier_prompts import prompts_as_before  # noqa: E402
from made_adapters import made_adapters  # noqa: E402

from openinfer_bench.offline import measure_offline  # noqa: E402
from openinfer_core import (  # noqa: E402
    GenerateRequest,
    RequestId,
    SamplingParams,
    Tokens,
)
from openinfer_core.control import LoadAdapter  # noqa: E402
from openinfer_core.process.resident import settle_memory  # noqa: E402
from openinfer_engine.child import SWITCH_INTERVAL_S  # noqa: E402
from openinfer_engine.engine_plan import resolve  # noqa: E402
from openinfer_engine.launch import build_loop  # noqa: E402
from openinfer_engine.loop import StepLoop  # noqa: E402
from openinfer_engine.lora.rank_adapters import RankAdapters, ReadAdapter  # noqa: E402
from openinfer_engine.options import DeviceKind, EngineOptions, LoadFormat  # noqa: E402

MAX_STEP_TOKENS = 8192
NEW_ADAPTERS = 4
BETWEEN_LOADS_S = 0.25
IN_PRODUCT, BEFORE = "in_product", "before"


@contextmanager
def adapters_in_products() -> Iterator[None]:
    """Within it no operator after a product adds what adapters do; steps that were captured stay as they are."""
    from openinfer_kernels.cuda.lora.deferred_delta import DeferredAdapters

    rule = DeferredAdapters.serves
    DeferredAdapters.serves = lambda *_, **__: False
    try:
        yield
    finally:
        DeferredAdapters.serves = rule


WITHIN = {IN_PRODUCT: adapters_in_products, BEFORE: prompts_as_before}
"""How steps of a kind are made, and measured, in another way."""


def make_loop(definition: Any, model: Path, given: argparse.Namespace, **options: Any) -> StepLoop:
    rows = max(int(each.split("x")[0]) for each in given.sizes)
    tokens = max(int(rows) * (int(prompt) + 256) for rows, prompt in (each.split("x") for each in given.sizes))
    longest = max(int(each.split("x")[1]) for each in given.sizes)
    chosen = EngineOptions(
        device=DeviceKind(given.device),
        load_format=LoadFormat.DUMMY,
        tensor_parallel_size=given.ranks,
        prefix_cache=False,
        num_blocks=tokens // 16 + 64,
        block_size_tokens=16,
        max_num_seqs=max(8, rows),
        max_model_tokens=longest + 160,
        max_step_tokens=MAX_STEP_TOKENS,
        **options,
    )
    begin = time.perf_counter()
    loop = build_loop(resolve(definition, model, chosen))
    print(f"started in {time.perf_counter() - begin:.1f} s, {chosen.num_adapter_slots} adapter slots", flush=True)
    return loop


def measure(kinds: dict[str, tuple[StepLoop, list[str]]], size: str, turns: int) -> dict[str, Any]:
    batch, prompt = map(int, size.split("x"))
    output = 129 if batch * prompt < 1 << 16 else 65
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for _ in range(turns):
        for kind, (loop, adapters) in kinds.items():
            with WITHIN.get(kind, nullcontext)():
                timing = measure_offline(
                    loop,
                    max_step_tokens=MAX_STEP_TOKENS,
                    batch=batch,
                    prompt_tokens=prompt,
                    output_tokens=output,
                    adapters=adapters,
                )
            found[kind].append(timing)
    row: dict[str, Any] = {"size": size}
    for kind, timings in found.items():
        row[f"{kind}_tpot_ms"] = statistics.median(each.tpot_ms for each in timings)
        row[f"{kind}_prefill_ms"] = statistics.median(each.prefill_s for each in timings) * 1e3
        row[f"{kind}_tpots_ms"] = [each.tpot_ms for each in timings]
    for kind in list(kinds)[1:]:
        for what in ("tpot", "prefill"):
            row[f"{kind}_{what}_ratio"] = row[f"{kind}_{what}_ms"] / row[f"plain_{what}_ms"]
    shown = "  ".join(f"{key} {value:.4f}" for key, value in row.items() if isinstance(value, float))
    print(f"{size}  {shown}", flush=True)
    return row


def first_token_s(loop: StepLoop, number: int, adapter: str) -> float:
    request = GenerateRequest(
        request_id=RequestId(number),
        prompt_token_ids=(1, 2, 3, 4),
        sampling=SamplingParams(max_tokens=2, temperature=0.0),
        lora=adapter,
    )
    begin = time.perf_counter()
    events = loop.submit(request)
    while not any(isinstance(event, Tokens) for event in events):
        events = loop.step()
    passed = time.perf_counter() - begin
    while loop.busy:
        loop.step()
    return passed


@contextmanager
def timed_reads() -> Iterator[list[float]]:
    """Seconds of each reading by a rank of this process."""
    found: list[float] = []
    read = RankAdapters.read

    def timed(adapters: RankAdapters, folder: Path) -> ReadAdapter:
        begin = time.perf_counter()
        adapter = read(adapters, folder)
        found.append(time.perf_counter() - begin)
        return adapter

    RankAdapters.read = timed
    try:
        yield found
    finally:
        RankAdapters.read = read


def measure_loads(loop: StepLoop, folder: Path, names: list[str]) -> dict[str, float]:
    """Of adapters that lie in host memory, and of new ones whose files are in the page cache: `new` apart, when host
    memory for the next one has been made, and `following` one after the other; `read` is rank 0's reading alone.
    """
    size = (folder / names[0] / "adapter_model.safetensors").stat().st_size
    resident, placed = [], []
    for number, name in enumerate(names * 3):
        placed.append(first_token_s(loop, 2 * number, name))
        resident.append(first_token_s(loop, 2 * number + 1, name))
    news = []
    with timed_reads() as reads:
        for number in range(2 * NEW_ADAPTERS):
            answers: list[str | None] = []
            (folder / names[0] / "adapter_config.json").write_text(
                json.dumps({"peft_type": "LORA", "r": loop_rank(folder, names[0]), "lora_alpha": 3 + number})
            )
            if number < NEW_ADAPTERS:
                time.sleep(BETWEEN_LOADS_S)
            begin = time.perf_counter()
            loop.begin_control(LoadAdapter(f"new-{number}", names[0]), answers.append)
            while not answers:
                loop.step()
            news.append(time.perf_counter() - begin)
            if answers != [None]:
                raise SystemExit(f"an adapter was not loaded: {answers}")
    apart_s, following_s = (statistics.median(each) for each in (news[:NEW_ADAPTERS], news[NEW_ADAPTERS:]))
    read_s = statistics.median(reads[:NEW_ADAPTERS])
    found = {
        "adapter_bytes": float(size),
        "resident_ttft_ms": statistics.median(resident) * 1e3,
        "placed_ttft_ms": statistics.median(placed) * 1e3,
        "place_ms": (statistics.median(placed) - statistics.median(resident)) * 1e3,
        "new_ms": apart_s * 1e3,
        "new_gb_per_s": size / apart_s / 1e9,
        "read_ms": read_s * 1e3,
        "following_ms": following_s * 1e3,
    }
    print("loads", "  ".join(f"{key} {value:.3f}" for key, value in found.items()), flush=True)
    return found


def loop_rank(folder: Path, name: str) -> int:
    return int(json.loads((folder / name / "adapter_config.json").read_text())["r"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["1x1024", "8x1024", "64x1024", "1x8192"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--in-product", action="store_true")
    parser.add_argument("--before-prompts", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in the engine's own process: threads that read do not wait for steps
    with made_adapters(given.model, count=given.adapters + 2, rank=given.rank) as made:
        names = made.names
        lora = {
            "lora": made.flags,
            "lora_root": str(made.folder),
            "max_loras": given.adapters,
            "max_lora_rank": given.rank,
        }
        plain, adapted = (make_loop(made.definition, given.model, given, **each) for each in ({}, lora))
        with ExitStack() as loops:
            for each in (plain, adapted):
                loops.enter_context(closing(each))
            used = names[: given.adapters]
            kinds = {"plain": (plain, []), "none": (adapted, []), "one": (adapted, used[:1]), "all": (adapted, used)}
            for kind, is_asked in ((IN_PRODUCT, given.in_product), (BEFORE, given.before_prompts)):
                if is_asked:
                    with WITHIN[kind]():
                        kinds[kind] = make_loop(made.definition, given.model, given, **lora), used
                    loops.enter_context(closing(kinds[kind][0]))
            settle_memory()
            rows = [measure(kinds, size, given.turns) for size in given.sizes]
            loads = measure_loads(adapted, made.folder, names)
    if given.json:
        record = {"model": given.model.name, "commit": given.commit, "rank": given.rank, "rows": rows, "loads": loads}
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
