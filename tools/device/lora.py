"""Low-rank adapters on a GPU: their kernels against float64, and what they add to a step's products.

    python3 tools/device/lora.py [check] [chains] [prompts] [single]
                                 [--tokens N ...] [--rank R] [--adapters N] [--json FILE]

check      ranks, rows, mixed slots and none against float64, and each token alone
chains     all products and norms of a Qwen3-4B step in CUDA graphs: without adapters, and with each row's adapter
prompts    the same of prompts of one adapter each, in turns with how they were multiplied before; and each product
fused      products with adapters in one launch against float64
single     shrink and expand alone, over all layers, next to the time that their bytes take
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path

from source_packages import folders

sys.path[:0] = [*folders(), str(Path(__file__).parent)]

import cupy  # noqa: E402
import numpy as np  # noqa: E402
import products  # noqa: E402
from earlier_prompts import prompts_as_before  # noqa: E402

from openinfer_kernels.cuda.common.device import Device  # noqa: E402
from openinfer_kernels.cuda.common.libraries import bfloat16  # noqa: E402
from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm  # noqa: E402
from openinfer_kernels.cuda.gemm.gemm import Gemm  # noqa: E402
from openinfer_kernels.cuda.gemm.library_products import LibraryProducts  # noqa: E402
from openinfer_kernels.cuda.gemm.linear import Linear  # noqa: E402
from openinfer_kernels.cuda.lora.adapted_gemm import AdaptedGemm  # noqa: E402
from openinfer_kernels.cuda.lora.lora import Lora  # noqa: E402
from openinfer_kernels.cuda.norm.rms_norm import Norm  # noqa: E402
from openinfer_kernels.weights.adapter_columns import adapter_columns  # noqa: E402

RNG = cupy.random.default_rng(5)
HEIGHTS = {"qkv": (4096, 1024, 1024), "o_proj": (2560,), "gate_up": (9728, 9728), "down": (2560,)}
CHECKED_RANKS = (8, 16, 24, 64, 128, 512)
CHECKED_TOKENS = (1, 2, 7, 8, 9, 31, 33, 64, 100, 129, 256)
NUM_SLOTS = 4
FUSED_TOKENS = (1, 8, 9, 31, 33, 64, 100, 200, 300, 700)


def drawn(*shape: int, spread: float = 0.5) -> cupy.ndarray:
    return (RNG.standard_normal(shape, dtype=np.float32) * np.float32(spread)).astype(bfloat16)


def mixed_slots(num_tokens: int) -> cupy.ndarray:
    """Every slot, and none."""
    return cupy.asarray(np.resize(np.array([2, -1, 0, 3, 0, 1], np.int32), num_tokens))


def expected(x, y, a, b, slots, starts):
    """`A x`, and what `y` becomes, in float64."""
    pieces, rank = a.shape[1:3]
    shrunk, out = np.zeros((len(x), pieces, rank)), y.astype(np.float64)
    x, a, b = (cupy.asnumpy(each.astype(np.float64)) for each in (x, a, b))
    out = cupy.asnumpy(out)
    for token, slot in enumerate(cupy.asnumpy(slots).tolist()):
        if slot < 0:
            continue
        shrunk[token] = a[slot] @ x[token]
        for piece in range(pieces):
            begin, end = starts[piece], starts[piece + 1]
            out[token, begin:end] += b[slot, begin:end] @ shrunk[token, piece]
    return shrunk, out


def check(lora: Lora, invariant: Lora) -> None:
    bad, worst = 0, {"shrunk": 0.0, "y": 0.0, "gate": 0.0}
    shapes = (((96, 40, 40), 640), ((256, 256), 1160), ((136,), 2560))
    for (heights, inner), rank, num_tokens in product(shapes, CHECKED_RANKS, CHECKED_TOKENS):
        starts = (0, *np.cumsum(heights).tolist())
        x, y = drawn(num_tokens, inner), drawn(num_tokens, starts[-1])
        a, b = (drawn(NUM_SLOTS, *rest, spread=1 / 16) for rest in ((len(heights), rank, inner), (starts[-1], rank)))
        slots = mixed_slots(num_tokens)
        shrunk = lora.lora_shrink(x, a, slots)
        exact, wanted = expected(x, y, a, b, slots, starts)
        before = y.copy()
        errors = {"shrunk": abs(cupy.asnumpy(shrunk.astype(np.float64)).sum(0) - exact).max() / abs(exact).max()}
        if len(heights) == 2:
            gated = lora.lora_expand_swiglu(y.copy(), shrunk, b, slots, starts=starts)
            gate, up = (each.astype(np.float32).astype(bfloat16).astype(np.float64) for each in np.split(wanted, 2, 1))
            silu = gate / (1 + np.exp(-gate)) * up
            errors["gate"] = abs(cupy.asnumpy(gated.astype(np.float64)) - silu).max() / abs(silu).max()
        lora.lora_expand(y, shrunk, b, slots, starts=starts)
        errors["y"] = (abs(cupy.asnumpy(y.astype(np.float64)) - wanted) / (abs(wanted) + 1e-2)).max()
        none = slots < 0
        same = bool((y.view(np.uint16)[none] == before.view(np.uint16)[none]).all())
        bounds = {"shrunk": 1e-5, "y": 2**-8 * 1.05, "gate": 2**-6}
        for name, error in errors.items():
            worst[name] = max(worst[name], float(error))
            if not error < bounds[name] or not same:
                bad += 1
                print("BAD", heights, inner, rank, num_tokens, name, error, same, flush=True)
        bad += alone_differs(invariant, x, before, a, b, slots, starts)
    print("check:", f"{bad} BAD" if bad else "ok", worst, flush=True)


def alone_differs(lora: Lora, x, y, a, b, slots, starts) -> int:
    """Whether a token's bits depend on what is computed with it."""
    together = y.copy()
    lora.lora_expand(together, lora.lora_shrink(x, a, slots), b, slots, starts=starts)
    for token in sorted({0, len(x) // 2, len(x) - 1}):
        place = slice(token, token + 1)
        own, alone = slots[place].copy(), y[place].copy()
        lora.lora_expand(alone, lora.lora_shrink(x[place].copy(), a, own), b, own, starts=starts)
        if not (alone.view(np.uint16) == together[place].view(np.uint16)).all():
            print("BAD alone", starts, a.shape, len(x), token)
            return 1
    return 0


def next_to_each_other(b):
    """`[out, E]` of `[slots, out, r]`."""
    num_slots, outer, rank = b.shape
    columns = cupy.zeros((outer, adapter_columns(num_slots, rank)), np.uint16)
    columns[:, : num_slots * rank] = b.view(np.uint16).transpose(1, 0, 2).reshape(outer, -1)
    return columns.view(bfloat16)


def with_deltas(x, weight, a, b, slots, starts):
    """`x W^T` and what adapters add, in float64."""
    x, weight, a, b = (each.astype(np.float64) for each in (x, weight, a, b))
    exact = x @ weight.T
    for slot, piece in product(range(len(a)), range(len(starts) - 1)):
        begin, end = starts[piece], starts[piece + 1]
        delta = x @ a[slot, piece].T @ b[slot, begin:end].T
        exact[:, begin:end] += cupy.where((slots == slot)[:, None], delta, 0)
    return exact


def gate_of(exact):
    gate, up = (each.astype(np.float32).astype(bfloat16).astype(np.float64) for each in cupy.split(exact, 2, axis=1))
    return gate / (1 + cupy.exp(-gate)) * up


def distance(found, exact) -> float:
    return float(cupy.linalg.norm(found.astype(np.float64) - exact) / cupy.linalg.norm(exact))


def fused_errors(fused: AdaptedGemm, heights, inner: int, rank: int, num_slots: int, num_tokens: int):
    """Relative errors of one product, and whether two runs are the same; what is not served raises."""
    starts = (0, *np.cumsum(heights).tolist())
    x, weight = drawn(num_tokens, inner), drawn(starts[-1], inner, spread=inner**-0.5)
    a = drawn(num_slots, len(heights), rank, inner, spread=inner**-0.5)
    b, mixed = drawn(num_slots, starts[-1], rank, spread=rank**-0.5), mixed_slots(num_tokens)
    slots = cupy.where(mixed < 0, -1, mixed % num_slots).astype(np.int32)
    if not fused.columns(weight, num_slots=num_slots, rank=rank, starts=starts):
        raise SystemExit(f"{heights} of rank {rank} in {num_slots} slots are not served")
    exact, given = with_deltas(x, weight, a, b, slots, starts), (x, weight, a, next_to_each_other(b), slots)
    twice = [fused.linear(*given, starts=starts) for _ in range(2)]
    errors = {"y": distance(twice[0], exact)}
    if len(heights) == 2:
        errors["gate"] = distance(fused.linear_swiglu(*given, starts=starts), gate_of(exact))
    return errors, bool((twice[0].view(np.uint16) == twice[1].view(np.uint16)).all())


def check_fused(fused: AdaptedGemm) -> None:
    """Products with adapters in one launch, against float64."""
    bad, worst = 0, {"y": 0.0, "gate": 0.0}
    shapes = (((256, 64, 64), 640), ((512, 512), 1152), ((320,), 2560), ((2560,), 9728), ((4096, 1024, 1024), 2560))
    shapes += (((6720, 6720), 640),)  # by tiles of 112 rows, which A has two of
    slots = ((16, 4), (8, 4), (32, 2), (64, 1), (16, 8))
    for (heights, inner), (rank, num_slots), num_tokens in product(shapes, slots, FUSED_TOKENS):
        if sum(heights) > 5000 and (num_tokens > 64 or rank != 16):
            continue
        errors, same = fused_errors(fused, heights, inner, rank, num_slots, num_tokens)
        worst = {name: max(error, errors.get(name, 0.0)) for name, error in worst.items()}
        if not same or not all(error < {"y": 4e-3, "gate": 1.5e-2}[name] for name, error in errors.items()):
            bad += 1
            print("BAD fused", heights, inner, rank, num_slots, num_tokens, errors, same, flush=True)
    print("fused:", f"{bad} BAD" if bad else "ok", worst, flush=True)


class Adapters:
    """Of all layers of a Qwen3-4B."""

    def __init__(self, rank: int) -> None:
        self.layers = [
            {
                name: (
                    products.random_bf16((NUM_SLOTS, len(heights), rank, products.SHAPES[name][1])),
                    products.random_bf16((NUM_SLOTS, sum(heights), rank)),
                    (0, *np.cumsum(heights).tolist()),
                    products.random_bf16((sum(heights), adapter_columns(NUM_SLOTS, rank))),
                )
                for name, heights in HEIGHTS.items()
            }
            for _ in range(products.NUM_LAYERS)
        ]

    @property
    def num_bytes(self) -> int:
        """Of one adapter."""
        return sum(each[0].nbytes + each[1].nbytes for layer in self.layers for each in layer.values()) // NUM_SLOTS


def chain(
    step: products.Step, linear: Linear, norm: Norm, num_tokens: int, lora: Lora | AdaptedGemm | None, adapters, slots
):
    x, attended = products.random_bf16((num_tokens, products.H)), products.random_bf16((num_tokens, 4096))
    residual = products.random_bf16((num_tokens, products.H)).astype(np.float32)

    def normed(value):
        return norm.add_rms_norm(value, residual, step.norm, eps=1e-6)

    def multiplied(value, layer, index, name):
        if lora is None:
            return linear.linear(value, layer[name])
        a, b, starts, columns = adapters.layers[index][name]
        if isinstance(lora, AdaptedGemm):
            multiply = lora.linear_swiglu if name == "gate_up" else lora.linear
            return multiply(value, layer[name], a, columns, slots, starts=starts)
        shrunk = lora.lora_shrink(value, a, slots)
        y = linear.linear(value, layer[name])
        if name == "gate_up":
            return lora.lora_expand_swiglu(y, shrunk, b, slots, starts=starts)
        lora.lora_expand(y, shrunk, b, slots, starts=starts)
        return y

    def run():
        y = normed(x)
        for index, layer in enumerate(step.layers):
            multiplied(y, layer, index, "qkv")
            y = normed(multiplied(attended, layer, index, "o_proj"))
            if lora is None:
                gated = linear.linear_swiglu(y, layer["gate_up"])
            else:
                gated = multiplied(y, layer, index, "gate_up")
            y = normed(multiplied(gated, layer, index, "down"))
        linear.logits(y[-256:], step.head)

    return run


def time_chain(step, linear, norm, ways, adapters, num_tokens: int, num_adapters: int) -> dict[str, float]:
    lora, fused = ways
    slots = cupy.asarray(np.arange(num_tokens, dtype=np.int32) % num_adapters)
    repeats = 21 if num_tokens <= 256 else 5
    none = cupy.full_like(slots, -1)
    kinds = {
        "plain": (None, slots),
        "fused": (fused, slots),
        "fused_none": (fused, none),
        "adapters": (lora, slots),
        "none": (lora, none),
    }
    row: dict[str, float] = {"tokens": num_tokens}
    for turn in range(2):
        for kind, (used, given) in kinds.items():
            ms = products.median_ms(chain(step, linear, norm, num_tokens, used, adapters, given), repeats)
            row[f"{kind}_ms"] = min(ms, row.get(f"{kind}_ms", ms)) if turn else ms
    used_adapters = min(num_adapters, num_tokens)
    row["bytes_ms"] = adapters.num_bytes * used_adapters / products.BYTES_PER_S * 1e3
    for kind in ("fused", "adapters"):
        row[f"{kind}_us_per_layer"] = (row[f"{kind}_ms"] - row["plain_ms"]) / products.NUM_LAYERS * 1e3
        row[f"{kind}_share"] = row[f"{kind}_ms"] / row["plain_ms"] - 1
    print("chain", "  ".join(f"{key} {value:.4f}" for key, value in row.items()), flush=True)
    return row


@contextmanager
def a_x_alone() -> Iterator[None]:
    """Of prompts: the product is left out."""
    multiply = Gemm.multiply_prompt
    Gemm.multiply_prompt = lambda *_, **__: None
    try:
        yield
    finally:
        Gemm.multiply_prompt = multiply


class Prompts:
    """The ways to multiply them, each with operators of its own."""

    def __init__(self, device: Device) -> None:
        make = lambda: AdaptedGemm(device, DecodeGemm(device), Gemm(device))  # noqa: E731
        self.ways = {
            "plain": (None, nullcontext),
            "before": (make(), prompts_as_before),
            "now": (make(), nullcontext),
            "a_x": (make(), a_x_alone),
        }

    def time(self, turns: int, repeats: int, made) -> dict[str, float]:
        """Of what `made` makes of a way's operators, the least of all turns."""
        found: dict[str, list[float]] = {}
        for _ in range(turns):
            for way, (fused, within) in self.ways.items():
                with within():
                    found.setdefault(way, []).append(products.median_ms(made(fused), repeats))
        return {way: min(each) for way, each in found.items()}


def time_prompts(step, linear: Linear, norm: Norm, prompts: Prompts, adapters, num_tokens: int, num_adapters: int):
    """Tokens of each adapter next to each other. In ms, of a product those of all layers."""
    slots = cupy.asarray((np.arange(num_tokens) * num_adapters // num_tokens).astype(np.int32))
    repeats = 5 if num_tokens > 2048 else 15

    def multiplied(name: str, x, fused):
        def run():
            for layer, own in zip(step.layers, adapters.layers, strict=True):
                a, _, starts, columns = own[name]
                if fused is None:
                    (linear.linear_swiglu if name == "gate_up" else linear.linear)(x, layer[name])
                else:
                    multiply = fused.linear_swiglu if name == "gate_up" else fused.linear
                    multiply(x, layer[name], a, columns, slots, starts=starts)

        return run

    row = {"tokens": num_tokens}
    times = prompts.time(3, repeats, lambda fused: chain(step, linear, norm, num_tokens, fused, adapters, slots))
    row |= {f"chain_{way}_ms": ms for way, ms in times.items()}
    row |= {f"chain_{way}_ratio": ms / times["plain"] for way, ms in times.items()}
    for name in HEIGHTS:
        x = products.random_bf16((num_tokens, products.SHAPES[name][1]))
        times = prompts.time(1, repeats, lambda fused, name=name, x=x: multiplied(name, x, fused))
        row |= {f"{name}_{way}_us": ms * 1e3 / products.NUM_LAYERS for way, ms in times.items()}
    print("prompts", "  ".join(f"{key} {value:.4f}" for key, value in row.items()), flush=True)
    return row


def time_single(lora: Lora, adapters: Adapters, num_tokens: int, num_adapters: int) -> dict[str, float]:
    slots = cupy.asarray(np.arange(num_tokens, dtype=np.int32) % num_adapters)
    row: dict[str, float] = {"tokens": num_tokens}
    for name, heights in HEIGHTS.items():
        x = products.random_bf16((num_tokens, products.SHAPES[name][1]))
        y = products.random_bf16((num_tokens, sum(heights)))
        a, b, starts, _ = adapters.layers[0][name]
        shrunk = lora.lora_shrink(x, a, slots)

        def shrinks(x=x, name=name):
            for layer in adapters.layers:
                lora.lora_shrink(x, layer[name][0], slots)

        def expands(y=y, name=name, shrunk=shrunk, starts=starts):
            for layer in adapters.layers:
                b = layer[name][1]
                if name == "gate_up":
                    lora.lora_expand_swiglu(y, shrunk, b, slots, starts=starts)
                else:
                    lora.lora_expand(y, shrunk, b, slots, starts=starts)

        for kind, run, factor in (("shrink", shrinks, a), ("expand", expands, b)):
            row[f"{name}_{kind}_us"] = products.median_ms(run, 5) * 1e3 / products.NUM_LAYERS
            used = min(num_adapters, num_tokens) * factor.nbytes / NUM_SLOTS
            row[f"{name}_{kind}_bytes_us"] = used / products.BYTES_PER_S * 1e6
    print("single", "  ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)
    return row


def time_steps(
    given, linear: Linear, norm: Norm, ways, adapters, prompts: Prompts
) -> dict[str, list[dict[str, float]]]:
    step, found = products.Step(), {}
    with linear.tuning():
        for tokens in given.tokens:
            chain(step, linear, norm, tokens, None, adapters, None)()
            if "chains" in given.what:
                chain(step, linear, norm, tokens, ways[0], adapters, cupy.zeros(tokens, np.int32))()
    if "chains" in given.what:
        found["chains"] = [
            time_chain(step, linear, norm, ways, adapters, tokens, given.adapters) for tokens in given.tokens
        ]
    if "prompts" in given.what:
        found["prompts"] = [
            time_prompts(step, linear, norm, prompts, adapters, tokens, given.adapters) for tokens in given.tokens
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("check", "fused", "chains", "prompts", "single"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 256, 2048])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = Device.open()
    lora = Lora(device)
    record: dict[str, object] = {"gpu": device.name, "commit": given.commit, "rank": given.rank}
    if "check" in given.what:
        check(lora, Lora(device, divides=False))
    decode_gemm, gemm = DecodeGemm(device), Gemm(device)
    fused = AdaptedGemm(device, decode_gemm, gemm)
    if "fused" in given.what:
        check_fused(fused)
    if {"single", "chains", "prompts"} & {*given.what}:
        adapters = Adapters(given.rank)
        record["bytes_of_an_adapter"] = adapters.num_bytes
    if "single" in given.what:
        record["single"] = [time_single(lora, adapters, tokens, given.adapters) for tokens in given.tokens]
    if {"chains", "prompts"} & {*given.what}:
        linear, norm = Linear(device, decode_gemm, gemm, LibraryProducts(device)), Norm(device)
        record |= time_steps(given, linear, norm, (lora, fused), adapters, Prompts(device))
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
