"""Adapters of hostile and of odd folders: a clear error, before anything is made of them."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_engine.lora import adapter_folder
from openinfer_engine.lora.adapter_folder import (
    MAX_HEADER_BYTES,
    AdaptedModule,
    LowRank,
    module_key,
    read_adapter,
)
from openinfer_engine.lora.adapter_tensors import ReadingThreads, adapter_threads

MODULES = {f"layers.{layer}.self_attn.{name}_proj": AdaptedModule(24, 16) for layer in range(2) for name in "qv"}
PREFIX = "base_model.model.model.layers.0.self_attn"
DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "float64": "F64", "int8": "I8"}


def pair(name: str = f"{PREFIX}.q_proj", *, rank: int = 4, seed: int = 0, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        f"{name}.lora_A.weight": rng.normal(size=(rank, 16)).astype(dtype),
        f"{name}.lora_B.weight": rng.normal(size=(24, rank)).astype(dtype),
    }


def header_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    header: dict[str, Any] = {}
    begin = 0
    for name, array in tensors.items():
        entry = {"dtype": DTYPES[str(array.dtype)], "shape": array.shape}
        header[name] = {**entry, "data_offsets": [begin, begin + array.nbytes]}
        begin += array.nbytes
    return header


def write(folder: Path, tensors: Mapping[str, Any], *, header: str | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    keys = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(keys))
    encoded = (json.dumps(header_of(tensors)) if header is None else header).encode()
    data = b"".join(np.asarray(array).tobytes() for array in tensors.values())
    (folder / "adapter_model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return folder


def read(folder: Path, max_rank: int = 16, **given: Any) -> Any:
    return read_adapter(folder, modules=MODULES, max_rank=max_rank, **given)


class Taken:
    """Keeps what is read: copies, since the memory is used again."""

    def __init__(self) -> None:
        self.modules: dict[str, LowRank] = {}
        self.factors: dict[tuple[str, str], Any] = {}
        self.times_laid_out = 0

    def lay_out(self) -> None:
        self.times_laid_out += 1

    def begin(self, modules: Mapping[str, LowRank], *, is_bfloat16: bool) -> Any:
        del is_bfloat16
        self.modules |= modules

    def take(self, module: str, factor: str, values: Any) -> None:
        assert (module, factor) not in self.factors
        self.factors[module, factor] = values.copy()


def test_factors_are_found_under_every_wrappers_names(tmp_path: Path) -> None:
    for wrapper in ("base_model.model.model.", "base_model.model.model.language_model.", "base_model.model.", "model."):
        name = f"{wrapper}layers.1.self_attn.v_proj"
        taken = Taken()
        read(write(tmp_path / "adapter", pair(name)), target=taken)
        assert taken.modules == {"layers.1.self_attn.v_proj": (4, 2.0)}
        for (module, factor), values in taken.factors.items():
            assert module == "layers.1.self_attn.v_proj"
            np.testing.assert_array_equal(values, pair(name)[f"{name}.lora_{factor}.weight"])
        assert len(taken.factors) == 2
        assert taken.times_laid_out == 1
    assert module_key("model.visual.layers.1.q_proj") is None
    assert module_key("lm_head") is None


def test_a_header_that_was_read_is_known_for_its_modules_alone(tmp_path: Path, monkeypatch: Any) -> None:
    """Adapters that were trained alike have one header; what it may say depends on the engine's modules."""
    parsed: list[Path] = []
    parse = adapter_folder.read_header

    def counted(read_bytes: Any, **given: Any) -> Any:
        parsed.append(given["path"])
        return parse(read_bytes, **given)

    monkeypatch.setattr(adapter_folder, "read_header", counted)
    monkeypatch.setattr(adapter_folder, "LAYOUTS", adapter_folder.Layouts())
    first, other = write(tmp_path / "first", pair()), write(tmp_path / "other", pair(seed=2))
    digests = [read(folder).digest for folder in (first, other, first)]
    assert len(parsed) == 1
    assert digests[0] == digests[2] != digests[1]
    with pytest.raises(Refused, match="cannot be adapted"):
        read_adapter(other, modules={"layers.1.mlp.up_proj": MODULES["layers.1.self_attn.v_proj"]}, max_rank=16)
    with pytest.raises(Refused, match="at most 2"):
        read(other, max_rank=2)
    assert read(other).digest == digests[1]
    path = other / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InvalidCheckpoint):
        read(other)
    for number in range(10):
        read(write(tmp_path / str(number), pair(rank=number + 1), r=number + 1))
    assert len(adapter_folder.LAYOUTS) == 4


