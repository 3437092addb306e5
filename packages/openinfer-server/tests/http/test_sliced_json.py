"""Large bodies are decoded in slices, and are what the decoder makes of them at once."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_server.http import sliced_json
from openinfer_server.http.sliced_json import SLICE_BYTES, decode_body, decode_in_slices

SCALARS = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=5) | st.text('\\"/[]{},:\n', max_size=40) | st.just('\\"' * 300) | st.just("x" * 5000)
VALUES = st.recursive(
    SCALARS | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=40,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(value=VALUES, size=st.integers(1, 80), indent=st.sampled_from([None, 1]))
def test_a_body_in_slices_is_the_body(value: object, size: int, indent: int | None) -> None:
    body = b" " + json.dumps(value, indent=indent).encode() + b"\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliced_json, "SLICE_BYTES", size)
        decoded = decode_in_slices(body)
    assert json.dumps(decoded) == json.dumps(msgspec.json.decode(body))


def test_names_that_occur_twice_are_the_last_ones() -> None:
    body = b'{"a": [' + b"1," * SLICE_BYTES + b'1], "b": 2, "a": 3}'
    assert decode_in_slices(body) == {"a": 3, "b": 2}


@pytest.mark.parametrize("end", ['"', "\\", '\\"', '"\\', '"]},{"a":[', '\\\\"x', "\n"], ids=json.dumps)
@pytest.mark.parametrize("begin", ["", "\\", '"'], ids=json.dumps)
def test_a_long_text_ends_where_it_ends_whatever_it_escapes(begin: str, end: str) -> None:
    value = {"a": [begin + "x" * 10_000 + end, [1] * SLICE_BYTES], "b": end}
    assert decode_in_slices(json.dumps(value).encode()) == value


LARGE = {
    "a schema": {f"p{i}": {"type": "string", "enum": ["a", str(i)], "description": "x" * 40} for i in range(9_000)},
    "token ids": [list(range(2_000)) for _ in range(128)],
    "names": {f"k{i}": i for i in range(100_000)},
    "objects": [{}] * 100_000,
    "nested": [[0] * 9_000, [[0] * 9_000, [[0] * 9_000, [[0] * 9_000]]]],
    "texts": ["\n" * 1000] * 1000,
}


@pytest.mark.parametrize("name", LARGE)
def test_no_slice_is_long(name: str) -> None:
    body = json.dumps({"a": 1, "b": {"c": LARGE[name]}}).encode()
    sizes: list[int] = []

    def decode(text: bytes) -> object:
        sizes.append(len(text))
        return msgspec.json.decode(text)

    assert decode_in_slices(body, decode) == {"a": 1, "b": {"c": LARGE[name]}}
    longest_run = 64 * 2100  # values without brackets that are passed over together
    assert max(sizes) < 2 * SLICE_BYTES + (longest_run if name == "texts" else 1000)
    assert len(sizes) >= len(body) // (max(sizes) + 1)


class Body(msgspec.Struct, forbid_unknown_fields=True):
    prompt: list[int]
    n: int | None = None


@pytest.mark.parametrize("length", [1, 60_000])
def test_bodies_of_every_length_are_checked_alike(length: int) -> None:
    decoder = msgspec.json.Decoder(Body)
    prompt = [7] * length
    decoded = decode_body(decoder, json.dumps({"prompt": prompt, "n": None, "unknown": None}).encode())
    assert decoded == Body(prompt)
    with pytest.raises(msgspec.ValidationError, match="unknown field `m`"):
        decode_body(decoder, json.dumps({"prompt": prompt, "m": 1}).encode())
    with pytest.raises(msgspec.ValidationError, match=rf"Expected `int`, got `str` - at `\$\.prompt\[{length}\]`"):
        decode_body(decoder, json.dumps({"prompt": [*prompt, "x"]}).encode())
    with pytest.raises(msgspec.DecodeError, match="malformed"):
        decode_body(decoder, json.dumps({"prompt": prompt}).encode() + b"}")
    with pytest.raises(UnicodeDecodeError):
        decode_body(decoder, json.dumps({"prompt": prompt}).encode()[:-1] + b', "\xff": 1}')


@pytest.mark.parametrize(
    ("value", "is_at_once"),
    [
        (["x" * 9_000] * 100, True),
        (["x, [{" * 1_000] * 20, False),  # commas and brackets of texts count
        ([1] * (2**14 + 1), False),
        ([{}] * 8_000, True),
        (["x" * 2**20], False),
    ],
    ids=["texts", "commas", "numbers", "objects", "longer"],
)
def test_body_of_few_values_is_decoded_at_once(value: list[object], is_at_once: bool) -> None:
    body = json.dumps(value, separators=(",", ":")).ljust(SLICE_BYTES + 1).encode()
    sliced: list[bytes] = []

    def decode(text: bytes) -> object:
        sliced.append(text)
        return msgspec.json.decode(text)

    assert decode_body(msgspec.json.Decoder(list), body, decode=decode) == value
    assert bool(sliced) is not is_at_once
    with pytest.raises(msgspec.ValidationError):
        decode_body(msgspec.json.Decoder(dict), body)
    with pytest.raises(msgspec.DecodeError):
        decode_body(msgspec.json.Decoder(list), body.rstrip()[:-1] + b"}")
