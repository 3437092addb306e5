"""Which of cuBLASLt's algorithms multiplies which shape: the fastest measured, else the one it recommends.

What was measured is kept in a file per GPU and version of cuBLASLt, in the cache folder. Later starts read it, so that
they need not measure, and so that two runs multiply alike, bit for bit.

Numbers of tokens are rounded up to classes that share an algorithm: prompts have any length, and neither asking nor
measuring may cost time for each new one.
"""

import json
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from openinfer_kernels.cubins import cache_dir
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.cuda.gemm.products import Algorithm, WeightShape
from openinfer_kernels.errors import CudaCallError, KernelBuildError

Key = tuple[int, WeightShape]
"""Class of the number of tokens, and the weight."""
_REPEATS = 5
_CLEARLY_FASTER = 0.98
"""Of the recommended one's time: below it another one is taken, above it may be noise."""
_STEPS = ((1, 1), (64, 8), (256, 32))
"""Up to so many tokens, classes are multiples of so many; beyond, of 128, the usual height of a tile."""


def class_of(num_tokens: int) -> int:
    """The number of tokens that stands for its class, at least `num_tokens`."""
    step = next((step for limit, step in _STEPS if num_tokens <= limit), 128)
    return -(-num_tokens // step) * step


class Algorithms:
    """The choices for one device. Not measured ones are forgotten with it."""

    def __init__(self, device: Device, *, version: int) -> None:
        self._l2_bytes = device.l2_bytes
        name = re.sub(r"[^a-z0-9]+", "-", device.name.lower())
        self._path = cache_dir() / "products" / f"{name}.{version}.json"
        self._measured = _read(self._path)
        self._recommended: dict[Key, Algorithm] = {}

    def find(self, key: Key) -> Algorithm | None:
        """The algorithm in use; None for a shape that has not been asked for yet."""
        return self._measured.get(key) if key in self._measured else self._recommended.get(key)

    def recommend(self, key: Key, algorithm: Algorithm) -> None:
        self._recommended[key] = algorithm

    def is_measured(self, key: Key) -> bool:
        return key in self._measured

    def measure(self, key: Key, candidates: Sequence[Algorithm], run: Callable[[Algorithm], None]) -> None:
        """Takes the fastest of `candidates`, the first being the recommended one, with a cold L2 cache."""
        times_ms = self._times_ms(candidates, run)
        best = min(range(len(candidates)), key=times_ms.__getitem__)
        self._measured[key] = candidates[best if times_ms[best] < _CLEARLY_FASTER * times_ms[0] else 0]

    def save(self) -> None:
        """Writes what was measured, also by others meanwhile; a choice that was there first stays."""
        merged = self._measured | _read(self._path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            {_text_of(key): algorithm.words.tobytes().hex() for key, algorithm in sorted_items(merged)}, indent=0
        )
        # Several processes may save at once: a file appears only when it is whole.
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, prefix=".partial-", delete=False) as partial:
            partial.write(text)
        Path(partial.name).replace(self._path)

    def _times_ms(self, candidates: Sequence[Algorithm], run: Callable[[Algorithm], None]) -> list[float]:
        """Median of each; infinite for one that cuBLASLt refuses after all."""
        # A step comes to each weight with a cold cache, so twice the size of L2 is written before each run.
        flood = cupy.empty(2 * self._l2_bytes, np.uint8)
        events: list[list[tuple[object, object]]] = [[] for _ in candidates]
        for _ in range(_REPEATS):
            for taken, algorithm in zip(events, candidates, strict=True):
                flood.data.memset_async(0, flood.nbytes)
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                begin.record()
                try:
                    run(algorithm)
                except CudaCallError:
                    continue
                end.record()
                taken.append((begin, end))
        cupy.cuda.get_current_stream().synchronize()
        return [
            statistics.median([cupy.cuda.get_elapsed_time(*pair) for pair in taken]) if taken else float("inf")
            for taken in events
        ]


def sorted_items(choices: dict[Key, Algorithm]) -> list[tuple[Key, Algorithm]]:
    """By weight, then by tokens, so that files can be compared."""
    return sorted(choices.items(), key=lambda item: (item[0][1].n, item[0][1].k, item[0][0], _text_of(item[0])))


def _text_of(key: Key) -> str:
    tokens, shape = key
    text = f"{tokens} {shape.n} {shape.k} {shape.biased:d} {shape.aligned:d} {shape.is_float32:d}"
    return text if shape.groups == 1 else f"{text} {shape.groups}"


def _read(path: Path) -> dict[Key, Algorithm]:
    if not path.is_file():
        return {}
    try:
        return dict(_parsed(*item) for item in json.loads(path.read_text("utf-8")).items())
    except ValueError as damaged:
        raise KernelBuildError(f"{path} is damaged ({damaged}); delete it: it will be measured again") from damaged


def _parsed(key: str, algorithm: str) -> tuple[Key, Algorithm]:
    tokens, n, k, biased, aligned, is_float32, *groups = map(int, key.split())
    words = np.frombuffer(bytes.fromhex(algorithm), np.uint64)
    if words.shape != (8,):
        raise ValueError(f"{len(algorithm)} digits for {key}")
    return (tokens, WeightShape(n, k, bool(biased), bool(aligned), bool(is_float32), *groups)), Algorithm(words)