def test_digest_is_of_what_is_computed(tmp_path: Path) -> None:
    first = write(tmp_path / "first", pair())
    assert read(write(tmp_path / "copy", pair(), task_type="CAUSAL_LM", lora_dropout=0.1)).digest == read(first).digest
    others = {
        "alpha": write(tmp_path / "alpha", pair(), lora_alpha=16),
        "rslora": write(tmp_path / "rslora", pair(), use_rslora=True, lora_alpha=10),
        "pattern": write(tmp_path / "pattern", pair(), alpha_pattern={"q_proj": 3}),
        "tensors": write(tmp_path / "tensors", pair(seed=1)),
        "module": write(tmp_path / "module", pair(f"{PREFIX}.v_proj")),
        "more": write(tmp_path / "more", pair() | pair(f"{PREFIX}.v_proj")),
        "bits": write(tmp_path / "bits", pair(dtype=np.float16)),
    }
    digests = {read(folder).digest for folder in (first, *others.values())}
    assert len(digests) == 1 + len(others)
    # alpha 8 by the root of rank 4 is alpha 16 by the rank: the same mathematics
    same = read(write(tmp_path / "same", pair(), use_rslora=True))
    assert same.digest == read(others["alpha"]).digest


def mixed_dtypes() -> dict[str, Any]:
    shapes = {
        f"{name}_proj.lora_{factor}": shape for name in "qv" for factor, shape in (("A", (4, 16)), ("B", (24, 4)))
    }
    dtypes = (np.float32, np.float16, np.uint16, np.uint16)
    return {
        f"{PREFIX}.{name}.weight": np.arange(np.prod(shape), dtype=dtype).reshape(shape)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }


def test_digest_stays_what_it_was(tmp_path: Path) -> None:
    """KV in tiers is found by it after a restart, and by other releases."""
    tensors = mixed_dtypes()
    q, v = (f"layers.0.self_attn.{name}_proj" for name in "qv")
    described = blake3(f"{q}\0<f4 (4, 16) <f2 (24, 4)\0{v}\0<u2 (4, 16) <u2 (24, 4)\0".encode()).digest()
    scales = np.full(2, 8 / 4, "<f8").tobytes()
    numbers = blake3(b"".join(each.tobytes() for each in tensors.values())).digest()
    expected = blake3(b"openinfer-lora 2\0" + described + scales + numbers).hexdigest(16)
    assert expected == "588dc6bccc4d8f7a4e0e83155851609e"
    assert read(write(tmp_path / "adapter", tensors)).digest.hex() == expected


def test_digest_is_of_the_numbers_of_each_module_whatever_the_order_of_the_file(tmp_path: Path) -> None:
    """Tensors that lie apart in the file are read apart, and hashed together all the same."""
    names = [f"base_model.model.model.{module}" for module in MODULES]
    tensors = {name: each for seed, module in enumerate(names) for name, each in pair(module, seed=seed).items()}
    mixed = dict(sorted(tensors.items(), key=lambda each: hash_of(each[0])))
    assert list(mixed) != list(tensors)
    taken = Taken()
    found = read(write(tmp_path / "mixed", mixed), target=taken)
    assert found.digest == read(write(tmp_path / "ordered", tensors)).digest
    for (module, factor), values in taken.factors.items():
        np.testing.assert_array_equal(values, tensors[f"base_model.model.model.{module}.lora_{factor}.weight"])
    first, second = (f"{name}.lora_B.weight" for name in names[:2])
    exchanged = {**tensors, first: tensors[second], second: tensors[first]}
    assert read(write(tmp_path / "exchanged", exchanged)).digest != found.digest


