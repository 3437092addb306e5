"""Every published layout of quantised weights, from packers of the other side to a rank's values; and what is wrong."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from openinfer_core import InvalidCheckpoint
from openinfer_engine.model import Shard
from openinfer_engine.testing.quantised_checkpoints import SCHEMES, Scheme, write_safetensors
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights
from openinfer_engine.weights.dummy import DeviceDummyWeights, DummyWeights
from openinfer_engine.weights.loader import WeightLoader
from openinfer_engine.weights.packing import AWQ_ORDER, awq_rows, awq_unpacked
from openinfer_engine.weights.quantised import StoredMatrix, read_quantised
from openinfer_engine.weights.quantization_config import QuantisedConfig, as_stored, quantisation, stored_format
from openinfer_kernels import Code
from openinfer_kernels.cpu import CpuOps

SHAPE = (160, 384)
Tensors = dict[str, tuple[str, NDArray[Any]]]


class Rank:
    """A communicator's place in its group."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size


def floats(seed: int = 3, shape: tuple[int, int] = SHAPE) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 0.05, shape).astype(np.float32)


def written(tmp_path: Path, scheme: Scheme, *, change: Callable[[Tensors], None] | None = None) -> Any:
    """A checkpoint of one matrix `X`, and what it stands for."""
    found, values = scheme.pack(floats())
    tensors = {f"X.{part}": tensor for part, tensor in found.items()}
    if change is not None:
        change(tensors)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    return Checkpoint.open(tmp_path), values


def config_of(scheme: Scheme) -> QuantisedConfig:
    return QuantisedConfig(quantization_config=dict(scheme.config))


def read(checkpoint: Checkpoint, scheme: Scheme, shard: Shard = Shard.WHOLE, rank: int = 0, size: int = 1) -> Any:
    """A rank's values, once the checkpoint was checked."""
    matrix = as_stored(config_of(scheme), checkpoint.tensors).matrix("X", *SHAPE)
    checkpoint.validate(matrix.tensors(), ignorable={"X.input_scale"})
    part = read_quantised(RankWeights(checkpoint, rank=rank, size=size), matrix, matrix.format, shard, Rank(rank, size))
    return CpuOps().upload_dequantised(part)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_reader_gives_what_the_packer_stands_for_bit_for_bit(tmp_path: Path, scheme: Scheme) -> None:
    checkpoint, values = written(tmp_path, scheme)
    np.testing.assert_array_equal(read(checkpoint, scheme), values)
    error = np.abs(values - floats()).max() / floats().std()
    assert 0 < error < 0.8  # it is a quantised copy of what was packed


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("shard", [Shard.COLUMN_PARALLEL, Shard.ROW_PARALLEL])
def test_pieces_of_ranks_make_the_whole_also_inside_groups(tmp_path: Path, scheme: Scheme, shard: Shard) -> None:
    """Each of 4 ranks has 40 rows of blocks of 128, or 96 columns: inside a group of 64 or 128."""
    checkpoint, values = written(tmp_path, scheme)
    pieces = [read(checkpoint, scheme, shard, rank, 4) for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate(pieces, shard), values)


def swapped(name: str, axis: int) -> Callable[[Tensors], None]:
    """A neighbour's in the place of each, along an axis."""

    def change(tensors: Tensors) -> None:
        dtype, array = tensors[f"X.{name}"]
        tensors[f"X.{name}"] = dtype, np.roll(array, 1, axis)

    return change


