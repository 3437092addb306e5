"""What the benchmark's token ids mean."""

STAMPS = 10_000
"""Token ids: the time at which a token was made, in tenths of a millisecond, modulo one second."""