def hash_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def random_factors(modules: Mapping[str, AdaptedModule], *, rank: int, dtype: Any) -> dict[str, Any]:
    """Of each module B, then A: another order than a digest's."""
    rng = np.random.default_rng(0)
    return {
        f"base_model.model.model.{module}.lora_{factor}.weight": rng.normal(size=shape).astype(dtype)
        for module, each in modules.items()
        for factor, shape in (("B", (each.rows, rank)), ("A", (rank, each.columns)))
    }


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to processors")
@pytest.mark.parametrize(("usable", "num_threads"), [(1, 1), (3, 3), (64, 8)])
def test_processors_that_a_process_is_kept_from_bring_no_threads(
    monkeypatch: pytest.MonkeyPatch, usable: int, num_threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    assert adapter_threads() == num_threads


def test_what_is_given_is_what_the_file_has_however_many_threads_read_it(tmp_path: Path) -> None:
    modules = {f"layers.{layer}.mlp.up_proj": AdaptedModule(300 + layer, 1000 - layer) for layer in range(40)}
    tensors = random_factors(modules, rank=12, dtype=np.float32)
    folder, digests = write(tmp_path / "adapter", tensors, r=12), set[bytes]()
    for num_threads in (1, 3, 40):
        taken = Taken()
        adapter = read_adapter(folder, modules=modules, max_rank=16, target=taken, threads=ReadingThreads(num_threads))
        digests.add(adapter.digest)
        assert taken.modules == dict.fromkeys(modules, (12, 8 / 12))
        assert len(taken.factors) == len(tensors)
        for (module, factor), values in taken.factors.items():
            np.testing.assert_array_equal(values, tensors[f"base_model.model.model.{module}.lora_{factor}.weight"])
    assert len(digests) == 1


class Whole(Taken):
    """Has memory for all tensors, as their modules come."""

    def __init__(self, shapes: Mapping[str, AdaptedModule], *, itemsize: int = 2) -> None:
        super().__init__()
        self._shapes, self._itemsize = shapes, itemsize
        self.memory: Any = None
        self.is_bfloat16 = False

    def begin(self, modules: Mapping[str, LowRank], *, is_bfloat16: bool) -> Any:
        self.modules, self.is_bfloat16 = dict(modules), is_bfloat16
        sizes = [modules[key].rank * (self._shapes[key].rows + self._shapes[key].columns) for key in modules]
        self.memory = np.zeros(self._itemsize * sum(sizes), np.uint8)
        return self.memory


@pytest.mark.parametrize("num_threads", [1, 3, 40])
def test_tensors_are_read_to_where_they_stay(tmp_path: Path, num_threads: int) -> None:
    """A and B of each module in turn, whatever the file's order, with the digest that they have anywhere."""
    modules = {f"layers.{layer}.mlp.up_proj": AdaptedModule(3000 + layer, 1000 - layer) for layer in range(40)}
    tensors = random_factors(modules, rank=16, dtype=np.float16)
    folder, whole = write(tmp_path / "adapter", tensors, r=16), Whole(modules)
    given = {"modules": modules, "max_rank": 16, "threads": ReadingThreads(num_threads)}
    adapter = read_adapter(folder, target=whole, **given)
    assert adapter.digest == read_adapter(folder, **given).digest
    assert not whole.is_bfloat16
    assert not whole.factors
    names = [f"base_model.model.model.{key}.lora_{factor}.weight" for key in whole.modules for factor in "AB"]
    assert whole.memory.tobytes() == b"".join(tensors[name].tobytes() for name in names)
    values = tensors[names[7]].copy()
    values[5, 5] = np.inf
    hostile = write(tmp_path / "hostile", {**tensors, names[7]: values}, r=16)
    with pytest.raises(InvalidCheckpoint, match="not finite"):
        read_adapter(hostile, target=Whole(modules), **given)


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32])
def test_number_that_is_not_finite_is_found_wherever_it_is(tmp_path: Path, dtype: Any, is_whole: bool) -> None:
    """At the ends of what threads take, of tensors and of the file; the first tensor that has one is named."""
    modules = {f"layers.{layer}.mlp.up_proj": AdaptedModule(9000 + layer, 1001) for layer in range(12)}
    tensors = {name: np.ones(each.shape, dtype) for name, each in random_factors(modules, rank=16, dtype=dtype).items()}
    names = [f"base_model.model.model.{key}.lora_{factor}.weight" for key in sorted(modules) for factor in "AB"]
    ends = np.cumsum([tensors[name].size for name in names])
    infinite = 0x7F80 if dtype is np.uint16 else np.inf
    threads, of_share = ReadingThreads(3), (1 << 20) // np.dtype(dtype).itemsize
    given = {"modules": modules, "max_rank": 16, "threads": threads}
    assert ends[-1] > 3 * of_share
    for place in (0, of_share - 1, of_share, 2 * of_share + 1, ends[3] - 1, ends[3], ends[-1] - 1):
        index = int(np.searchsorted(ends, place, side="right"))
        whole = np.concatenate([tensors[name].reshape(-1) for name in names])
        whole[place:] = np.where(np.arange(len(whole) - place) % 100_000 == 0, np.array(infinite, dtype), whole[place:])
        hostile = {
            name: whole[end - tensors[name].size : end].reshape(tensors[name].shape)
            for name, end in zip(names, ends, strict=True)
        }
        folder = write(tmp_path / "hostile", {name: hostile[name] for name in reversed(names)}, r=16)
        whole_or_taken = Whole(modules, itemsize=np.dtype(dtype).itemsize) if is_whole else Taken()
        with pytest.raises(InvalidCheckpoint, match=f"{names[index]}' has values that are not finite"):
            read_adapter(folder, target=whole_or_taken, **given)
    assert read_adapter(write(tmp_path / "fine", tensors, r=16), **given).rank == 16


