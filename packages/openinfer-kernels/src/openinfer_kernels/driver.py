"""Waking the CUDA driver early: what takes 0.3 s and needs nothing of ours runs during the imports that take 0.6."""

import contextlib
import ctypes
import threading


def wake_driver(index: int = 0) -> threading.Thread:
    """Begins to make the context of GPU `index` in a thread, and returns at once.

    The context lives as long as the process. Whatever goes wrong is found, and said, when the GPU is opened.

    Returns:
        The thread; to be joined before the first call of CUDA, so that nothing is initialised by two threads at once.
    """
    thread = threading.Thread(target=_make_context, args=(index,), name="openinfer-driver", daemon=True)
    thread.start()
    return thread


def _make_context(index: int) -> None:
    with contextlib.suppress(OSError):  # no driver on this machine
        cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
