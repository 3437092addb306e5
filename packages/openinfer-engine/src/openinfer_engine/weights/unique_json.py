"""JSON of a checkpoint: a name that occurs twice in one object is an error, not the last one's win."""

import json
from typing import Any

from openinfer_core import InvalidCheckpoint


def decode_unique_json(encoded: bytes, *, what: str) -> Any:
    """Raises `InvalidCheckpoint`: not JSON in UTF-8, or a name twice in an object; `what` names it in messages."""
    try:
        return json.loads(encoded.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{what} is not valid JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    decoded = dict(pairs)
    if len(decoded) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name {twice!r} occurs twice")
    return decoded
