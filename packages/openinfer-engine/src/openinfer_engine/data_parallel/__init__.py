"""Data-parallel attention: ranks with sequences of their own, that share the experts of a mixture in every step."""
