"""Several processes on one port, before one engine."""
