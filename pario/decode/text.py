"""Text records, and records of tokens."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

import numpy as np

from pario.decode.base import Draw
from pario.decode.rows import BadValue, Column, RowDecoder, RowOptions
from pario.errors import OptionError

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Text(RowDecoder):
    """Records that are text, or tokens: numbers of one dtype, a different number of them in each record.

    Text()                           {"data": object[b]}, each a str
    Text(dtype="uint16")             {"data": u16[total], "offsets": i64[b + 1]}
    Text(dtype="uint16", ragged="pad", pad_value=0)   {"data": u16[b, longest], "lengths": i64[b]}

    Parameters
    ----------
    encoding : str
        Of the text; a record that breaks its rules is bad.
    dtype : numpy dtype, optional
        Of the tokens; may have a byte order (">u2").
    ragged : "flat", "pad" or "list"
        Of tokens: see docs/decoders.md.
    pad_value, pad_multiple : number, int
        Of "pad": what fills the rest, and what the length is a multiple of.
    """

    def __init__(self, encoding: str = "utf-8", *, dtype: Any = None, **rows: Unpack[RowOptions]) -> None:
        if dtype is not None and rows.get("ragged") is None:
            rows["ragged"] = "flat"
        super().__init__(**rows)
        try:
            codecs.lookup(encoding)
            self.tokens = None if dtype is None else np.dtype(dtype)
        except (LookupError, TypeError) as error:
            raise OptionError(f"no such encoding or dtype: {error}") from error
        if self.tokens is not None and self.tokens.kind not in "biufc":
            raise OptionError(f"dtype must be numbers of a fixed size, got {self.tokens!r}")
        self.encoding = encoding

    def arguments(self) -> dict[str, tuple[Any, Any]]:
        usual = None if self.tokens is None else "flat"
        return {**super().arguments(), "dtype": (self.tokens, None), "ragged": (self.ragged, usual)}

    def value(self, record: np.ndarray, number: int, draw: Draw, key: bytes) -> Any:
        if self.tokens is None:
            try:
                return record.tobytes().decode(self.encoding)
            except UnicodeDecodeError as error:
                raise BadValue(f"no {self.encoding} text: byte {error.start} is {record[error.start]:#04x}") from error
        if len(record) % self.tokens.itemsize:
            raise BadValue(f"{len(record)} bytes are no whole number of {self.tokens}")
        # In the order of this machine's bytes, and at an address that its instructions can read.
        return np.frombuffer(record.tobytes(), self.tokens).astype(self.tokens.newbyteorder("="), copy=False)

    def _column(self, name: str, item: Any) -> Column:
        column = super()._column(name, item)
        if self.tokens is None or not column.ragged:
            return column
        return column._replace(shape=(0,), is_open=False)
