"""Low-rank adapters on a GPU."""