class Changing(Whole):
    """Changes the file once its header was read, before its numbers are."""

    def __init__(self, shapes: Mapping[str, AdaptedModule], path: Path, data: bytes) -> None:
        super().__init__(shapes)
        self._path, self._data = path, data

    def begin(self, modules: Mapping[str, LowRank], *, is_bfloat16: bool) -> Any:
        self._path.write_bytes(self._data)
        return super().begin(modules, is_bfloat16=is_bfloat16)


def test_file_that_changes_while_it_is_read_is_refused_or_known_by_what_was_read(tmp_path: Path) -> None:
    modules = {"layers.0.self_attn.q_proj": MODULES["layers.0.self_attn.q_proj"]}
    folder = write(tmp_path / "adapter", pair(dtype=np.float16))
    path, threads = folder / "adapter_model.safetensors", ReadingThreads(3)
    first, given = path.read_bytes(), {"modules": modules, "max_rank": 16, "threads": threads}
    for cut in (1, 2, 100, len(first)):
        path.write_bytes(first)
        with pytest.raises(InvalidCheckpoint, match="became shorter while it was read"):
            read_adapter(folder, target=Changing(modules, path, first[: len(first) - cut]), **given)
    path.write_bytes(first)
    with pytest.raises(InvalidCheckpoint, match=r"lora_B.weight' has values that are not finite"):
        read_adapter(folder, target=Changing(modules, path, first[:-1] + b"\x7c"), **given)
    path.write_bytes(first)
    changing = Changing(modules, path, first[:-1] + b"\x01")
    found = read_adapter(folder, target=changing, **given)
    assert changing.memory[-1] == 1
    assert found.digest == read_adapter(folder, **given).digest
    path.write_bytes(first)
    assert found.digest != read_adapter(folder, **given).digest


