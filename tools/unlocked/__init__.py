"""Packages of ours with what no lock of ours can have, in environments of their own. `python -m tools.unlocked`."""
