"""Attention over paged caches, windows and compressed entries, and what prepares its inputs."""
