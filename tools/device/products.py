"""Times the products of a Qwen3-4B step on a GPU, by our kernels where they serve and by cuBLASLt alone.

    python3 tools/device/products.py [--commit COMMIT] [--out FILE] [--tokens N ...] [--chains-only] [--model qwen3-8b]
                                      [--ways ours] [--pairs]

Each product alone (weights from memory: all layers' in turn), with `--pairs` also each with the one that follows it in
a step, and all 145 products of a step with and without the 73 norms between them, each kernel after the one before, in
CUDA graphs. The clocks are warmed before each measurement.
"""

import argparse
import datetime as dt
import json
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

from source_packages import folders

sys.path[:0] = folders()

import cupy  # noqa: E402
import numpy as np  # noqa: E402

from openinfer_kernels.cuda.common.device import Device  # noqa: E402
from openinfer_kernels.cuda.common.libraries import bfloat16  # noqa: E402
from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm  # noqa: E402
from openinfer_kernels.cuda.gemm.gemm import Gemm  # noqa: E402
from openinfer_kernels.cuda.gemm.library_products import LibraryProducts  # noqa: E402
from openinfer_kernels.cuda.gemm.linear import Linear  # noqa: E402
from openinfer_kernels.cuda.norm.rms_norm import Norm  # noqa: E402

