"""`Level`: who may use a route."""

from enum import StrEnum


class Level(StrEnum):
    """Who may use a route."""

    PUBLIC = "public"
    """Anybody who reaches the port: probes and the document."""
    USER = "user"
    """Whoever may use the model."""
    ADMIN = "admin"
    """Whoever runs the server."""
