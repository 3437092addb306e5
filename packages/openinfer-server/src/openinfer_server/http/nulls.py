"""`null` is absence, in every object of the API's own; never in what a client made for its tools or model.

Each field that a route knows may be null, and the decoder takes it. This is for fields that a route does not know:
objects that a client's SDK made of an answer have a null for all that was not in it, and fields of later releases.
"""

from typing import Any, cast

# Fields whose objects are the client's own: schemas, arguments, labels.
_FREE_FORM = frozenset(
    """
    arguments chat_template_kwargs client_metadata guided_json hints input_schema json logit_bias metadata parameters
    schema
    """.split()
)


def without_nulls(value: Any) -> Any:
    """A copy without fields that are null, but for those in free-form objects."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {name: _field(name, field) for name, field in fields.items() if field is not None}
    if isinstance(value, list):
        return [without_nulls(element) for element in cast("list[Any]", value)]
    return value


def _field(name: str, value: Any) -> Any:
    if name == "documents":
        return value
    if isinstance(value, dict) and (name in _FREE_FORM or name == "input"):  # a call's input; a response's is a list
        return cast("dict[str, Any]", value)
    return without_nulls(value)
