"""`EncodedSchemas`: the schemas of functions, kept as text."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec


class EncodedSchemas(Mapping[str, Mapping[str, Any]]):
    """Name -> JSON Schema of a function's parameters, decoded whenever it is asked for.

    A parser asks for the schema of a function that is called, or for none, and lives as long as its answer. A megabyte
    of schemas is 50,000 containers, through which the garbage collector would look for 20 ms meanwhile.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._texts = {name: msgspec.json.encode(schema) for name, schema in schemas.items()}

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return msgspec.json.decode(self._texts[name], type=dict[str, Any])

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)
