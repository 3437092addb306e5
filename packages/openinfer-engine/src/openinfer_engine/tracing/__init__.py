"""Traces of a run, and what they say."""
