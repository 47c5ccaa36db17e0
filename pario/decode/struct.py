"""Records with a fixed binary layout: a label and pixels, say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pario.decode.base import ArraySpec, Decoder, Draw, Failures, columns, flat, past_caches
from pario.errors import OptionError
from pario.kernels.fields import pack_fields
from pario.records import Records

#: Fields of at least as many bytes are copied straight to their arrays. Shorter ones are collected first: numpy copies
#: a column of them in less time than it takes to ask an array for its address.
_WIDE = 256


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
        named = self.dtype.fields
        if not named or self.dtype.hasobject or not self.dtype.itemsize:
            raise OptionError(f"fields must be named numbers of a fixed size, got {self.dtype!r}")
        if isinstance(skip, bool) or not isinstance(skip, (int, np.integer)) or skip < 0:
            raise OptionError(f"skip must be a number of bytes, got {skip!r}")
        self.skip, self.tail = int(skip), bool(tail)
        self.arrays: dict[str, ArraySpec] = {}
        #: fields that go straight to their arrays: name -> whether the numbers have a foreign byte order
        self._wide: dict[str, bool] = {}
        self._short: list[str] = []  # the others
        narrow: list[tuple[str, np.dtype]] = []
        joined: list[list[int]] = []
        straight: list[list[int]] = []
        for name in self.dtype.names or ():
            of, at = named[name][:2]
            foreign = of.base.names is None and not of.base.isnative
            self.arrays[name] = of.shape, of.base.newbyteorder("=") if foreign else of.base
            if of.itemsize >= _WIDE:
                self._wide[name] = foreign
                straight.append([at, of.itemsize, 0, of.itemsize])
                continue
            if not joined or at != joined[-1][0] + joined[-1][1]:
                joined.append([at, 0, np.dtype(narrow).itemsize])
            joined[-1][1] += of.itemsize
            self._short.append(name)
            narrow.append((f"f{len(narrow)}", of))  # a field may have no name
        #: the other fields, one behind the other
        self._narrow = np.dtype(narrow)
        #: what is copied of a record, as `pack_fields` says: first the narrow fields, to rows of their own
        self._spans = np.array([*([*span, self._narrow.itemsize] for span in joined), *straight])
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
        if any((out[name].shape, out[name].dtype) != of for name, of in self.shapes(records).items()):
            raise ValueError(f"expected arrays {self.shapes(records)}")
        rows = np.empty(len(records) * self._narrow.itemsize, np.uint8)
        wide = np.array([(flat(out[name]).ctypes.data, past_caches(out[name])) for name in self._wide], np.int64)
        n = pack_fields(data, starts + self.skip, left, size, self._spans, rows, wide.reshape(-1, 2), failed)
        narrow: np.ndarray = np.ndarray(len(records), self._narrow, rows)
        for name, field in zip(self._short, self._narrow.names or (), strict=True):
            out[name][...] = narrow[field]
        for name, foreign in self._wide.items():
            if foreign:
                out[name].byteswap(inplace=True)
        return [(i, self._why(int(nbytes[i])) or "lies outside the bytes that were read") for i in failed[:n].tolist()]

    def _why(self, got: int) -> str:
        want = self.skip + self.dtype.itemsize
        if got == want or (self.tail and got > want):
            return ""
        return f"expected {'at least ' if self.tail else ''}{want} bytes, got {got}"