def one_higher(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        dtype, array = tensors[f"X.{name}"]
        tensors[f"X.{name}"] = dtype, array + array.dtype.type(0x11111111)

    return change


def transposed(name: str) -> Callable[[Tensors], None]:
    """The grid of scales with the groups of inputs as rows, in the same shape."""

    def change(tensors: Tensors) -> None:
        dtype, array = tensors[f"X.{name}"]
        tensors[f"X.{name}"] = dtype, np.ascontiguousarray(array.T).reshape(array.shape)

    return change


def doubled(name: str) -> Callable[[Tensors], None]:
    """For a scale that has no neighbour."""

    def change(tensors: Tensors) -> None:
        dtype, array = tensors[f"X.{name}"]
        tensors[f"X.{name}"] = dtype, np.asarray(array * 2, array.dtype)

    return change


CONTROLS: Mapping[str, tuple[str, Callable[[Tensors], None]]] = {
    "blocks: neighbour's scale": ("fp8 blocks F32", swapped("weight_scale_inv", 1)),
    "blocks: transposed grid": ("fp8 blocks BF16", transposed("weight_scale_inv")),
    "channel: neighbour's scale": ("fp8 per channel", swapped("weight_scale", 0)),
    "awq: wrong zero point": ("awq", one_higher("qzeros")),
    "awq: neighbour's zero point": ("awq", swapped("qzeros", 0)),
    "awq: neighbour's scale": ("awq", swapped("scales", 0)),
    "awq: transposed scales": ("awq", transposed("scales")),
    "gptq: neighbour's scale": ("gptq v1", swapped("scales", 0)),
    "gptq: wrong zero point": ("gptq v1 asymmetric", one_higher("qzeros")),
    "gptq v2: order": ("gptq v2", swapped("qweight", 0)),
    "compressed: neighbour's scale": ("w4a16", swapped("weight_scale", 1)),
    "compressed: neighbour's zero point": ("w4a16 asymmetric", swapped("weight_zero_point", 1)),
    "int8: neighbour's scale": ("w8a8", swapped("weight_scale", 0)),
    "mxfp4: neighbour's scale": ("mxfp4", swapped("weight_scale", 1)),
    "nvfp4: neighbour's scale": ("nvfp4", swapped("weight_scale", 1)),
    "q8_0: neighbour's scale": ("ggml Q8_0", swapped("scales", 1)),
    "q4_0: order": ("ggml Q4_0", swapped("q4_0", 1)),
    "q4_1: neighbour's minimum": ("ggml Q4_1", swapped("minimums", 1)),
    "blocks in float16: neighbour's scale": ("fp8 blocks F16", swapped("weight_scale_inv", 0)),
    "blocks in E8M0: code for code": ("fp8 blocks F8_E8M0", swapped("weight", 1)),
    "tensor: twice the scale": ("fp8 per tensor static", doubled("weight_scale")),
    "modelopt: twice the scale": ("fp8 modelopt", doubled("weight_scale")),
    "fbgemm: neighbour's scale": ("fbgemm fp8", swapped("weight_scale", 0)),
    "gptq of 8 bits: neighbour's scale": ("gptq v1 8 bits", swapped("scales", 0)),
    "gptq of one group: another row's scale": ("gptq v1 one group", swapped("scales", 1)),
    "compressed in float16: neighbour's scale": ("w4a16 F16", swapped("weight_scale", 1)),
    "compressed per channel: another row's scale": ("w4a16 channel", swapped("weight_scale", 0)),
    "compressed of 8 bits: another row's scale": ("w8a16", swapped("weight_scale", 0)),
    "compressed of 8 bits: neighbour's zero point": ("w8a16 asymmetric", swapped("weight_zero_point", 1)),
    "modelopt nvfp4: neighbour's scale": ("nvfp4 modelopt", swapped("weight_scale", 1)),
}


def test_every_layout_has_a_control() -> None:
    assert {name for name, _ in CONTROLS.values()} == set(SCHEMES)


@pytest.mark.parametrize(("name", "change"), CONTROLS.values(), ids=CONTROLS)
def test_comparison_notices_a_layout_that_is_slightly_off(
    tmp_path: Path, name: str, change: Callable[[Tensors], None]
) -> None:
    checkpoint, values = written(tmp_path, SCHEMES[name], change=change)
    assert (read(checkpoint, SCHEMES[name]) != values).mean() > 0.15  # neighbours may have one power of two


@pytest.mark.parametrize("wrong", [{"zero_offset": 0}, {"zero_offset": 2}])
def test_comparison_notices_the_other_version_of_gptq(tmp_path: Path, wrong: dict[str, Any]) -> None:
    scheme = SCHEMES["gptq v1 asymmetric"]
    checkpoint, values = written(tmp_path, scheme)
    stored = stored_format(dict(scheme.config))
    assert stored is not None
    matrix = StoredMatrix(name="X", shape=SHAPE, format=replace(stored, **wrong))
    part = read_quantised(RankWeights(checkpoint, rank=0, size=1), matrix, matrix.format, Shard.WHOLE, Rank())
    assert (CpuOps().upload_dequantised(part) != values).mean() > 0.9


def test_global_scale_divides_in_one_convention_and_multiplies_in_the_other(tmp_path: Path) -> None:
    scheme = SCHEMES["nvfp4"]
    checkpoint, values = written(tmp_path, scheme)
    matrix = as_stored(config_of(scheme), checkpoint.tensors).matrix("X", *SHAPE)
    other = replace(matrix, format=replace(matrix.format, global_divides=False))
    part = read_quantised(RankWeights(checkpoint, rank=0, size=1), other, other.format, Shard.WHOLE, Rank())
    assert np.abs(CpuOps().upload_dequantised(part)).max() > 1000 * np.abs(values).max()


def test_awq_words_are_turned_around_in_its_order_and_in_no_other() -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (6, 130)).astype(np.int32)
    codes = awq_unpacked(words)
    rows = awq_rows(words)
    np.testing.assert_array_equal(rows & 15, codes.T[:, 0::2])
    np.testing.assert_array_equal(rows >> 4, codes.T[:, 1::2])
    assert codes[2, 8 * 5 + 1] == (int(words[2, 5]) >> 16) & 15  # column 1 of a word is its half byte 4
    assert AWQ_ORDER[1] == 4


