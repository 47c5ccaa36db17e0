"""Arrays in the form that the kernels are compiled for, so that each kernel compiles once."""

from __future__ import annotations

import numpy as np

from pario.records import Records

__all__ = ["columns", "flat"]


def columns(records: Records) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(data, starts, nbytes, failed): read-only u8[...], then contiguous i64[n]; `failed` is uninitialised.

    Tables in a window may be strided fields of a structured array; copying them costs less than a microsecond.
    """
    data = records.data
    if data.flags.writeable:
        data = data.view()
        data.flags.writeable = False
    starts = np.array(records.starts, np.int64)
    return data, starts, np.array(records.nbytes, np.int64), np.empty(len(starts), np.int64)


def flat(array: np.ndarray, dtype: type = np.uint8) -> np.ndarray:
    """The same memory as a 1-D array of `dtype`; the array must be C-contiguous."""
    if not array.flags.c_contiguous:
        raise ValueError("decoders write into C-contiguous arrays only")
    # reshape(-1) of contiguous memory never copies.
    return array.reshape(-1).view(dtype)
