"""Bounds that are checked before anything is allocated: admission, cost of a request, size of a conversation."""
