"""What becomes of a field of a request that is not honoured: each type of a request has one table of these rules.

honoured    it does what its name says; it has no rule
neutral     it asks for what is always so: with and without it the engine is asked the same, whatever the model's
            defaults, and the answer is the same
label       it names the request or its user; bounded, and changes nothing
dropped     with notice, a closed list: `tools/dropped.py`
refused     by name; so is a field that no table has
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias, cast

from openinfer_server.http.api_errors import invalid, refused

Schema: TypeAlias = dict[str, Any]
ANY: Final = ()
"""Values of a neutral field that changes nothing whatever it says."""


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that asks for what is always so.

    Attributes:
        values: those that ask for it; any other is refused. `ANY`: it changes nothing whatever it says.
        why: what is always so, and what there is instead of other values; a clause.
    """

    values: Sequence[object]
    why: str
    word: ClassVar[str] = "changes nothing"

    def check(self, field: str, value: object) -> None:
        if self.values and not any(_same(value, neutral) for neutral in self.values):
            raise refused(field, self.why)

    def in_schema(self, schema: Schema) -> Schema:
        """The field's schema in the OpenAPI document."""
        told: Schema = {"description": f"Changes nothing: {self.why}."}
        return {"enum": [*self.values, None], "default": None, **told} if self.values else schema | told


@dataclass(frozen=True, slots=True)
class Label:
    """Text, or pairs of texts, that name a request or its user.

    Attributes:
        why: whom or what it names, and why that changes nothing; a clause.
        max_length: characters of the text, or of each pair's value.
        max_pairs: pairs at most.
        max_key_length: characters of each pair's key.
    """

    why: str
    max_length: int = 512
    max_pairs: int = 16
    max_key_length: int = 64
    word: ClassVar[str] = "label"

    def check(self, field: str, value: object) -> None:
        if isinstance(value, str):
            if len(value) > self.max_length:
                raise invalid(field, f"{field} has {len(value)} characters; at most {self.max_length} are possible")
            return
        pairs = cast("Mapping[str, str]", value)
        if len(pairs) > self.max_pairs:
            raise invalid(field, f"{field} has {len(pairs)} pairs; at most {self.max_pairs} are possible")
        for key, text in pairs.items():
            if len(key) > self.max_key_length or len(text) > self.max_length:
                limits = f"keys of {field} have up to {self.max_key_length} characters, values up to {self.max_length}"
                raise invalid(field, limits)

    def in_schema(self, schema: Schema) -> Schema:
        """The field's schema in the OpenAPI document, with its bounds."""
        kinds = [kind | self._bounds[kind["type"]] for kind in schema["anyOf"]]
        return schema | {"anyOf": kinds, "description": f"Label: {self.why}."}

    @property
    def _bounds(self) -> Mapping[str, Schema]:
        text: Schema = {"maxLength": self.max_length}
        pairs: Schema = {
            "maxProperties": self.max_pairs,
            "propertyNames": {"maxLength": self.max_key_length},
            "additionalProperties": {"type": "string", **text},
        }
        return {"string": text, "object": pairs, "null": {}}


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is known and cannot be honoured.

    Attributes:
        why: and what to do instead; a clause.
    """

    why: str
    word: ClassVar[str] = "refused"

    def check(self, field: str, value: object) -> None:
        del value
        raise refused(field, self.why)

    def in_schema(self, schema: Schema) -> Schema:
        """The field's schema in the OpenAPI document: null alone."""
        del schema
        return {"type": "null", "description": f"Refused: {self.why}."}


Rule: TypeAlias = Neutral | Label | Refused


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)  # True == 1
