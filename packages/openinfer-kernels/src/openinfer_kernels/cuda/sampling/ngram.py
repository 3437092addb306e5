"""Looked up drafts on the device. `csrc/sampling/ngram.cu` says how."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.common.arrays import address, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array
from openinfer_kernels.ops.drafting import LONGEST_HISTORY, LONGEST_NGRAM, NgramHistory, NgramMatch, NgramRule

_THREADS = 256
_INT32 = np.dtype(np.int32)


class _History(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "known", "references", "drafts")),
        ("width", ctypes.c_int),
        ("max_drafts", ctypes.c_int),
    )


class _Rule(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("n_min", "n_max", "reference_n_max", "is_latest", "max_tokens"))


class NgramDrafts:
    """The lookup on one device."""

    def __init__(self, device: Device) -> None:
        self._kernel = device.kernel("ngram", "ngram_drafts")

    def ngram_drafts(
        self, history: NgramHistory, slots: Array, last_ids: Array, lengths: Array, *, rule: NgramRule
    ) -> Array:
        """Slots are not checked: each is one of the history's."""
        _check(history, rule)
        for what, column in (("slots", slots), ("last ids", last_ids), ("lengths", lengths)):
            require(column, _INT32, ndim=1, what=f"the {what}")
        if not len(slots) == len(last_ids) == len(lengths):
            raise ArrayMismatchError(f"{len(slots)} slots, {len(last_ids)} last ids and {len(lengths)} lengths")
        drafts = cupy.empty((len(slots), history.drafts.shape[1]), np.int32)
        if drafts.size:
            arguments = [_history(history), _rule(rule), slots, last_ids, lengths, drafts]
            self._kernel((len(slots), 1, 1), (_THREADS, 1, 1), arguments)
        return drafts


def _check(history: NgramHistory, rule: NgramRule) -> None:
    require(history.ids, _INT32, ndim=2, what="the ids")
    require(history.drafts, _INT32, ndim=2, what="the last drafts")
    for what, column in (("known tokens", history.known), ("references", history.references)):
        require(column, _INT32, ndim=1, what=f"the {what}")
    arrays = history.ids, history.known, history.references, history.drafts
    if len({len(array) for array in arrays}) != 1 or history.ids.shape[1] > LONGEST_HISTORY:
        raise ArrayMismatchError(f"a history of {[array.shape for array in arrays]} is not one of as many slots")
    lengths = rule.n_min, rule.n_max, rule.reference_n_max
    if min(lengths) < 1 or max(lengths) > LONGEST_NGRAM or rule.n_min > min(lengths[1:]):
        raise ArrayMismatchError(f"n-grams of {lengths} tokens; 1 .. {LONGEST_NGRAM} in order are looked up")


def _history(history: NgramHistory) -> _History:
    arrays = history.ids, history.known, history.references, history.drafts
    return _History(*map(address, arrays), history.ids.shape[1], history.drafts.shape[1])


def _rule(rule: NgramRule) -> _Rule:
    is_latest = int(rule.match is NgramMatch.LATEST)
    return _Rule(rule.n_min, rule.n_max, rule.reference_n_max, is_latest, rule.max_tokens)