# --- what is refused ----------------------------------------------------------------------------------------


def test_scattered_groups_are_refused(tmp_path: Path) -> None:
    scheme = SCHEMES["gptq v1"]
    checkpoint, _ = written(tmp_path, scheme, change=swapped("g_idx", 0))
    with pytest.raises(InvalidCheckpoint, match=r"X\.g_idx scatters groups of inputs"):
        read(checkpoint, scheme)


@pytest.mark.parametrize("name", ["gptq v1", "gptq v2"])
def test_zero_points_that_are_not_symmetric_although_the_config_says_so_are_refused(tmp_path: Path, name: str) -> None:
    def change(tensors: Tensors) -> None:
        tensors["X.qzeros"][1][2, 3] += 1

    checkpoint, _ = written(tmp_path, SCHEMES[name], change=change)
    with pytest.raises(InvalidCheckpoint, match=r"X\.qzeros has zero points that are not all the middle"):
        read(checkpoint, SCHEMES[name])


def test_first_version_of_gptq_with_a_zero_point_that_wraps_is_refused(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["X.qzeros"][1][2, 3] |= 0xF0

    scheme = SCHEMES["gptq v1 asymmetric"]
    checkpoint, _ = written(tmp_path, scheme, change=change)
    with pytest.raises(InvalidCheckpoint, match="has the zero point 15, to which one is added"):
        read(checkpoint, scheme)


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_global_scale_that_is_none_is_refused(tmp_path: Path, value: float) -> None:
    def change(tensors: Tensors) -> None:
        tensors["X.weight_scale_2"] = "F32", np.array([value], np.float32)

    checkpoint, _ = written(tmp_path, SCHEMES["nvfp4 modelopt"], change=change)
    with pytest.raises(InvalidCheckpoint, match=r"X\.weight_scale_2 is .*, which no scale is"):
        read(checkpoint, SCHEMES["nvfp4 modelopt"])


def test_code_of_nan_is_refused_with_the_names_of_its_matrices(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["X.weight"][1][7, 9] = 0x7F

    scheme = SCHEMES["fp8 per channel"]
    checkpoint, _ = written(tmp_path, scheme, change=change)
    loader = WeightLoader(RankWeights(checkpoint, rank=0, size=1), ops=CpuOps(), communicator=Rank())  # type: ignore[arg-type]
    matrix = config_of(scheme).matrix("X", *SHAPE)
    for load in (loader.linear, loader.dequantised):
        with pytest.raises(InvalidCheckpoint, match=r"^X: an E4M3 code is no number"):
            load(matrix)


def test_matrices_of_one_product_in_several_formats_are_refused() -> None:
    loader = WeightLoader(DummyWeights({}, rank=0, size=1), ops=CpuOps(), communicator=Rank())  # type: ignore[arg-type]
    fp8, int4 = (config_of(SCHEMES[name]).matrix(name, 64, 64) for name in ("fp8 blocks F32", "w4a16"))
    plain = StoredMatrix(name="plain", shape=(64, 64))
    with pytest.raises(InvalidCheckpoint, match=r"several formats: fp8 blocks F32 e4m3 .*, w4a16 int4 "):
        loader.linear(fp8, int4)
    with pytest.raises(InvalidCheckpoint, match="several formats: plain plain, w4a16 int4"):
        loader.linear(plain, int4)
    with pytest.raises(InvalidCheckpoint, match="several formats"):
        loader.stack(fp8, plain, num_matrices=2)


GPTQ, AWQ, W4, FP8 = (dict(SCHEMES[name].config) for name in ("gptq v1", "awq", "w4a16", "fp8 blocks F32"))


def w4(**weights: Any) -> dict[str, Any]:
    group = W4["config_groups"]["group_0"]
    return W4 | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes': only fp8, fbgemm_fp8, compressed-tensors"),
        ([1], "quantization_config of quantised weights must be a JSON object"),
        (FP8 | {"fmt": "e5m2"}, "fmt of quantised weights is 'e5m2'"),
        (FP8 | {"weight_block_size": [64, 64]}, r"weight_block_size of quantised weights is \[64, 64\]"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert .* must be a list of names"),
        (AWQ | {"version": "gemv"}, "version of quantised weights is 'gemv': only 'gemm' or 'GEMM'"),
        (AWQ | {"bits": 3}, "bits of quantised weights is 3"),
        (AWQ | {"zero_point": False}, "zero_point of quantised weights is False"),
        (AWQ | {"group_size": 20}, "group_size of quantised weights is 20"),
        (GPTQ | {"desc_act": True}, "desc_act of quantised weights is True in groups"),
        (GPTQ | {"bits": 3}, "bits of quantised weights is 3: only 4 or 8"),
        (GPTQ | {"lm_head": True}, "lm_head of quantised weights is True"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic of quantised weights has the rule"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format of quantised weights is 'marlin'"),
        (w4(actorder="group"), "actorder of quantised weights is 'group'"),
        (w4(num_bits=3), "num_bits of quantised weights is 3"),
        (w4(strategy="tensor"), "strategy of quantised weights is 'tensor'"),
        (W4 | {"format": "marlin-24"}, "format of quantised weights is 'marlin-24'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo of quantised weights is 'W4A8_AWQ'"),
        ({"quant_method": "modelopt"}, "quant_algo of quantised weights is missing"),
    ],
)
def test_configs_that_are_not_served_are_refused_by_name(config: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantisation(config)


def test_groups_of_several_formats_are_refused() -> None:
    other = w4(num_bits=8)["config_groups"]["group_0"]
    with pytest.raises(ValueError, match="config_groups of quantised weights have several formats"):
        quantisation(W4 | {"config_groups": W4["config_groups"] | {"group_1": other}})


# --- which matrices are quantised ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "name", "plain"),
    [
        (FP8 | {"modules_to_not_convert": ["lm_head", "mlp.gate"]}, "model.layers.0.mlp.gate", True),
        (FP8 | {"modules_to_not_convert": ["lm_head", "mlp.gate"]}, "model.layers.0.mlp.gate_proj", False),
        (FP8 | {"modules_to_not_convert": ["model.layers.1"]}, "model.layers.11.mlp.up_proj", False),
        (FP8 | {"ignored_layers": ["in_proj_a"]}, "model.layers.0.linear_attn.in_proj_a", True),
        (FP8 | {"modules_to_not_convert": None}, "lm_head", False),
        (W4 | {"ignore": ["re:.*self_attn.*"]}, "model.layers.3.self_attn.o_proj", True),
        (W4 | {"ignore": ["re:.*mlp\\.(gate|up)_proj"]}, "model.layers.3.mlp.down_proj", False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*.o_proj"]}, "a.b.o_proj", True),
        (GPTQ | {"dynamic": {"-:.*down_proj": {}}}, "model.layers.3.mlp.down_proj", True),
    ],
)
def test_names_that_a_config_excepts_are_plain_without_a_checkpoint(
    config: dict[str, Any], name: str, plain: bool
) -> None:
    assert (QuantisedConfig(quantization_config=config).format_of(name) is None) is plain


@pytest.mark.parametrize("pattern", ["re:(a+)+b", "re:(a|a)*", r"re:(.*)\1", "re:.*.*.*.*.*", "re:" + "a" * 400])
def test_patterns_that_could_take_forever_are_refused(pattern: str) -> None:
    config = QuantisedConfig(quantization_config=W4 | {"ignore": [pattern]})
    with pytest.raises(ValueError, match="too involved"):
        config.format_of("a" * 60)


def test_checkpoint_has_the_last_word_on_what_is_plain(tmp_path: Path) -> None:
    """Published FP8 leaves matrices in BF16 that no list names; patterns are not looked at."""
    found, _ = SCHEMES["fp8 blocks BF16"].pack(floats())
    tensors = {f"X.{part}": tensor for part, tensor in found.items()} | {
        "Y.weight": ("BF16", np.zeros((4, 4), np.uint16))
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    config = QuantisedConfig(quantization_config=FP8 | {"modules_to_not_convert": ["X", "re:(a+)+"]})
    with Checkpoint.open(tmp_path) as checkpoint:
        stored = as_stored(config, checkpoint.tensors)
    assert stored.format_of("Y") is None
    assert stored.format_of("X").format.code is Code.E4M3
    assert stored.format_of("X").format.scales == "bf16"
    assert stored.format_of("missing") is not None  # so that what is missing is told by the name of its codes
    assert as_stored(QuantisedConfig(), {}).format_of("X") is None


def test_a_config_cannot_say_what_the_engine_makes_of_it() -> None:
    config = QuantisedConfig(quantization_config=None, stored={"format": 1})
    assert config.format_of("X") is None


# --- without a checkpoint -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DummyWeights, DeviceDummyWeights])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_dummies_of_every_format_are_valid_spread_and_far_from_flat(kind: Any, scheme: Scheme) -> None:
    matrix = config_of(scheme).matrix("X", *SHAPE)

    def values(shard: Shard = Shard.WHOLE, rank: int = 0, size: int = 1) -> NDArray[np.float32]:
        weights = kind(matrix.tensors(), rank=rank, size=size)
        return CpuOps().upload_dequantised(read_quantised(weights, matrix, matrix.format, shard, Rank(rank, size)))

    whole = values()
    assert np.isfinite(whole).all()
    assert len(np.unique(whole)) > 8
    hidden = np.random.default_rng(0).standard_normal((50, SHAPE[1]), np.float32)
    assert 1.3 < (hidden @ whole.T).std() < 2.9  # powers of two are up to a factor of 1.41 off
    for shard in (Shard.COLUMN_PARALLEL, Shard.ROW_PARALLEL):
        np.testing.assert_array_equal(np.concatenate([values(shard, rank, 2) for rank in (0, 1)], shard), whole)


@pytest.mark.parametrize("name", ["awq", "gptq v1 asymmetric", "w4a16 asymmetric"])
def test_dummies_with_zero_points_do_not_lean_to_one_side(name: str) -> None:
    """What leans makes all tokens of a mixture alike, which are then routed to the same experts."""
    matrix = config_of(SCHEMES[name]).matrix("X", *SHAPE)
    weights = DummyWeights(matrix.tensors(), rank=0, size=1)
    assert matrix.format is not None
    part = read_quantised(weights, matrix, matrix.format, Shard.WHOLE, Rank(0, 1))
    values = CpuOps().upload_dequantised(part)
    leans_by_half_a_code = 0.5 * part.scales.astype(np.float32).mean()
    assert abs(values.mean()) < 0.2 * leans_by_half_a_code
