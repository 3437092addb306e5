"""Checks and times sampling and log-probabilities on a GPU.

    python3 tools/device/sampling.py CUBINS OUT.json [check] [time]

The folder CUBINS holds `sampling.cubin` and `logprobs.cubin`. Answers are compared with the CPU module; where a token
differs, a float64 reference must give it for a uniform number, top_p or min_p that is off by rounding.
"""

import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np

from openinfer_kernels import Bias, Penalties, SamplingBatch, TokenMask
from openinfer_kernels.cpu.sampling.logit_changes import changed_logits
from openinfer_kernels.cpu.sampling.logprobs import logprobs as cpu_logprobs
from openinfer_kernels.cpu.sampling.philox import uniforms
from openinfer_kernels.cpu.sampling.sampling import sample as cpu_sample
from openinfer_kernels.cuda.common.launch import Module
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.sampling.logprobs import LogprobsKernels
from openinfer_kernels.cuda.sampling.sampling import Sampling
from openinfer_kernels.ops.sampling_columns import COLUMN_DTYPES, DEFAULTS

PEAK_BYTES_PER_S = 4.3e12
VOCABULARY, NUM_TOKEN_IDS = 151936, 151669
ROUNDING = 2e-6
"""Of a uniform number or a share of the sum: the weights are products of a few float32 roundings."""
COLUMNS = tuple(COLUMN_DTYPES)


class Loaded:
    """As much of a `Device` as these operators ask for."""

    capability = (9, 0)

    def __init__(self, folder: Path) -> None:
        cupy.cuda.runtime.free(0)  # makes the context
        self._modules = {stem: Module(folder / f"{stem}.cubin", may_overlap=True) for stem in ("sampling", "logprobs")}
        self.max_shared_bytes = cupy.cuda.runtime.getDeviceProperties(0)["sharedMemPerBlockOptin"]

    def kernel(self, stem: str, name: str, *, shared_bytes: int = 0):
        return self._modules[stem].kernel(name, shared_bytes=shared_bytes)


def to_device(value):
    if isinstance(value, np.ndarray):
        return cupy.asarray(value)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return dataclasses.replace(value, **{f.name: to_device(getattr(value, f.name)) for f in fields})
    return value


def random_batch(rng, num_rows, num_token_ids, **changes):
    def column(values, dtype):
        return rng.choice(values, size=num_rows).astype(dtype)

    choices = {
        "temperature": [0.0, 0.3, 0.7, 1.0, 1.0, 2.5],
        "top_k": [0, 0, 0, 1, 5, 50, 1000, 1024, 1025, 20000, num_token_ids, 10**6],
        "top_p": [1.0, 1.0, 0.1, 0.8, 0.95, 0.999],
        "min_p": [0.0, 0.0, 0.0, 1e-4, 0.05, 0.5],
    }
    return SamplingBatch(
        num_token_ids=num_token_ids,
        **{name: column(choices.get(name, [off]), COLUMN_DTYPES[name]) for name, off in DEFAULTS.items()},
        seeds=rng.integers(0, 2**64, size=num_rows, dtype=np.uint64),
        positions=rng.integers(0, 2**34, size=num_rows),
        **changes,
    )


