"""GGUF files: those that gguf's own writer makes are read as what went in, damaged ones are one clear error."""

import contextlib
import json
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import tokenizers
from gguf import GGMLQuantizationType as Quantization
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_core import InvalidCheckpoint, OpenInferError, Refused
from openinfer_engine.gguf import blocks
from openinfer_engine.gguf.config import ARCHITECTURES
from openinfer_engine.gguf.file import GgufFile, quantisation_of
from openinfer_engine.gguf.folder import files_of, model_folder
from openinfer_engine.gguf.header import FORMATS, map_file, read_header
from openinfer_engine.model import Shard
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_engine.weights.fingerprint import fingerprint
from openinfer_engine.weights.quantised import read_quantised
from openinfer_engine.weights.quantization_config import QuantisedConfig, as_stored
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.cpu.gemm.quantised import dequantised

HEADS, KV_HEADS, HIDDEN, VOCABULARY = 4, 2, 64, 8
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "Ġ", "Ġa"]
RNG = np.random.default_rng(0)
Change = Callable[[GGUFWriter], object]


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def weights() -> dict[str, np.ndarray]:
    def random(*shape: int) -> np.ndarray:
        return RNG.standard_normal(shape).astype(np.float32)

    kv = HIDDEN // HEADS * KV_HEADS
    return {
        "token_embd.weight": random(VOCABULARY, HIDDEN),
        "output_norm.weight": random(HIDDEN),
        "blk.0.attn_norm.weight": random(HIDDEN),
        "blk.0.attn_q.weight": random(HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": random(kv, HIDDEN),
        "blk.0.attn_v.weight": random(kv, HIDDEN),
        "blk.0.attn_output.weight": random(HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": random(HIDDEN),
        "blk.0.ffn_gate.weight": random(96, HIDDEN),
        "blk.0.ffn_up.weight": random(96, HIDDEN),
        "blk.0.ffn_down.weight": random(HIDDEN, 96),
    }


def write(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    quantised: Quantization | None = None,
    pre: str = "smollm",
    architecture: str = "llama",
    change: Change = lambda writer: None,
    kinds: dict[str, Quantization] | None = None,
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    change(writer)
    for name, values in (weights() if tensors is None else tensors).items():
        if quantised is not None and values.ndim == 2:
            kind = (kinds or {}).get(name, quantised)
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    return write(tmp_path / "valid.gguf")


def test_tensors_have_the_checkpoints_names_and_rows_of_q_and_k_in_its_order(tmp_path: Path) -> None:
    whole = weights()
    q, k = whole["blk.0.attn_q.weight"], whole["blk.0.attn_k.weight"]
    stored = whole | {"blk.0.attn_q.weight": permuted(q, HEADS), "blk.0.attn_k.weight": permuted(k, KV_HEADS)}
    file = GgufFile(write(tmp_path / "x.gguf", stored))
    np.testing.assert_array_equal(file.read("model.layers.0.self_attn.q_proj.weight"), q)
    np.testing.assert_array_equal(file.read("model.layers.0.self_attn.k_proj.weight"), k)
    np.testing.assert_array_equal(file.read("model.layers.0.mlp.down_proj.weight"), whole["blk.0.ffn_down.weight"])
    np.testing.assert_array_equal(file.read("model.embed_tokens.weight"), whole["token_embd.weight"])
    assert file.tensors["model.norm.weight"].shape == (HIDDEN,)


def test_rows_of_architectures_that_rotate_halves_stay(tmp_path: Path) -> None:
    whole = weights()
    file = GgufFile(write(tmp_path / "x.gguf", whole, architecture="qwen3"))
    np.testing.assert_array_equal(file.read("model.layers.0.self_attn.q_proj.weight"), whole["blk.0.attn_q.weight"])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32"])
def test_formats_are_dequantised_as_gguf_does_it(tmp_path: Path, name: str) -> None:
    values = weights()["blk.0.ffn_up.weight"]
    quantised = Quantization[name]
    file = GgufFile(write(tmp_path / "x.gguf", {"blk.0.ffn_up.weight": values}, quantised=quantised))
    found = file.read("model.layers.0.mlp.up_proj.weight")
    if name == "BF16":
        assert found.dtype == np.uint16
        found = (found.astype(np.uint32) << 16).view(np.float32)
    expected = gguf.quants.dequantize(gguf.quants.quantize(values, quantised), quantised)
    np.testing.assert_array_equal(found.astype(np.float32), expected)
    error = np.abs(found.astype(np.float32) - values).max()
    assert error < {"F32": 1e-9, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 0.03}.get(name, 0.5)


def kept_values(file: GgufFile, name: str) -> np.ndarray:
    """What the parts of a matrix stand for, through the reader and the operators of a CPU."""
    config = QuantisedConfig(quantization_config=quantisation_of(file.header, file.path))
    config = as_stored(config, file.tensors)
    rows, columns = WIDTHS[name]
    matrix = config.matrix(name, rows, columns)
    assert matrix.format is not None
    for each, spec in matrix.tensors().items():
        assert file.tensors[each].shape == spec.shape
        assert file.tensors[each].dtype == spec.dtypes[0]
    assert f"{name}.weight" not in file.tensors
    weights = SimpleNamespace(read_stored=lambda each, shard=None: file.read(each))
    part = read_quantised(weights, matrix, matrix.format, Shard.WHOLE, SimpleNamespace(rank=0, size=1))
    return dequantised(CpuOps().upload_quantised(part))


LAYER = "model.layers.0"
WIDTHS = {f"{LAYER}.mlp.down_proj": (HIDDEN, 96), f"{LAYER}.self_attn.q_proj": (HIDDEN, HIDDEN)}


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_matrices_that_stay_quantised_stand_for_what_gguf_dequantises(tmp_path: Path, kind: str, name: str) -> None:
    """Bit for bit, with rows of Q in the checkpoint's order."""
    path = write(tmp_path / "x.gguf", quantised=Quantization[kind])
    kept, plain = GgufFile(path, keeps_quantised=True), GgufFile(path)
    np.testing.assert_array_equal(kept_values(kept, name), plain.read(f"{name}.weight"))
    assert kept.tensors["model.embed_tokens.weight"].dtype == "F32"
    np.testing.assert_array_equal(kept.read("model.embed_tokens.weight"), plain.read("model.embed_tokens.weight"))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_comparison_notices_another_order_of_a_blocks_halves(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.gguf", quantised=Quantization[kind])
    monkeypatch.setattr(blocks, "_paired", lambda codes: codes)
    name = f"{LAYER}.mlp.down_proj"
    same = np.array_equal(
        kept_values(GgufFile(path, keeps_quantised=True), name), GgufFile(path).read(f"{name}.weight")
    )
    assert same == (kind == "Q8_0")


def test_matrices_of_one_product_stay_quantised_where_they_have_one_format(tmp_path: Path) -> None:
    whole = weights()
    kinds = dict.fromkeys(whole, Quantization.Q4_0) | {"blk.0.attn_v.weight": Quantization.Q4_1}
    kinds |= {"blk.0.ffn_down.weight": Quantization.Q5_0}
    path = tmp_path / "x.gguf"
    write(path, whole, quantised=Quantization.Q4_0, kinds=kinds)
    file = GgufFile(path, keeps_quantised=True)
    names = {name for name in file.tensors if name.startswith(LAYER) and "norm" not in name}
    plain = {f"{LAYER}.{name}.weight" for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
    assert names == {*plain, f"{LAYER}.mlp.down_proj.weight"} | {
        f"{LAYER}.{name}.{part}"
        for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
        for part in ("q4_0", "scales")
    }
    made = quantisation_of(file.header, path)
    assert made == {"quant_method": "gguf", "type": "Q4_0", "dequantised": {"Q4_0": 3, "Q4_1": 1, "Q5_0": 1}}
    config = as_stored(QuantisedConfig(quantization_config=made), file.tensors)
    assert config.stored.described == (
        "3 matrices of int4 in groups of 1 x 32 with f16 scales; 3 of ggml's Q4_0 dequantised when loaded; "
        "1 of ggml's Q4_1 dequantised when loaded; 1 of ggml's Q5_0 dequantised when loaded"
    )
    plain_config = as_stored(QuantisedConfig(quantization_config=made), GgufFile(path).tensors)
    assert plain_config.stored.described == "all dequantised when they are loaded"
    assert files_of(path)["config.json"]["quantization_config"] == made
    assert "quantization_config" not in files_of(write(tmp_path / "y.gguf"))["config.json"]


def test_every_format_that_is_read_is_one_that_gguf_dequantises() -> None:
    for number, stored in FORMATS.items():
        assert Quantization(number).name == stored.name
        assert gguf.GGML_QUANT_SIZES[Quantization(number)] == (stored.numbers, stored.num_bytes)
        zeros = np.zeros((2, stored.num_bytes), np.uint8)
        if stored.name != "BF16":
            assert gguf.quants.dequantize(zeros, Quantization(number)).shape == (2, stored.numbers)


def test_folder_is_a_model_folder_with_config_tokenizer_and_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write(tmp_path / "model.gguf")
    folder = model_folder(path)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-5, 100000.0, 16)
    assert (config["tie_word_embeddings"], config["eos_token_id"], config["vocab_size"]) == (True, [2], VOCABULARY)
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == "{{ messages[0].content }}"
    assert (tokenizer_config["bos_token"], tokenizer_config["unk_token"]) == ("<s>", "<unk>")
    with Checkpoint.open(folder) as checkpoint:
        assert "model.layers.0.mlp.gate_proj.weight" in checkpoint.tensors
    assert model_folder(path) == folder
    before = fingerprint(folder)
    write(path, weights() | {"blk.0.ffn_norm.weight": np.ones(HIDDEN, np.float32)}, change=lambda w: w.add_name("x"))
    assert fingerprint(model_folder(path)) != before


def tokenizer_of(path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(files_of(path)["tokenizer.json"]))


def test_byte_level_tokenizer_merges_and_keeps_special_tokens_apart(valid: Path) -> None:
    tokenizer = tokenizer_of(valid)
    assert tokenizer.encode("ab a</s>").ids == [5, 7, 2]
    assert tokenizer.decode([5, 7]) == "ab a"


def test_bos_is_put_before_where_the_file_or_its_kind_says_so(tmp_path: Path) -> None:
    assert tokenizer_of(write(tmp_path / "a.gguf", pre="llama-bpe")).encode("ab").ids == [1, 5]
    no_bos = write(tmp_path / "b.gguf", pre="llama-bpe", change=lambda writer: writer.add_add_bos_token(False))
    assert tokenizer_of(no_bos).encode("ab").ids == [5]
    both = write(tmp_path / "c.gguf", change=lambda w: (w.add_add_bos_token(True), w.add_add_eos_token(True)))
    assert tokenizer_of(both).encode("ab").ids == [1, 5, 2]


def test_sentencepiece_merges_follow_from_the_scores(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "▁a", "ab", "▁ab"]
    scores = [0.0, 0.0, 0.0, 0.0, 0.0, -5.0, -6.0, -7.0, -2.0, -1.0, -3.0]

    def change(writer: GGUFWriter) -> None:
        for key, value in (("model", "llama"), ("tokens", tokens), ("token_type", [2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1])):
            del writer.kv_data[0][f"tokenizer.ggml.{key}"]
            getattr(writer, {"model": "add_tokenizer_model", "tokens": "add_token_list"}.get(key, "add_token_types"))(
                value
            )
        writer.add_token_scores(scores)

    tensors = weights() | {"token_embd.weight": np.zeros((len(tokens), HIDDEN), np.float32)}
    tokenizer = tokenizer_of(write(tmp_path / "x.gguf", tensors, change=change))
    assert tokenizer.encode("ab").tokens == ["<s>", "▁ab"]
    assert tokenizer.encode("é").ids == [1, 5, 3, 4]
    assert tokenizer.decode([10, 3, 4, 8]) == "abé a"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a 1234", ["a", "Ġ", "1", "2", "3", "4"]),
        ("gpt-2", "a 1234", ["a", "Ġ1234"]),
        ("llama-bpe", "a 1234", ["a", "Ġ", "123", "4"]),
        ("qwen2", "a 1234", ["a", "Ġ", "1", "2", "3", "4"]),
        ("tekken", "aB 12", ["a", "B", "Ġ", "1", "2"]),
    ],
)
def test_text_is_split_as_the_file_names_it(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = tokenizer_of(write(tmp_path / "x.gguf", pre=pre))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_llama_3s_slowed_frequencies_are_found_from_their_factors(tmp_path: Path) -> None:
    theta, dim = 100000.0, HIDDEN // HEADS
    turns = 8192 * theta ** (-np.arange(0, dim, 2) / dim) / (2 * np.pi)
    kept = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / ((1 - kept) / 32 + kept)).astype(np.float32)
    path = write(tmp_path / "x.gguf", {"rope_freqs.weight": factors} | weights())
    scaling = files_of(path)["config.json"]["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 32.0)
    assert "rope_freqs.weight" not in GgufFile(path).tensors
    other = write(tmp_path / "y.gguf", {"rope_freqs.weight": factors + 1} | weights())
    with pytest.raises(Refused, match=r"are not those of Llama 3\.1's rotary embedding"):
        files_of(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "mamba"}, r"is of the architecture 'mamba'; of GGUF files llama, qwen3 are read"),
        ({"change": lambda writer: writer.add_expert_count(8)}, "is a mixture of experts"),
        (
            {"pre": "my-own"},
            r"splits text as 'my-own' \(tokenizer\.ggml\.pre\), which is not known; known are gpt-2, smol",
        ),
        ({"pre": "default"}, "splits text as 'default'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(Refused, match=message):
        files_of(write(tmp_path / "x.gguf", **options))


def test_a_format_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write(path, {"blk.0.ffn_up.weight": np.zeros((4, 256), np.int16)})
    with pytest.raises(
        InvalidCheckpoint, match=r"'blk\.0\.ffn_up\.weight' in ggml's type 25, which is not read; read are F32"
    ):
        GgufFile(path)


def test_without_gguf_the_message_says_what_to_install(valid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(valid.with_name("q.gguf"), quantised=Quantization.Q8_0)
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    file = GgufFile(path)
    with pytest.raises(Refused, match="weights in Q8_0, which the package gguf dequantises, and it is not installed"):
        file.read("model.layers.0.mlp.up_proj.weight")


def test_a_tensor_of_no_model_keeps_its_name(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "x.gguf", weights() | {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}))
    assert "model.layers.0.self_attn.q_proj.bias" in file.tensors
    file = GgufFile(write(tmp_path / "y.gguf", weights() | {"mm.0.weight": np.zeros(HIDDEN, np.float32)}))
    assert "mm.0.weight" in file.tensors


# --- hostile files ------------------------------------------------------------------------------------------


def head(*parts: bytes, version: int = 3, tensors: int = 0, entries: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + b"".join(parts)


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return text(b"key") + struct.pack("<IIQ", 9, kind, count) + content


def tensor(name: bytes, sizes: tuple[int, ...], kind: int, offset: int, dimensions: int | None = None) -> bytes:
    count = len(sizes) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", count, *sizes, kind, offset)


HUGE = 2**63
PADDING = b"\0" * 256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short"),
        (b"GGU", "too short"),
        (b"GGML" + PADDING, "does not begin with GGUF"),
        (head(version=1), "is GGUF of version 1, and versions 2 and 3 are read"),
        (head(version=3 << 24), "its bytes are in big-endian order"),
        (head(tensors=HUGE), f"announces {HUGE} tensors, and has room for 0"),
        (head(entries=HUGE), f"announces {HUGE} metadata entries"),
        (head(entries=1000), "announces 1000 metadata entries"),
        (head(text(b"", HUGE), PADDING, entries=1), f"announces {HUGE} bytes of text"),
        (head(text(b"k" * 5000), PADDING, entries=1), "announces 5000 bytes of text"),
        (head(text(b"\xff"), PADDING, entries=1), "is not UTF-8"),
        (head(text(b"key"), struct.pack("<I", 99), PADDING, entries=1), "'key' has a value of type 99"),
        (head(array(8, HUGE), PADDING, entries=1), f"announces {HUGE} texts"),
        (head(array(4, HUGE), PADDING, entries=1), f"announces {HUGE} numbers"),
        (head(array(12, 200), PADDING, entries=1), "its head goes on at byte"),
        (head(array(9, 1, struct.pack("<IQ", 9, 1) * 20), PADDING, entries=1), "an array of arrays"),
        (head(array(13, 1), PADDING, entries=1), "'key' has a value of type 13"),
        (head((text(b"k") + struct.pack("<IB", 7, 1)) * 2, PADDING, entries=2), "the key 'k' occurs twice"),
        (head(text(b"general.alignment") + struct.pack("<II", 4, 3), PADDING, entries=1), "no power of two"),
        (head(text(b"general.alignment") + struct.pack("<II", 4, 0), PADDING, entries=1), "no power of two"),
        (head(text(b"general.alignment") + struct.pack("<I", 8) + text(b"32"), PADDING, entries=1), "no power of two"),
        (head(tensor(b"t", (32,), 0, 0) * 2, PADDING, tensors=2), "the tensor 't' occurs twice"),
        (head(tensor(b"t", (32,), 0, 0, dimensions=2**31), PADDING, tensors=1), "has 2147483648 dimensions"),
        (head(tensor(b"t", (), 0, 0), PADDING, tensors=1), "has 0 dimensions"),
        (head(tensor(b"t", (0,), 0, 0), PADDING, tensors=1), "does not divide into blocks of F32"),
        (head(tensor(b"t", (33,), 2, 0), PADDING, tensors=1), "does not divide into blocks of Q4_0"),
        (head(tensor(b"t", (2**62, 2**62), 0, 0), PADDING, tensors=1), "and the file at"),
        (head(tensor(b"t", (32,), 77, 0), PADDING, tensors=1), "in ggml's type 77"),
        (head(tensor(b"t", (1,), 0, HUGE), PADDING, tensors=1), "where 0 is the next free byte"),
        (
            head(tensor(b"t", (8,), 0, 0), tensor(b"u", (8,), 0, 0), PADDING, tensors=2),
            "where 32 is the next free byte",
        ),
        (
            head(tensor(b"t", (8,), 0, 0), tensor(b"u", (8,), 0, 64), PADDING, tensors=2),
            "where 32 is the next free byte",
        ),
        (head(tensor(b"t", (1024,), 0, 0), PADDING, tensors=1), "was the download interrupted"),
    ],
)
def test_a_hostile_head_is_one_clear_error_in_bounded_time_and_memory(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises(InvalidCheckpoint, match=message) as caught:
        read_header(map_file(path), path)
    assert time.perf_counter() - begin < 5
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert "\n" not in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damage_of_a_file_is_anything_but_a_refusal(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    source = folder / "source.gguf"
    whole = bytearray((source if source.exists() else write(source, quantised=Quantization.Q4_1)).read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, 1200))
        whole[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    path = folder / "damaged.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(OpenInferError):
        files_of(path)
        for keeps in (False, True):
            file = GgufFile(path, keeps_quantised=keeps)
            for name in file.tensors:
                file.read(name)


def test_metadata_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    def without(key: str) -> Change:
        return lambda writer: writer.kv_data[0].pop(key)

    for change, message in (
        (without("llama.block_count"), r"llama\.block_count is missing"),
        (without("tokenizer.ggml.token_type"), r"no tokenizer\.ggml\.token_type for each of its 8 tokens"),
        (without("tokenizer.ggml.merges"), r"no list of texts tokenizer\.ggml\.merges"),
        (
            lambda w: (without("tokenizer.ggml.eos_token_id")(w), w.add_eos_token_id(99)),
            "eos_token_id 99, and has 8 tokens",
        ),
        (
            lambda w: (without("tokenizer.ggml.merges")(w), w.add_token_merges(["a c"])),
            "the merge 'a c', which is not two",
        ),
        (lambda w: (without("tokenizer.ggml.tokens")(w), w.add_token_list(["a"] * 8)), "8 tokens of which 1 differ"),
    ):
        with pytest.raises(InvalidCheckpoint, match=message):
            files_of(write(tmp_path / "x.gguf", change=change))


def test_architectures_say_their_own_names() -> None:
    assert all(name == each.name for name, each in ARCHITECTURES.items())
