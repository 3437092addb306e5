"""A KV tier for openinfer: blocks in an SQLite file."""

from openinfer_sqlite_tier.store import SqliteStore, open_sqlite

OPENINFER_CONTRACT = 1

__all__ = ["SqliteStore", "open_sqlite"]