NUM_LAYERS = 36
H = 2560
SHAPES = {"qkv": (6144, H), "o_proj": (H, 4096), "gate_up": (19456, H), "down": (H, 9728)}
HEAD = (151936, H)
MODELS = {
    "qwen3-4b": (SHAPES, HEAD),
    "qwen3-8b": (
        {"qkv": (6144, 4096), "o_proj": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
        (151936, 4096),
    ),
}
BYTES_PER_S = 4.3e12
WARM_S = 0.15


class Unused:
    """Leaves everything to cuBLASLt."""

    def serves(self, *_):
        return False


class Step:
    """The weights of a step, random, and its chains of products."""

    def __init__(self, model="qwen3-4b"):
        self.shapes, head = MODELS[model]
        self.layers = [{name: random_bf16(shape) for name, shape in self.shapes.items()} for _ in range(NUM_LAYERS)]
        self.head = random_bf16(head)
        self.norm = random_bf16((head[1],))
        self.num_bytes = sum(weight.nbytes for layer in self.layers for weight in layer.values()) + self.head.nbytes

    def run(self, linear, norm, num_tokens):
        """`norm` None leaves the norms out."""
        h = self.norm.size
        x, attended = random_bf16((num_tokens, h)), random_bf16((num_tokens, 4096))
        residual = random_bf16((num_tokens, h)).astype(np.float32)

        def normed(x):
            return x if norm is None else norm.add_rms_norm(x, residual, self.norm, eps=1e-6)

        def chain():
            y = normed(x)
            for layer in self.layers:
                linear.linear(y, layer["qkv"])
                y = normed(linear.linear(attended, layer["o_proj"]))
                y = normed(linear.linear(linear.linear_swiglu(y, layer["gate_up"]), layer["down"]))
            linear.logits(y, self.head)

        return chain


def random_bf16(shape):
    rng, out = cupy.random.default_rng(1), cupy.empty(shape, bfloat16)
    bits = out.view(np.uint16).reshape(-1)
    for start in range(0, bits.size, 1 << 26):
        size = min(1 << 26, bits.size - start)
        values = rng.standard_normal(size, dtype=np.float32) / shape[-1] ** 0.5
        bits[start : start + size] = values.view(np.uint32) >> 16
    return out


def median_ms(run, repeats=11):
    """Of one replay of a graph of what `run` launches."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run()
        stream.begin_capture()
        run()
        graph = stream.end_capture()
        begin = time.perf_counter()
        while time.perf_counter() - begin < WARM_S:
            graph.launch(stream)
            stream.synchronize()
        events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(repeats)]
        for before, after in events:
            before.record(stream)
            graph.launch(stream)
            after.record(stream)
        stream.synchronize()
        return statistics.median(cupy.cuda.get_elapsed_time(*pair) for pair in events)


def time_products(step, linears, num_tokens):
    rows = []
    for name, (n, k) in [*step.shapes.items(), ("head", step.head.shape)]:
        x = random_bf16((num_tokens, k))
        weights = [step.head] * 4 if name == "head" else [layer[name] for layer in step.layers]
        row = {"product": name, "n": n, "k": k, "tokens": num_tokens, "floor_us": n * k * 2 / BYTES_PER_S * 1e6}
        for kind, linear in linears.items():
            multiply = {"gate_up": linear.linear_swiglu, "head": linear.logits}.get(name, linear.linear)
            ms = median_ms(lambda: [multiply(x, weight) for weight in weights])  # noqa: B023 - called at once
            row[f"{kind}_us"] = ms * 1e3 / len(weights)
            row[f"{kind}_tb_per_s"] = n * k * 2 / row[f"{kind}_us"] / 1e6
        rows.append(row)
        print(f"{num_tokens:>4} {name:<8} " + "  ".join(f"{key} {row[key]:.2f}" for key in row if key.endswith("_us")))
    return rows


def time_pairs(step, linears, num_tokens):
    """Of all layers, one kernel after the other: what a product's neighbour adds to what it takes alone."""
    rows, names = [], list(step.shapes)
    inputs = {name: random_bf16((num_tokens, k)) for name, (_, k) in step.shapes.items()}
    for pair in zip(names, [*names[1:], names[0]], strict=True):
        row = {"pair": " ".join(pair), "tokens": num_tokens}
        for kind, linear in linears.items():

            def both(pair=pair, linear=linear):
                for layer in step.layers:
                    for name in pair:
                        multiply = linear.linear_swiglu if name == "gate_up" else linear.linear
                        multiply(inputs[name], layer[name])

            row[f"{kind}_us"] = median_ms(both) * 1e3 / len(step.layers)
        rows.append(row)
        print("  ".join(map(str, row.values())), flush=True)
    return rows


def time_chains(step, linears, norm, num_tokens):
    row = {"tokens": num_tokens, "floor_ms": step.num_bytes / BYTES_PER_S * 1e3}
    for kind, linear in linears.items():
        row[f"{kind}_ms"] = median_ms(step.run(linear, None, num_tokens))
        row[f"{kind}_with_norms_ms"] = median_ms(step.run(linear, norm, num_tokens))
    print("chain", "  ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    return row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 48, 64, 96, 128, 192, 256])
    parser.add_argument("--chains-only", action="store_true")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--model", choices=MODELS, default="qwen3-4b")
    parser.add_argument("--ways", nargs="+", choices=("ours", "cublaslt"), default=["ours", "cublaslt"])
    arguments = parser.parse_args()
    device = Device.open()
    own = {"ours": (DecodeGemm, Gemm), "cublaslt": (lambda _: Unused(), lambda _: Unused())}
    linears = {
        way: Linear(device, decode_gemm(device), gemm(device), LibraryProducts(device))
        for way, (decode_gemm, gemm) in own.items()
        if way in arguments.ways
    }
    norm = Norm(device)
    step = Step(arguments.model)
    for linear in linears.values():
        with linear.tuning():
            for num_tokens in arguments.tokens:
                step.run(linear, norm, num_tokens)()
    chains = [time_chains(step, linears, norm, num_tokens) for num_tokens in arguments.tokens]
    products = []
    if not arguments.chains_only:
        products = [row for num_tokens in arguments.tokens for row in time_products(step, linears, num_tokens)]
    pairs = []
    if arguments.pairs:
        pairs = [row for num_tokens in arguments.tokens for row in time_pairs(step, linears, num_tokens)]
    if arguments.out:
        record = {
            "commit": arguments.commit,
            "gpu": device.name,
            "model": arguments.model,
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "versions": {
                "driver": cupy.cuda.runtime.driverGetVersion(),
                "cuda": cupy.cuda.runtime.runtimeGetVersion(),
                "cupy": version("cupy-cuda13x"),
            },
            "chains": chains,
            "products": products,
            "pairs": pairs,
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
