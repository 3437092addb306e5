"""openinfer-dynamo: an engine as a worker of NVIDIA Dynamo, which has the HTTP server, the tokenizer and the router.

    Dynamo's frontend ═ its request plane ═► Dynamo's `Worker` (Rust, in this process) ─► `DynamoBackend` ─► the engine

Token ids come in and go out; text never does. Dynamo is imported where the command needs it, never with this package.
"""

from openinfer_dynamo.backend import DynamoBackend
from openinfer_dynamo.options import DynamoOptions, Role

__all__ = ["DynamoBackend", "DynamoOptions", "Role"]
