"""`TorchCopies`: vLLM's KV tensors as a pool of blocks."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openinfer_kv_offload.errors import TierConfigError
from openinfer_kv_offload.vllm.copies import StagedCopy
from openinfer_kv_offload.vllm.host import device_torch


class _Done:
    def is_done(self) -> bool:
        return True


class _Steps:
    """Work of a device, each part begun when the one before it has ended: no stream ever waits for a copy."""

    def __init__(self, event: Any, then: Callable[[], Any] | None = None) -> None:
        self._event = event
        self._then = then

    def is_done(self) -> bool:
        if not self._event.query():
            return False
        if self._then is None:
            return True
        then, self._then = self._then, None
        self._event = then()
        return self._event.query()


class _TableLayers:
    """The layers of one table, ordered by their names."""

    def __init__(self, kv_caches: Mapping[str, Any], names: Sequence[str], num_blocks: int) -> None:
        self.layers: list[tuple[Any, int]] = [
            (kv_caches[name], _block_dim(name, kv_caches[name], num_blocks)) for name in names
        ]
        self.sizes = [layer.numel() // num_blocks * layer.element_size() for layer, _ in self.layers]
        self.block_bytes = sum(self.sizes)
        self.meaning = [_meaning(name, *each) for name, each in zip(names, self.layers, strict=True)]


class TorchCopies:
    """Layers of any shape that has one dimension of blocks; a block's bytes are those of its table's layers.

    Raises:
        TierConfigError: a layer is not of tensors with such a dimension, or its table is not known.
    """

    def __init__(
        self, kv_caches: Mapping[str, Any], *, num_blocks: int, tables: Sequence[Sequence[str]] | None = None
    ) -> None:
        """`tables` are names of layers; None: all layers have one table."""
        self._torch = device_torch()
        names = [sorted(kv_caches)] if tables is None else _names_of_tables(kv_caches, tables)
        self._tables = [_TableLayers(kv_caches, each, num_blocks) for each in names]
        self.block_bytes = max(each.block_bytes for each in self._tables)
        meanings = [each.meaning for each in self._tables]
        self.identity = json.dumps(meanings if len(meanings) > 1 else meanings[0])
        self._device = self._tables[0].layers[0][0].device
        self._staging: Any = None
        self._stream = self._torch.cuda.Stream() if self._device.type == "cuda" else None

    def allocate_staging(self, num_blocks: int) -> Sequence[memoryview]:
        is_gpu = self._device.type == "cuda"
        self._staging = self._torch.empty((num_blocks, self.block_bytes), dtype=self._torch.uint8, pin_memory=is_gpu)
        return [memoryview(row.numpy()) for row in self._staging]

    def to_staging(self, block_ids: Sequence[int], staging_ids: Sequence[int], *, table: int = 0) -> StagedCopy:
        """Gathers on the device after its work, then copies each block as a whole on a stream of its own."""
        index = self._torch.tensor(list(block_ids), device=self._device)
        parts = [
            layer.index_select(dim, index).movedim(dim, 0).contiguous().view(len(block_ids), -1).view(self._torch.uint8)
            for layer, dim in self._tables[table].layers
        ]
        gathered = self._torch.cat(parts, dim=1)
        if self._stream is None:
            self._to_staging(gathered, staging_ids)
            return _Done()
        self._stream.wait_stream(self._torch.cuda.current_stream())
        with self._torch.cuda.stream(self._stream):
            self._to_staging(gathered, staging_ids)
        gathered.record_stream(self._stream)  # else its memory could be given out while it is copied
        return _Steps(self._stream.record_event())

    def to_pool(self, staging_ids: Sequence[int], block_ids: Sequence[int], *, table: int = 0) -> StagedCopy:
        """Copies each block as a whole during the device's work, then spreads it over the layers before more work."""
        if not staging_ids:
            return _Done()
        into = self._tables[table]
        if self._stream is None:
            self._spread(self._from_staging(staging_ids, into), block_ids, into)
            return _Done()
        with self._torch.cuda.stream(self._stream):
            arrived = self._from_staging(staging_ids, into)
        return _Steps(self._stream.record_event(), lambda: self._spread_in_order(arrived, block_ids, into))

    def _to_staging(self, gathered: Any, staging_ids: Sequence[int]) -> None:
        num_bytes = gathered.shape[1]
        for row, staging_id in zip(gathered, staging_ids, strict=True):
            self._staging[staging_id, :num_bytes].copy_(row, non_blocking=True)

    def _from_staging(self, staging_ids: Sequence[int], table: _TableLayers) -> Any:
        num_bytes = table.block_bytes
        arrived = self._torch.empty((len(staging_ids), num_bytes), dtype=self._torch.uint8, device=self._device)
        for row, staging_id in zip(arrived, staging_ids, strict=True):
            row.copy_(self._staging[staging_id, :num_bytes], non_blocking=True)
        return arrived

    def _spread_in_order(self, arrived: Any, block_ids: Sequence[int], table: _TableLayers) -> Any:
        current = self._torch.cuda.current_stream()  # the model's, so that steps which follow find the blocks
        arrived.record_stream(current)
        self._spread(arrived, block_ids, table)
        return current.record_event()

    def _spread(self, arrived: Any, block_ids: Sequence[int], table: _TableLayers) -> None:
        index = self._torch.tensor(list(block_ids), device=self._device)
        for (layer, dim), part in zip(table.layers, arrived.split(table.sizes, dim=1), strict=True):
            shape = list(layer.shape)
            blocks_first = [len(block_ids), *shape[:dim], *shape[dim + 1 :]]
            values = part.contiguous().view(layer.dtype).view(blocks_first).movedim(0, dim)
            layer.index_copy_(dim, index, values)


def _names_of_tables(kv_caches: Mapping[str, Any], tables: Sequence[Sequence[str]]) -> list[list[str]]:
    """Layers that have a cache, by table: one that shares another layer's has none of its own."""
    names = [sorted(name for name in table if name in kv_caches) for table in tables]
    unknown = sorted(set(kv_caches).difference(*names))
    if unknown or not all(names):
        raise TierConfigError(
            f"vLLM's KV cache groups are {[list(table) for table in tables]}, and its caches are {sorted(kv_caches)}; "
            "OpenInferConnector needs each cache in a group, and one in each group"
        )
    return names


def _block_dim(name: str, layer: Any, num_blocks: int) -> int:
    """Finds the dimension of blocks: of `[blocks, ...]`, or of `[2, blocks, ...]` with keys and values apart."""
    shape = tuple(getattr(layer, "shape", ()))
    if shape and shape[0] == num_blocks:
        return 0
    if len(shape) > 1 and shape[0] == 2 and shape[1] == num_blocks:
        return 1
    raise TierConfigError(
        f"the KV cache of layer {name} is {shape or type(layer).__name__}; OpenInferConnector needs one tensor with "
        f"a first or (after keys and values) second dimension of {num_blocks} blocks"
    )


def _meaning(name: str, layer: Any, dim: int) -> list[Any]:
    """What the bytes of one block in a layer are; how many blocks the pool has is not part of it."""
    shape = list(layer.shape)
    return [name, dim, shape[:dim] + shape[dim + 1 :], str(layer.dtype)]
