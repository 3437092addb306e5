"""Open files of this process: connections, pipes, segments of a disk tier each need a descriptor."""

import contextlib
import os
import sys

_MOST = 2**20
# More than any process of ours can use; a system that allows a billion has programs that try each one.


def raise_descriptor_limit() -> int | None:
    """Lets this process and those that it starts open as many files as the system allows; returns how many.

    The soft limit becomes the hard one, 1,048,576 at most. None where the system has no such limit.
    """
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems allow fewer than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int:
    """How many this process has open; 0 where the system does not say."""
    with contextlib.suppress(FileNotFoundError):
        return len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))
    return 0
