"""The tier on a file system: append-only segment files of records, found again after a restart."""