def test_tensors_that_pass_are_read_in_parts_with_the_digest_of_the_whole(tmp_path: Path) -> None:
    """More than are read at a time where they do not stay, and one that is more by itself."""
    modules = {
        f"layers.{layer}.mlp.up_proj": AdaptedModule(600_000 if layer == 1 else 250_000, 8) for layer in range(3)
    }
    tensors = random_factors(modules, rank=16, dtype=np.float16)
    folder, taken, whole = write(tmp_path / "adapter", tensors, r=16), Taken(), Whole(modules)
    given = {"modules": modules, "max_rank": 16, "threads": ReadingThreads(2)}
    assert read_adapter(folder, target=taken, **given).digest == read_adapter(folder, target=whole, **given).digest
    assert taken.times_laid_out == 1
    for (module, factor), values in taken.factors.items():
        np.testing.assert_array_equal(values, tensors[f"base_model.model.model.{module}.lora_{factor}.weight"])


def test_call_that_raises_is_heard_of_when_all_have_ended() -> None:
    """The file must be open for as long as one reads it."""
    begun, ended = threading.Event(), threading.Event()

    def late() -> None:
        begun.wait()
        time.sleep(0.05)
        ended.set()

    def early() -> None:
        raise InvalidCheckpoint("early")

    with pytest.raises(InvalidCheckpoint, match="early"):
        ReadingThreads(2).run([early, late], meanwhile=begun.set)
    assert ended.is_set()
    ended.clear()
    with pytest.raises(ZeroDivisionError):
        ReadingThreads(2).run([late], meanwhile=lambda: 1 / 0)
    assert ended.is_set()


