"""Weights in another process's memory of a GPU: every name, shape and place is checked before a byte is read."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_core.control import IPC_HANDLE_BYTES, ControlCommand, DeviceTensor, UpdateWeights
from openinfer_engine.lifecycle.device_tensors import DeviceTensors
from openinfer_engine.model import Shard
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights
from openinfer_engine.weights.fused import matrices_of_stack
from openinfer_kernels import ForeignWeight, HostArray

FIRST, SECOND = b"1" * IPC_HANDLE_BYTES, b"2" * IPC_HANDLE_BYTES


class Allocation:
    """Bytes 0, 1, 2, … of a process that is not there."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.num_reads = 0
        self.is_open = True
        self.device_bytes = self.host_bytes = 0

    def read(self, offset_bytes: int, num_bytes: int) -> HostArray:
        self.num_reads += 1
        return np.arange(self.size_bytes).astype(np.uint8)[offset_bytes : offset_bytes + num_bytes].copy()

    def copy_rows(self, offset_bytes: int, pitch_bytes: int, out: HostArray) -> None:
        self.num_reads += 1
        for row, place in enumerate(out.view(np.uint8).reshape(len(out), -1)):
            begin = offset_bytes + row * pitch_bytes
            assert 0 <= begin <= begin + place.size <= self.size_bytes
            place[:] = np.arange(begin, begin + place.size)
        self.device_bytes += out.nbytes

    def close(self) -> None:
        self.is_open = False


class Gpu:
    """Allocations by their handles."""

    def __init__(self) -> None:
        self.there = {FIRST: 64, SECOND: 1000}
        self.opened: list[Allocation] = []

    def open(self, handle: bytes) -> Allocation:
        if handle not in self.there:
            raise Refused("no such memory")
        self.opened.append(Allocation(self.there[handle]))
        return self.opened[-1]


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def test_tensors_are_read_from_where_they_lie_and_each_allocation_is_opened_once(gpu: Gpu) -> None:
    tensors = DeviceTensors(
        [
            DeviceTensor("a", "F32", (2, 3), FIRST, 8),
            DeviceTensor("b", "BF16", (4,), FIRST, 56),
            DeviceTensor("c", "F4", (2, 4), SECOND, 1),
            DeviceTensor("d", "U8", (0, 5), SECOND, 1000),
        ],
        gpu.open,
    )
    assert len(gpu.opened) == 2
    assert not any(each.num_reads for each in gpu.opened), "nothing is read before everything is checked"
    np.testing.assert_array_equal(tensors.read("a").view(np.uint8).reshape(-1), np.arange(8, 32))
    np.testing.assert_array_equal(tensors.read("b").view(np.uint8), np.arange(56, 64))
    np.testing.assert_array_equal(tensors.read("c"), [[1, 2], [3, 4]])
    assert tensors.read("d").shape == (0, 5)
    tensors.close()
    tensors.close()
    assert not any(each.is_open for each in gpu.opened)
    with pytest.raises(KeyError):
        tensors.read("a")


def test_plain_weights_are_cut_where_they_lie_and_the_log_says_by_which_way_bytes_came(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = DeviceTensors(
        [DeviceTensor("a", "BF16", (3, 5), FIRST, 7), DeviceTensor("b", "BF16", (2, 3, 4), FIRST, 3)], gpu.open
    )
    checkpoint = Checkpoint([tensors])
    whole = checkpoint.read("a")
    ranks = [RankWeights(checkpoint, rank=rank, size=size) for rank, size in ((0, 1), (1, 3), (3, 5))]
    pieces = [
        (ranks[0].read("a"), whole),
        (ranks[1].read("a", Shard.COLUMN_PARALLEL), whole[1:2]),
        (ranks[2].read("a", Shard.ROW_PARALLEL), whole[:, 3:4]),
        (matrices_of_stack(ranks[0].read("b"), range(1, 2)), checkpoint.read("b")[1]),
    ]
    num_bytes = 0
    for part, expected in pieces:
        assert isinstance(part, ForeignWeight)
        assert part.shape == expected.shape
        np.testing.assert_array_equal(part.on_host(), expected)
        out = np.zeros((len(part), part.row_values), np.uint16)
        part.copy(0, out)
        np.testing.assert_array_equal(out, expected)
        num_bytes += out.nbytes
    assert gpu.opened[0].device_bytes == num_bytes
    with pytest.raises(InvalidCheckpoint, match="cannot be sharded"):
        ranks[1].read("a", Shard.ROW_PARALLEL)
    with caplog.at_level("INFO"):
        tensors.close()
    assert "0.000 GB copied from GPU to GPU, 0.000 GB by way of the host" in caplog.text


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (DeviceTensor("x", "F32", (16,), FIRST, 4), "64 bytes from 4 on, in an allocation of 64"),
        (DeviceTensor("x", "F32", (2**40, 2**40), FIRST), "in an allocation of 64"),
        (DeviceTensor("x", "U8", (1,), FIRST, 2**48), "in an allocation of 64"),
        (DeviceTensor("x", "F12", (1,), FIRST), "has dtype 'F12'"),
        (DeviceTensor("x", "F4", (3,), FIRST), "no pairs of F4"),
        (DeviceTensor("x", "F32", (1,), b"3" * IPC_HANDLE_BYTES), "no such memory"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_cannot_be_is_refused_unread_and_all_that_was_opened_is_closed(
    gpu: Gpu, tensor: DeviceTensor, message: str
) -> None:
    good = DeviceTensor("good", "F32", (4,), SECOND)
    with pytest.raises((InvalidCheckpoint, Refused), match=message):
        DeviceTensors([good, tensor], gpu.open)
    assert not any(each.is_open or each.num_reads for each in gpu.opened)


ONE = DeviceTensor("x", "F32", (1,), FIRST)
WRONG: Sequence[Callable[[], object]] = [
    lambda: UpdateWeights(tensors=(ONE, ONE)),
    lambda: UpdateWeights(tensors=(ONE,), path="folder"),
    lambda: UpdateWeights(tensors=(ONE,), segments=("name",)),
    UpdateWeights,
]


@pytest.mark.parametrize("wrong", WRONG)
def test_update_has_one_source_and_names_each_tensor_once(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"give one of the three|named twice"):
        wrong()


def test_update_crosses_processes_and_numbers_from_outside_are_bounded() -> None:
    command = UpdateWeights(tensors=(DeviceTensor("model.norm.weight", "BF16", (3, 4), FIRST, 8),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=ControlCommand) == command
    for wrong in (
        ["x", "F32", [1], FIRST[:-1], 0],
        ["x", "F32", [1], FIRST + b"1", 0],
        ["x", "F32", [-1], FIRST, 0],
        ["x", "F32", [1], FIRST, -1],
        ["x", "F32", [1], FIRST, 2**60],
        ["x", "F32", [1] * 33, FIRST, 0],
        ["", "F32", [1], FIRST, 0],
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=DeviceTensor)
