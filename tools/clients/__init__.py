"""The client matrix: clients that people use, run for real against this server. `./run clients` (`__main__.py`)."""
