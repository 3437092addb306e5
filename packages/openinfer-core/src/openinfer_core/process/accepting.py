"""What listeners have in common: `accept` fails while descriptors or memory are short, and a client goes on waiting."""

import errno

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of `accept` that pass when something else is closed. The listener stays readable meanwhile."""
ACCEPT_PAUSE_S = 1.0
"""That a listener rests after one of them, as asyncio's does."""
