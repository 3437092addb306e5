"""Schemas of functions are kept as text."""

import gc

from openinfer_server.tools.schemas import EncodedSchemas

SCHEMAS = {"f": {"type": "object", "properties": {"a": {"enum": [[1], None]}}}, "g": {}}


def test_schemas_are_what_they_were_made_of() -> None:
    encoded = EncodedSchemas(SCHEMAS)
    assert dict(encoded) == SCHEMAS
    assert (len(encoded), "f" in encoded, encoded.get("h"), encoded["g"]) == (2, True, None, {})


def test_schemas_are_no_containers_for_the_collector() -> None:
    large = {"f": {str(i): [i] for i in range(5_000)}}
    before = len(gc.get_objects())
    encoded = EncodedSchemas(large)
    assert len(gc.get_objects()) - before < 100
    assert encoded["f"] == large["f"]
