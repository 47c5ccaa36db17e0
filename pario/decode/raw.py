"""Records as they are: rows of an array, or bytes and offsets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pario.decode.base import ArraySpec, Decoder, Draw, Failures, Verbatim, columns, extent, flat, past_caches
from pario.errors import DecodeError, OptionError
from pario.kernels.pack import pack_rows, pack_spans
from pario.records import Records

_U8 = np.dtype(np.uint8)
_I64 = np.dtype(np.int64)


class Raw(Decoder):
    """Records without a format.

    Raw()                               {"data": u8[total], "offsets": i64[b + 1]}; record i is
                                        data[offsets[i]:offsets[i + 1]]
    Raw(dtype="float32", shape=(3, 4))  {"data": f32[b, 3, 4]}; every record must have 48 bytes
    Raw(dtype="float32")                {"data": f32[b, k]}; k from record 0, every record must have as many

    Parameters
    ----------
    dtype : numpy dtype, optional
        May have a byte order (">f4"); uint8 if only `shape` is given.
    shape : int or tuple of int, optional
        Of one record; one axis may be -1, and record 0 determines it.
    """

    def __init__(self, dtype: Any = None, shape: int | tuple[int, ...] | None = None) -> None:
        self.fixed = dtype is not None or shape is not None
        try:
            self.dtype = np.dtype(np.uint8 if dtype is None else dtype)
        except TypeError as error:
            raise OptionError(f"dtype must be a numpy dtype, got {dtype!r}") from error
        if self.dtype.hasobject or self.dtype.itemsize == 0:
            raise OptionError(f"dtype must be numbers of a fixed size, got {self.dtype!r}")
        sizes = (-1,) if shape is None else tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        if any(not isinstance(k, (int, np.integer)) or k < -1 or k == 0 for k in sizes) or sizes.count(-1) > 1:
            raise OptionError(f"shape must be sizes above 0, at most one of them -1, got {shape!r}")
        self.shape: tuple[int, ...] = tuple(int(k) for k in sizes)
        #: shape of one record, () for scalars; None while unknown
        self.spec: tuple[int, ...] | None = self.shape if self.fixed and -1 not in self.shape else None

    def arguments(self) -> dict[str, tuple[Any, Any]]:
        known = self.fixed and self.shape != (-1,)
        return {"dtype": (self.dtype if self.fixed else None, None), "shape": (self.shape if known else None, None)}

    def learn(self, record: np.ndarray) -> tuple[int, ...] | None:
        if not self.fixed:
            return None
        known = math.prod(k for k in self.shape if k != -1) * self.dtype.itemsize
        k, rest = divmod(len(record), known)
        if rest or k == 0 or (k != 1 and -1 not in self.shape):
            sizes = f"{known}, {2 * known}, {3 * known}, ..." if -1 in self.shape else f"{known}"
            raise DecodeError(
                f"{self!r} needs records of {sizes} bytes, this one has {len(record)}",
                hint="Raw() without dtype and shape, and Text(dtype=...), take records of any size",
            )
        self.spec = tuple(k if size == -1 else size for size in self.shape)
        return self.spec

    @property
    def by_rows(self) -> bool:  # type: ignore[override]
        """Records of variable size are packed one after the other."""
        return self.fixed

    @property
    def copies(self) -> bool:  # type: ignore[override]
        return type(self).decode is Raw.decode

    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        if not self.fixed:
            total = int(np.add.reduce(records.nbytes))
            return {"data": ((total,), _U8), "offsets": ((len(records) + 1,), _I64)}
        return {"data": ((len(records), *self._learnt()), self.dtype)}

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        data, starts, nbytes, failed = columns(records)
        if not self.fixed:
            n = pack_spans(data, starts, nbytes, flat(out["data"]), out["offsets"], failed)
            return [(int(i), "lies outside the bytes that were read") for i in failed[:n]]
        shape = self._learnt()
        want = math.prod(shape) * self.dtype.itemsize
        rows = out["data"]
        n = pack_rows(data, starts, nbytes, flat(rows), want, failed, past_caches(rows))
        return [(int(i), self._why(int(nbytes[i]), want)) for i in failed[:n]]

    def picked(self, arrays: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
        if self.fixed:
            return super().picked(arrays, rows)
        starts = np.ascontiguousarray(arrays["offsets"][rows])
        records = Records(rows, arrays["data"], starts, arrays["offsets"][rows + 1] - starts)
        out = {name: np.empty(shape, dtype) for name, (shape, dtype) in self.shapes(records).items()}
        self.decode(records, out, Draw())
        return out

    def verbatim(self) -> Verbatim:
        return Verbatim("data", 0)

    def decode_rest(self, records: Records, out: dict[str, np.ndarray]) -> list[int]:
        if not self.fixed:
            out["offsets"][0] = 0
            np.cumsum(records.nbytes, out=out["offsets"][1:])
            return []
        return np.flatnonzero(records.nbytes).tolist()

    def _why(self, got: int, want: int) -> str:
        if got == want:
            return "lies outside the bytes that were read"
        return f"expected {want} bytes ({extent(self._learnt(), self.dtype)}), got {got}"
