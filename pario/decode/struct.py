"""Records with a fixed binary layout: a label and pixels, say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pario.decode.base import ArraySpec, Decoder, Draw, Failures, columns
from pario.errors import OptionError
from pario.kernels.pack import pack_rows
from pario.records import Records


class Struct(Decoder):
    """One array per field, of records that all have the same binary layout.

    Struct({"label": "<u4", "pixels": ("u1", (3, 32, 32))})   {"label": u32[b], "pixels": u8[b, 3, 32, 32]}

    Parameters
    ----------
    fields : dict name -> dtype or (dtype, shape), or a numpy structured dtype
        One after the other, without gaps; a structured dtype may have gaps. The arrays have this machine's byte order.
    skip : int
        Bytes before the first field.
    tail : bool
        Records may be longer; what follows is ignored.
    """

    def __init__(self, fields: Any, *, skip: int = 0, tail: bool = False) -> None:
        try:
            if isinstance(fields, Mapping):
                fields = [(name, *(of if isinstance(of, tuple) else (of,))) for name, of in fields.items()]
            self.dtype = np.dtype(fields)
        except (TypeError, ValueError) as error:
            raise OptionError(f"fields must be name -> dtype or (dtype, shape), got {fields!r}: {error}") from error
        names = self.dtype.names
        if not names or self.dtype.hasobject or not self.dtype.itemsize:
            raise OptionError(f"fields must be named numbers of a fixed size, got {self.dtype!r}")
        if isinstance(skip, bool) or not isinstance(skip, (int, np.integer)) or skip < 0:
            raise OptionError(f"skip must be a number of bytes, got {skip!r}")
        self.skip, self.tail = int(skip), bool(tail)
        self.arrays: dict[str, ArraySpec] = {}
        for name in names:
            base = self.dtype[name]
            self.arrays[name] = (base.shape, base.base.newbyteorder("=") if base.base.names is None else base.base)
        self.spec = True  # nothing depends on record 0

    def __repr__(self) -> str:
        named = {name: self.dtype[name] for name in self.dtype.names or ()}
        said = {name: (of.base.str, of.shape) if of.shape else of.base.str for name, of in named.items()}
        more = (f", skip={self.skip}" if self.skip else "") + (", tail=True" if self.tail else "")
        return f"{type(self).__name__}({said!r}{more})"

    def learn(self, record: np.ndarray) -> bool:
        why = self._why(len(record))
        if why:
            raise self._refused(record, why)
        return True

    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        return {name: ((len(records), *shape), dtype) for name, (shape, dtype) in self.arrays.items()}

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        size = self.dtype.itemsize
        data, starts, nbytes, failed = columns(records)
        left = nbytes - self.skip
        if self.tail:
            left = np.minimum(left, size)
        rows = np.empty((len(records), size), np.uint8)
        n = pack_rows(data, starts + self.skip, left, rows.reshape(-1), size, failed, False)
        fields = rows.reshape(-1).view(self.dtype) if len(records) else np.empty(0, self.dtype)
        bad = [int(i) for i in failed[:n]]
        if bad:
            good = np.ones(len(records), bool)
            good[bad] = False
            for name, array in out.items():
                array[good] = fields[name][good]
        else:
            for name, array in out.items():
                array[...] = fields[name]
        return [(i, self._why(int(nbytes[i])) or "lies outside the bytes that were read") for i in bad]

    def _why(self, got: int) -> str:
        want = self.skip + self.dtype.itemsize
        if got == want or (self.tail and got > want):
            return ""
        return f"expected {'at least ' if self.tail else ''}{want} bytes, got {got}"
