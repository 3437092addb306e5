"""States of numbered things, and the one function that changes them.

Blocks (`blocks.py`) and state slots (`state_slots.py`) each draw a diagram and list its arrows as `Transition`s; a
`StateTable` lets nothing else happen.
"""

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Generic, NamedTuple, NoReturn, TypeVar

from openinfer_kv_cache.errors import BlockStateError

State = TypeVar("State", bound=IntEnum)


class Transition(NamedTuple):
    """One arrow of a state diagram."""

    name: str
    source: int
    target: int


class StateTable(Generic[State]):
    """The state of each of `count` things, all in state 0 at first."""

    __slots__ = ("_kind", "_noun", "_states")

    def __init__(self, count: int, kind: type[State], *, noun: str) -> None:
        self._states = bytearray(count)
        self._kind = kind
        self._noun = noun

    def __getitem__(self, index: int) -> State:
        return self._kind(self._states[index])

    def __len__(self) -> int:
        return len(self._states)

    def is_in(self, index: int, state: State) -> bool:
        return self._states[index] == state

    def are_all_in(self, indices: Sequence[int], state: State) -> bool:
        """Also whether all exist."""
        if not indices:
            return True
        if min(indices) < 0 or max(indices) >= len(self._states):
            return False
        return bytes(map(self._states.__getitem__, indices)).count(int(state)) == len(indices)

    def count(self, state: State) -> int:
        return self._states.count(int(state))

    def require(self, indices: Collection[int], state: State, *, verb: str) -> None:
        """Raises `BlockStateError` unless every one of `indices` is in `state`."""
        states = self._states
        for index in indices:
            if states[index] != state:
                raise BlockStateError(
                    f"cannot {verb} {self._noun} {index}: it is {self[index].name.lower()}, not {state.name.lower()}"
                )

    def move(self, indices: Collection[int], move: Transition) -> None:
        """Takes every one of `indices` along one arrow, all or none.

        Raises:
            BlockStateError: one is not in the arrow's source state, or is listed twice.
        """
        states = self._states
        _, source, target = move
        for position, index in enumerate(indices):
            if states[index] != source:
                self._refuse(list(indices), position, move)
            states[index] = target

    def _refuse(self, indices: list[int], position: int, move: Transition) -> NoReturn:
        # All or none: what was moved before is moved back.
        for index in indices[:position]:
            self._states[index] = move.source
        wrong = indices[position]
        raise BlockStateError(
            f"cannot {move.name} {self._noun} {wrong}: it is {self[wrong].name.lower()}"
            f"{' and listed twice' if wrong in indices[:position] else ''}, "
            f"and {move.name} starts from {self._kind(move.source).name.lower()}"
        )
