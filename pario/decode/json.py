"""JSON records."""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pario.decode.base import Draw
from pario.decode.rows import BadValue, FieldDecoder, RowOptions
from pario.errors import OptionError
from pario.text import read_json

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Json(FieldDecoder):
    """Values of JSON records (UTF-8, UTF-16 or UTF-32), one per record.

    Parameters
    ----------
    fields : None, "all", names, or name -> dtype
        None: {"data": object[b]}, each record's value. "all": a column for each name of record 0. Names: these
        columns; "a.b" is b in a, "a.0" the first element of list a. With dtypes, numbers are converted:
        {"energy": "float32"}.
    arrays : "ase", optional
        Convert the forms in which ASE writes arrays, complex numbers and times ({"__ndarray__": ...}).
    ragged : None, "flat", "pad", "list" or "object", or a dict of names with these
        How arrays whose sizes differ become one: see docs/decoders.md.
    pad_value, pad_multiple : number, int
        Of "pad": what fills the rest, and what the first axis is a multiple of.
    optional : names, optional
        Of what records may lack: beside x comes x_there, bool[b]; see docs/decoders.md.
    """

    def __init__(self, fields: Any = None, *, arrays: str | None = None, **rows: Unpack[RowOptions]) -> None:
        super().__init__(fields, **rows)
        if arrays not in (None, "ase"):
            raise OptionError(f'arrays must be None or "ase", got {arrays!r}')
        self.arrays = arrays

    def value(self, record: np.ndarray, number: int, draw: Draw, key: bytes) -> Any:
        return read_json(record.tobytes(), _from_ase if self.arrays else None)


def _from_ase(said: dict[str, Any]) -> Any:
    """An object of ASE's JSON. Raises BadValue."""
    if "__ndarray__" in said:
        shape, dtype, numbers = said["__ndarray__"]
        if not isinstance(shape, list) or not isinstance(numbers, list) or dtype not in np.sctypeDict:
            raise BadValue(f"no array that ASE writes: {str(said)[:80]}")
        if np.dtype(dtype).kind not in "biufc":
            raise BadValue(f"an array of {dtype!r}, which is not of numbers")
        if np.dtype(dtype).kind == "c":  # pairs (real, imaginary), one after the other
            numbers = [complex(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        if len(numbers) != math.prod(shape):
            raise BadValue(f"an array of shape {shape} with {len(numbers)} numbers")
        return np.array(numbers, dtype).reshape(shape)
    if "__complex__" in said:
        return complex(*said["__complex__"])
    if "__datetime__" in said:
        return datetime.datetime.fromisoformat(said["__datetime__"])
    return said