def test_large_factors_are_hashed_to_the_last_byte(tmp_path: Path) -> None:
    modules = {"layers.0.self_attn.q_proj": AdaptedModule(40_000, 64)}
    digests: set[bytes] = set()
    for changed in (None, 0, 40_000 * 32 // 2, 40_000 * 32 - 1):
        b = np.ones(40_000 * 32, np.float32)
        if changed is not None:
            b[changed] = 2
        tensors = {
            f"{PREFIX}.q_proj.lora_A.weight": np.ones((32, 64), np.float32),
            f"{PREFIX}.q_proj.lora_B.weight": b.reshape(40_000, 32),
        }
        folder = write(tmp_path / "adapter", tensors, r=32)
        digests.add(read_adapter(folder, modules=modules, max_rank=32).digest)
    assert len(digests) == 4


def _nan(dtype: Any, bits: float) -> dict[str, Any]:
    tensors = pair(dtype=dtype) if dtype is not np.uint16 else {k: v.astype(np.uint16) for k, v in pair().items()}
    tensors[f"{PREFIX}.q_proj.lora_B.weight"][3, 1] = bits
    return tensors


HOSTILE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "other shape": ({f"{PREFIX}.q_proj.lora_A.weight": np.ones((4, 17), np.float32)}, {}, "must be [4, 16]"),
    "other rank": (pair(rank=5), {}, "must be [4, 16]"),
    "rank beyond": (pair(rank=32), {"r": 32}, "at most 16"),
    "pattern's rank beyond": (pair(), {"rank_pattern": {"q_proj": 500}}, "at most 16"),
    "NaN": (_nan(np.float32, np.nan), {}, "not finite"),
    "infinity in float16": (_nan(np.float16, np.inf), {}, "not finite"),
    "NaN in BF16": (_nan(np.uint16, 0x7FC1), {}, "not finite"),
    "negative NaN in BF16": (_nan(np.uint16, 0xFFC1), {}, "not finite"),
    "negative infinity in BF16": (_nan(np.uint16, 0xFF80), {}, "not finite"),
    "negative infinity": (_nan(np.float32, -np.inf), {}, "not finite"),
    "float64": (pair(dtype=np.float64), {}, "dtype F64"),
    "one factor": ({f"{PREFIX}.q_proj.lora_A.weight": np.ones((4, 16), np.float32)}, {}, "only one of"),
    "nothing": ({}, {}, "has no tensors"),
    "unknown module": (pair("base_model.model.model.layers.9.self_attn.q_proj"), {}, "cannot be adapted"),
    "head": (pair("base_model.model.lm_head"), {}, "cannot be adapted"),
    "no layer": (pair("base_model.model.model.layers.²1.self_attn.q_proj"), {}, "cannot be adapted"),
    "path": (pair("../../etc/passwd"), {}, "cannot be adapted"),
    "twice": (pair() | pair("model.layers.0.self_attn.q_proj"), {}, "are the same module's"),
    "whole module": (pair() | {f"{PREFIX}.q_proj.weight": np.ones((2, 2), np.float32)}, {}, "is no lora_A.weight"),
    "DoRA": (pair() | {f"{PREFIX}.q_proj.lora_magnitude_vector": np.ones(24, np.float32)}, {}, "DoRA"),
    "bias": (pair() | {f"{PREFIX}.q_proj.lora_B.bias": np.ones(24, np.float32)}, {}, "biases of adapters"),
    "embedding": ({"base_model.model.embed.lora_embedding_A": np.ones((4, 9), np.float32)}, {}, "embeddings"),
    "experts": (pair(f"{PREFIX}.experts.base_layer.x"), {}, "expert tensors"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_tensors_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    tensors, config, why = HOSTILE[kind]
    if kind == "other shape":
        tensors = pair() | tensors
    with pytest.raises((InvalidCheckpoint, Refused)) as refusal:
        read(write(tmp_path / "adapter", tensors, **config))
    assert why in str(refusal.value)
    assert len(str(refusal.value)) < 1000


def test_name_twice_in_the_header_is_refused(tmp_path: Path) -> None:
    tensors = pair()
    text = json.dumps(header_of(tensors))
    first = f"{PREFIX}.q_proj.lora_A.weight"
    twice = f'{{"{first}": {json.dumps(header_of(tensors)[first])}, {text[1:]}'
    with pytest.raises(InvalidCheckpoint, match="occurs twice"):
        read(write(tmp_path / "adapter", tensors, header=twice))


def test_million_tensors_are_refused_before_their_names_are_read(tmp_path: Path) -> None:
    entry = '"%d": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    header = "{" + ", ".join(entry % index for index in range(80_000)) + "}"
    assert len(header) > MAX_HEADER_BYTES
    folder = write(tmp_path / "adapter", {}, header=header)
    with pytest.raises(InvalidCheckpoint, match="has at most"):
        read(folder)
    large = {"layers.0.self_attn.q_proj": AdaptedModule(1 << 20, 1 << 20)}
    with pytest.raises(InvalidCheckpoint, match="announces a header of"):
        read_adapter(folder, modules=large, max_rank=16)


def test_file_larger_than_any_adapter_of_the_model_is_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", pair())
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(InvalidCheckpoint, match="has at most"):
        read(folder)


@pytest.mark.parametrize("num_bytes", [0, 4, 20, 300])
def test_file_that_is_cut_off_is_refused(tmp_path: Path, num_bytes: int) -> None:
    folder = write(tmp_path / "adapter", pair())
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(InvalidCheckpoint):
        read(folder)


def test_pickles_are_named_and_never_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", pair())
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(Refused, match="is a pickle, which is never read"):
        read(folder)


def test_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", pair())
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(InvalidCheckpoint, match="no regular file"):
            read(folder)
        (folder / name).unlink()
        write(tmp_path / "adapter", pair())
