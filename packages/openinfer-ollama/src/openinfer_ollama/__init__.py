"""openinfer-ollama: Ollama's API on an openinfer server, through the server's public API alone.

types.py     what a client sends, and which of its fields are honoured, change nothing, or are refused
options.py   the same of `options`
fields.py    both                        ─► the fields that every route samples by
turns.py     its messages                ─► turns, as every other route has them
objects.py   what a client gets
lines.py     deltas of the answer's text ─► lines of a stream, or one object
models.py    the routes that describe the model
endpoint.py  all routes
"""

from openinfer_ollama.endpoint import endpoints

OPENINFER_CONTRACT = 1

__all__ = ["endpoints"]
