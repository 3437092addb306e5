"""Recurrent states of sequences: copies at ends of blocks, prefixes that begin on them, their way to and from tiers."""
