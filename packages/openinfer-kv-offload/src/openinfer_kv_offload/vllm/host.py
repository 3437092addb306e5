"""The modules of the process that this package is a guest of: vLLM's, and its torch.

They are that user's. No package of ours requires or ships them, so they are fetched by name, without types, here alone;
`device_torch` is called by a worker only.
"""

from importlib import import_module
from typing import Any

_BASE: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")

ConnectorBase: type[Any] = _BASE.KVConnectorBase_V1
SupportsHMA: type[Any] = _BASE.SupportsHMA
ConnectorMetadata: type[Any] = _BASE.KVConnectorMetadata
ConnectorWorkerMetadata: type[Any] = _BASE.KVConnectorWorkerMetadata
ConnectorRole: Any = _BASE.KVConnectorRole
# How a load that failed is told of by its request; None in releases that know failed blocks of one group only.
TransferResults: type[Any] | None = getattr(_BASE, "KVConnectorTransferResults", None)
VLLM_VERSION: str = import_module("vllm").__version__


def device_torch() -> Any:
    return import_module("torch")
