"""`Definitions`: which `$defs` of a schema a part of it refers to, so that the part stands alone without the others."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

_WORDS = ("$defs", "definitions")
# A schema with one of these may mean any definition by a name of its own.
_NAMING = frozenset({"$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"})

_Place: TypeAlias = tuple[str, str]  # the word, and the name under it


class Definitions:
    """Those of one schema; each is read once, however many parts refer to it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._all: dict[str, Any] = {word: schema[word] for word in _WORDS if word in schema}
        self._found: dict[_Place, frozenset[_Place] | None] = {}

    def used_by(self, part: object) -> dict[str, Any]:
        """The `$defs` and `definitions` that a part of the schema needs; all where that cannot be told."""
        if not self._all:
            return {}
        used = self._closure(_references(part))
        if used is None:
            return self._all
        found: dict[str, Any] = {}
        for word, name in sorted(used):
            found.setdefault(word, {})[name] = self._all[word][name]
        return found

    def _closure(self, first: frozenset[_Place] | None) -> set[_Place] | None:
        if first is None:
            return None
        used: set[_Place] = set()
        left = list(first)
        while left:
            place = left.pop()
            if place in used or not self._has(place):
                continue
            used.add(place)
            further = self._of(place)
            if further is None:
                return None
            left += further - used
        return used

    def _has(self, place: _Place) -> bool:
        named = self._all.get(place[0])
        return isinstance(named, Mapping) and place[1] in named

    def _of(self, place: _Place) -> frozenset[_Place] | None:
        if place not in self._found:
            self._found[place] = _references(self._all[place[0]][place[1]])
        return self._found[place]


def _references(part: object) -> frozenset[_Place] | None:
    """The definitions that a part names itself; None where it may mean others."""
    found: set[_Place] = set()
    for reference in _reference_texts(part):
        steps = reference.split("/") if isinstance(reference, str) else []
        if len(steps) < 3 or steps[0] != "#" or steps[1] not in _WORDS:
            return None
        if "~" in steps[2] or "%" in steps[2]:  # escapes
            return None
        found.add((steps[1], steps[2]))
    return frozenset(found)


def _reference_texts(part: object) -> Iterator[object]:
    """All `$ref`s, and None for what names in another way. Depth is no concern: no recursion."""
    left = [part]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            mapping = cast("Mapping[str, object]", each)
            if not _NAMING.isdisjoint(mapping):
                yield None
            if "$ref" in mapping:
                yield mapping["$ref"]
            left += mapping.values()
        elif isinstance(each, list):
            left += cast("list[object]", each)
