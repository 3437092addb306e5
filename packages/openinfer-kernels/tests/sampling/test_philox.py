import numpy as np
import pytest

from openinfer_kernels.cpu.sampling.philox import philox, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers_of_random123(counter, key, expected):
    def words(text: str) -> np.ndarray:
        return np.array([int(word, 16) for word in text.split()], np.uint64)

    both = philox(np.stack([words(counter)] * 2, axis=1), np.stack([words(key)] * 2, axis=1))
    assert both.dtype == np.uint32
    for lane in both.T:
        assert [f"{word:08x}" for word in lane.tolist()] == expected.split()


def test_uniforms_split_seed_and_position_into_words_low_first():
    seed, position = 0x299F_31D0_A409_3822, 0x05A3_08D3_243F_6A88
    counter = np.array([[0x243F_6A88], [0x05A3_08D3], [0], [0]], np.uint64)
    key = np.array([[0xA409_3822], [0x299F_31D0]], np.uint64)
    number = uniforms(np.array([seed], np.uint64), np.array([position], np.int64))
    assert number[0] == philox(counter, key)[0, 0] / 2**32


def test_uniforms_lie_in_the_half_open_interval_and_differ():
    numbers = uniforms(np.full(10000, 7, np.uint64), np.arange(10000, dtype=np.int64))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(set(numbers.tolist())) > 9990
    assert abs(numbers.mean() - 0.5) < 0.02


def test_uniforms_of_the_largest_seed():
    assert 0 <= uniforms(np.array([2**64 - 1], np.uint64), np.array([2**63 - 1], np.int64))[0] < 1