def random_changes(rng, num_rows, num_columns):
    def rows(share):
        return rng.permutation(num_rows)[: max(1, int(num_rows * share))].astype(np.int32)

    penalised, masked, biased = rows(0.5), rows(0.5), rows(0.5)
    count = len(penalised)
    pairs = np.unique(rng.choice(biased, size=200).astype(np.int64) * num_columns + rng.integers(0, num_columns, 200))
    allowed = rng.random((len(masked), num_columns)) < rng.choice([0.001, 0.1, 0.9], size=(len(masked), 1))
    padded = np.zeros((len(masked), -(-num_columns // 32) * 32), np.uint8)
    padded[:, :num_columns] = allowed
    return {
        "penalties": Penalties(
            rows=penalised,
            presence=rng.uniform(-2, 2, count).astype(np.float32),
            frequency=rng.uniform(-2, 2, count).astype(np.float32),
            repetition=rng.uniform(0.5, 2, count).astype(np.float32),
            output_counts=(rng.random((count, num_columns)) < 0.01).astype(np.int32) * 3,
            prompt_seen=rng.random((count, num_columns)) < 0.05,
        ),
        "bias": bias_of(pairs // num_columns, pairs % num_columns, rng),
        "token_mask": TokenMask(rows=masked, bits=np.packbits(padded, axis=1, bitorder="little").view(np.uint32)),
    }


def bias_of(rows, token_ids, rng):
    """Random changes of these coordinates, which are sorted."""
    named, firsts, counts = np.unique(rows, return_index=True, return_counts=True)
    ids = np.zeros((len(named), counts.max()), np.int32)
    for index, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        ids[index, :count] = token_ids[first : first + count]
    values = rng.choice([-np.inf, -3.0, 2.0, 5.0], size=ids.shape).astype(np.float32)
    return Bias(rows=named.astype(np.int32), counts=counts.astype(np.int32), token_ids=ids, values=values)


# --- a float64 reference for single rows --------------------------------------------------------------------------


def reference(row, temperature, top_k, top_p, min_p, number):
    order = np.lexsort((np.arange(len(row)), -row))
    weights = np.exp((row[order].astype(np.float64) - float(row.max())) / temperature)
    weights[weights < min_p] = 0
    if 0 < top_k < len(row):
        order, weights = order[:top_k], weights[:top_k]
    if top_p < 1:
        running = np.cumsum(weights)
        kept = int(running.searchsorted(top_p * running[-1])) + 1
        order, weights = order[:kept], weights[:kept]
    by_id = np.argsort(order)
    running = np.cumsum(weights[by_id])
    return int(order[by_id][min(len(order) - 1, int(running.searchsorted(number * running[-1], side="right")))])


def is_rounding(row, batch, index, token):
    """Whether `token` is what the reference gives for numbers that are off by rounding."""
    temperature, top_k = float(batch.temperature[index]), int(batch.top_k[index])
    if temperature == 0 or token < 0:
        return False
    number = uniforms(batch.seeds[[index]], batch.positions[[index]])[0]
    top_p, min_p = float(batch.top_p[index]), float(batch.min_p[index])
    signs = (0, -1, 1)
    for a, b, c in itertools.product(signs, signs, signs):
        shifted = min(max(number + a * ROUNDING, 0.0), 1.0)
        changed_p = top_p if top_p == 1 else min(top_p + b * ROUNDING, 1 - 1e-12)
        if reference(row, temperature, top_k, changed_p, min_p * (1 + c * 1e-5), shifted) == token:
            return True
    return False


# --- checks -------------------------------------------------------------------------------------------------------


def make_logits(rng, num_rows, num_columns, scale, offset, *, is_bf16):
    logits = (rng.standard_normal((num_rows, num_columns), np.float32) * scale + offset).astype(np.float32)
    return logits.astype(bfloat16).astype(np.float32) if is_bf16 else logits


def check_agreement(sampling, logprobs, results):
    rng = np.random.default_rng(int(time.time()))
    rows = differ = unexplained = 0
    began = time.perf_counter()
    shapes = [
        (700, 50, 47),
        (400, 301, 301),
        (300, 2048, 2048),
        (300, 2049, 2049),
        (200, 4096, 4091),
        (200, 3001, 3000),
        (60, 32000, 31993),
    ]
    shapes += [(40, VOCABULARY, NUM_TOKEN_IDS)]
    scales = ((0.0, 3.0), (0.01, 7.0), (1.0, 0.0), (3.0, -5.0), (8.0, 0.0))
    for (num_rows, num_columns, num_ids), (scale, offset), is_bf16 in itertools.product(shapes, scales, (False, True)):
        changes = random_changes(rng, num_rows, num_columns) if rng.random() < 0.5 else {}
        logits = make_logits(rng, num_rows, num_columns, scale, offset, is_bf16=is_bf16)
        batch = random_batch(rng, num_rows, num_ids, **changes)
        device = cupy.asarray(logits.astype(bfloat16) if is_bf16 else logits)
        got = cupy.asnumpy(sampling.sample(device, to_device(batch)))
        again = cupy.asnumpy(sampling.sample(device, to_device(batch)))
        assert (got == again).all(), "two runs differ"
        expected = cpu_sample(logits, batch)
        scores = changed_logits(logits, batch)
        rows += num_rows
        wrong = []
        for index in np.flatnonzero(got != expected).tolist():
            differ += 1
            if not is_rounding(scores[index], batch, index, int(got[index])):
                wrong.append(index)
        unexplained += len(wrong)
        for index in wrong[:3]:
            facts = [f"{name} {getattr(batch, name)[index]}" for name in COLUMNS[:4]]
            print(f"  WRONG V {num_columns} scale {scale} bf16 {is_bf16} changes {bool(changes)}: row {index}: "
                  f"{got[index]} not {expected[index]}: {', '.join(facts)}")  # fmt: skip
        check_logprobs(rng, logprobs, logits, device)
    print(f"agreement: {rows} rows, {differ} differ by rounding of a boundary, {unexplained} wrong "
          f"({time.perf_counter() - began:.1f} s)")  # fmt: skip
    results["agreement"] = {"rows": rows, "differ_by_rounding": differ - unexplained, "wrong": unexplained}
    return unexplained == 0


def check_logprobs(rng, logprobs, logits, device):
    num_rows, num_columns = logits.shape
    num_rows = min(num_rows, 50)
    tokens = rng.integers(-1, num_columns, size=num_rows).astype(np.int32)
    top = int(rng.choice([0, 1, 5, 20]))
    expected = cpu_logprobs(logits[:num_rows], tokens, top=top)
    got = logprobs.logprobs(device[:num_rows], cupy.asarray(tokens), top=top)
    np.testing.assert_array_equal(cupy.asnumpy(got.ranks), expected.ranks)
    np.testing.assert_array_equal(cupy.asnumpy(got.top_ids), expected.top_ids)
    np.testing.assert_allclose(cupy.asnumpy(got.chosen), expected.chosen, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(cupy.asnumpy(got.top), expected.top, rtol=1e-6, atol=2e-6)


def check_batch_independence(sampling, results):
    rng = np.random.default_rng(1)
    num_rows, compared = 256, 0
    for scale in (1.0, 4.0):
        logits = cupy.asarray(make_logits(rng, num_rows, VOCABULARY, scale, 0, is_bf16=True).astype(bfloat16))
        batch = to_device(random_batch(rng, num_rows, NUM_TOKEN_IDS))
        together = cupy.asnumpy(sampling.sample(logits, batch))
        for size in (1, 3, 64):
            for first in range(0, num_rows - size + 1, max(size, 3)):
                part = slice(first, first + size)
                columns = {name: getattr(batch, name)[part] for name in COLUMNS}
                some = cupy.asnumpy(sampling.sample(logits[part], dataclasses.replace(batch, **columns)))
                assert (some == together[part]).all(), f"rows {part} differ from the same in a batch of {num_rows}"
                compared += size
    print(f"batch independence: {compared} rows equal to themselves among {num_rows}")
    results["batch_independence_rows"] = compared


def check_frequencies(sampling, results):
    rng = np.random.default_rng(2)
    row = make_logits(rng, 1, VOCABULARY, 2.5, 0, is_bf16=True)
    logits = cupy.asarray(np.repeat(row, 256, axis=0).astype(bfloat16))
    draws, counts = 200, {}
    worst = 0.0
    for options in ({}, {"top_k": 40}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.2}, {"min_p": 0.1}):
        tokens = []
        for step in range(draws):
            batch = dataclasses.replace(
                random_batch(rng, 256, NUM_TOKEN_IDS),
                temperature=np.ones(256, np.float32),
                top_k=np.full(256, options.get("top_k", 0), np.int32),
                top_p=np.full(256, options.get("top_p", 1.0), np.float32),
                min_p=np.full(256, options.get("min_p", 0.0), np.float32),
                seeds=np.full(256, 7, np.uint64),
                positions=np.arange(256) + 256 * step,
            )
            tokens.append(cupy.asnumpy(sampling.sample(logits, to_device(batch))))
        counts = np.bincount(np.concatenate(tokens), minlength=VOCABULARY)[:NUM_TOKEN_IDS]
        weights = np.exp(row[0, :NUM_TOKEN_IDS].astype(np.float64) - row[0, :NUM_TOKEN_IDS].max())
        order = np.lexsort((np.arange(NUM_TOKEN_IDS), -weights))
        kept = order[weights[order] >= options.get("min_p", 0.0)]
        kept = kept[: options.get("top_k", len(kept))]
        running = np.cumsum(weights[kept])
        kept = kept[: int(running.searchsorted(options.get("top_p", 1.0) * running[-1] * (1 - 1e-12))) + 1]
        assert counts[np.setdiff1d(np.arange(NUM_TOKEN_IDS), kept)].sum() == 0, options
        expected = counts.sum() * weights[kept] / weights[kept].sum()
        likely = expected > 10
        observed = np.append(counts[kept][likely], counts[kept][~likely].sum())
        expected = np.append(expected[likely], max(expected[~likely].sum(), 1e-9))
        freedom = max(1, int(likely.sum()) - (expected[-1] < 1))
        statistic = float(((observed - expected)[expected >= 1] ** 2 / expected[expected >= 1]).sum())
        sigmas = (statistic - freedom) / (2 * freedom) ** 0.5
        worst = max(worst, sigmas)
        assert sigmas < 6, (options, statistic, freedom)
    print(f"frequencies: chi-square within {worst:.1f} standard deviations over {256 * draws} draws, 5 settings")
    results["chi_square_sigmas"] = worst


# --- times --------------------------------------------------------------------------------------------------------


def peaked(rng, num_rows):
    """Logits like a model's: a broad body and a few dozen likely tokens."""
    logits = rng.standard_normal((num_rows, VOCABULARY), np.float32) * 2.0
    for row in logits:
        row[rng.integers(0, NUM_TOKEN_IDS, 40)] = 18 - rng.exponential(3.0, 40)
    return logits


def timed(launch, rounds, repeats=9):
    cupy.cuda.Device().synchronize()  # another stream than the one that made the inputs
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        launch(0)
        stream.synchronize()
        stream.begin_capture()
        kept = [launch(i) for i in range(rounds)]
        graph = stream.end_capture()
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.05:  # the clocks rise from idle
            graph.launch(stream)
            stream.synchronize()
        times = []
        for _ in range(repeats):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end))
    del kept
    return sorted(times)[len(times) // 2] * 1e3 / rounds


CASES = {
    "greedy": ("peaked", {"temperature": 0.0}),
    "temperature": ("peaked", {}),
    "k50 p.95": ("peaked", {"top_k": 50, "top_p": 0.95}),
    "k50 p.95 wide": ("wide", {"top_k": 50, "top_p": 0.95}),
    "p.95": ("peaked", {"top_p": 0.95}),
    "p.95 wide": ("wide", {"top_p": 0.95}),
    "k5000 p.9 wide": ("wide", {"top_k": 5000, "top_p": 0.9}),
    "minp .05": ("peaked", {"min_p": 0.05}),
    "logprobs": ("peaked", 0),
    "logprobs top 20": ("peaked", 20),
}


def measure(sampling, logprobs, results):
    rng = np.random.default_rng(3)
    sources = {"peaked": peaked(rng, 256), "wide": rng.standard_normal((256, VOCABULARY), np.float32)}
    sources = {name: cupy.asarray(values.astype(bfloat16)) for name, values in sources.items()}
    rows = (1, 8, 64, 256)
    print(f"{'us (fraction of 4.3 TB/s)':>26} " + " ".join(f"{'R=' + str(r):>14}" for r in rows))
    for name, (source, options) in CASES.items():
        line = f"{name:>26} "
        for num_rows in rows:
            copies = max(2, min(64, 256 // num_rows))
            base = sources[source]
            sets = [base[(i * num_rows) % 256 : (i * num_rows) % 256 + num_rows].copy() for i in range(copies)]
            if isinstance(options, int):
                tokens = cupy.asarray(np.full(num_rows, 17, np.int32))
                launch = lambda i, sets=sets, tokens=tokens, top=options: logprobs.logprobs(  # noqa: E731
                    sets[i % len(sets)], tokens, top=top
                )
            else:
                columns = {**DEFAULTS, **options}
                like = random_batch(rng, num_rows, NUM_TOKEN_IDS)
                batch = to_device(
                    dataclasses.replace(
                        like, **{n: np.full(num_rows, v, getattr(like, n).dtype) for n, v in columns.items()}
                    )
                )
                launch = lambda i, sets=sets, batch=batch: sampling.sample(sets[i % len(sets)], batch)  # noqa: E731
            us = timed(launch, 20)
            fraction = num_rows * VOCABULARY * 2 / us / 1e-6 / PEAK_BYTES_PER_S
            results.setdefault("times", []).append(
                {"case": name, "rows": num_rows, "us": round(us, 2), "fraction_of_bandwidth": round(fraction, 3)}
            )
            line += f"{us:>8.1f} ({fraction:4.2f})"
        print(line, flush=True)


def main():
    folder, out, *what = sys.argv[1:]
    device = Loaded(Path(folder))
    sampling, logprobs, results = Sampling(device), LogprobsKernels(device), {}
    passed = True
    if not what or "check" in what:
        passed = check_agreement(sampling, logprobs, results)
        check_batch_independence(sampling, results)
        check_frequencies(sampling, results)
    if not what or "time" in what:
        measure(sampling, logprobs, results)
    Path(out).write_text(json.dumps(results, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
