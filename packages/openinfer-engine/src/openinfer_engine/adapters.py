"""`AdapterTable`: which adapter a name stands for at this moment."""

from typing import Protocol

from openinfer_core.request import LoadedAdapter


class AdapterTable(Protocol):
    """The adapters that are loaded. Asked by the loop's thread, once for each request, before it is scheduled."""

    def find(self, name: str) -> LoadedAdapter | None:
        """The adapter of that name: digest of its content, and the slot that holds it; None if there is none."""
        ...
