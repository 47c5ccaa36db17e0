"""Decodes single records in the thread that has read them, as `map` of an input pipeline does."""

from __future__ import annotations

import copy

import numpy as np

from pario.codec.packing import Packing
from pario.decode.base import Decoder, Draw
from pario.errors import DecodeError
from pario.records import Records

__all__ = ["Decoding"]

_DRAW = Draw()
_ID, _START = np.zeros(1, np.int64), np.zeros(1, np.int64)


class Decoding:
    """One decoder that several threads use. Call it with a value's bytes; returns the decoder's arrays, of one row.

    packing : how the values are packed; None: they are not
    Raises DecodeError.
    """

    def __init__(self, decoder: Decoder, packing: Packing | None, first: memoryview) -> None:
        self._packing = packing
        self._decoder = copy.copy(decoder)
        value = self._raw(first)
        self._decoder.learn_from(Records(_ID, value, _START, np.array([len(value)])), _DRAW)

    def __repr__(self) -> str:
        return repr(self._decoder)

    def __call__(self, stored: memoryview) -> dict[str, np.ndarray]:
        value = self._raw(stored)
        records = Records(_ID, value, _START, np.array([len(value)]))
        out = {name: np.empty(shape, dtype) for name, (shape, dtype) in self._decoder.shapes(records).items()}
        failures = self._decoder.decode(records, out, _DRAW)
        if failures:
            raise DecodeError(f"{self._decoder!r} cannot decode a record: {failures[0][1]}")
        return self._decoder.finish(out)

    def _raw(self, stored: memoryview) -> np.ndarray:
        return np.frombuffer(stored if self._packing is None else self._packing.unpack_one(stored), np.uint8)
