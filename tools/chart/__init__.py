"""deploy/chart rendered, for its tests. `python -m tools.chart` (`__main__.py`)."""
