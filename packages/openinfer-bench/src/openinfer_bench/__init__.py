"""The benchmarks of openinfer: each is a command, `openinfer bench NAME`."""

__all__: list[str] = []
