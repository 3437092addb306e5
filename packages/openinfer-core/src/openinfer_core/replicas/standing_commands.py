"""`StandingCommands`: what a replica that comes later has to be told, to be as the others are."""

import msgspec

from openinfer_core.control import ControlCommand, LoadAdapter, Pause, Resume, Sleep, UnloadAdapter, Wake


class StandingCommands:
    """Of the commands that replicas have obeyed, those that still count; at most one for each adapter, and two more."""

    def __init__(self) -> None:
        self._adapters: dict[str, LoadAdapter | UnloadAdapter] = {}
        self._pause: Pause | None = None
        self._sleep: Sleep | None = None

    def note(self, command: ControlCommand) -> None:
        """Takes in a command that replicas have obeyed."""
        match command:
            case LoadAdapter():
                has_first = command.in_place or self._is_of_start(command.name)
                self._adapters[command.name] = msgspec.structs.replace(command, in_place=has_first)
            case UnloadAdapter():
                if command.name not in self._adapters or self._is_of_start(command.name):
                    self._adapters[command.name] = command
                else:
                    del self._adapters[command.name]
            case Pause():
                self._pause = command
            case Resume():
                self._pause = None
            case Sleep():
                self._sleep = command
            case Wake():
                self._sleep = None
            case _:  # a flush is over, and weights are compared
                pass

    @property
    def commands(self) -> list[ControlCommand]:
        """In the order in which they are to be told, to a replica that may have been told before.

        It was by another server, or over a link that broke; so adapters are loaded in place.
        """
        adapters = (
            msgspec.structs.replace(each, in_place=True) if isinstance(each, LoadAdapter) else each
            for each in self._adapters.values()
        )
        return [*adapters, *(each for each in (self._pause, self._sleep) if each is not None)]

    def _is_of_start(self, name: str) -> bool:
        """Whether a replica may have an adapter of that name from its start on."""
        known = self._adapters.get(name)
        return isinstance(known, UnloadAdapter) or (known is not None and known.in_place)
