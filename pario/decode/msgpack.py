"""MessagePack records, with the arrays that msgpack-numpy writes."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pario.codec.library import find_package
from pario.decode.base import Draw
from pario.decode.rows import BadValue, FieldDecoder, RowOptions
from pario.errors import OptionError, how_to_install

if TYPE_CHECKING:
    from typing_extensions import Unpack

_msgpack = functools.partial(find_package, "msgpack")


class MsgPack(FieldDecoder):
    """Values of MessagePack records, one per record. Needs `pip install ".[msgpack]"`. Runs no code of the file.

    Arrays and scalars of msgpack-numpy become NumPy's; those that hold pickles are bad records.

    Parameters
    ----------
    fields : None, "all", names, or name -> dtype
        None: {"data": object[b]}, each record's value. "all": a column for each name of record 0; the two elements of a
        list of two are "data" and "label". Names: these columns; "a.b" is b in a, "a.0" the first element of list a.
    raw : bool
        Return text as bytes: of old writers, which marked both alike.
    ragged : None, "flat", "pad", "list" or "object", or a dict of names with these
        How arrays whose sizes differ become one: see docs/decoders.md.
    pad_value, pad_multiple : number, int
        Of "pad": what fills the rest, and what the first axis is a multiple of.
    optional : names, optional
        Of what records may lack: beside x comes x_there, bool[b]; see docs/decoders.md.
    """

    def __init__(self, fields: Any = None, *, raw: bool = False, **rows: Unpack[RowOptions]) -> None:
        super().__init__(fields, **rows)
        if _msgpack() is None:
            what = "MsgPack() needs the package msgpack, which is not installed"
            raise OptionError(what, hint=how_to_install("msgpack"))
        self.raw = bool(raw)

    def value(self, record: np.ndarray, number: int, draw: Draw, key: bytes) -> Any:
        try:
            # The library takes no length that exceeds the record's own.
            return _msgpack().unpackb(record.tobytes(), raw=self.raw, strict_map_key=False, object_hook=_arrays)
        except UnicodeDecodeError as error:
            raise BadValue("bytes that are marked as text, as old writers do; raw=True returns bytes") from error
        except RecursionError as error:
            raise BadValue("MessagePack that is nested too deeply") from error


def _arrays(said: dict[Any, Any]) -> Any:
    """What msgpack-numpy wrote as a map, or the map itself. Raises BadValue."""
    mark = said.get(b"nd", said.get("nd"))
    if mark is None:
        pair = said.get(b"complex", said.get("complex"))
        return complex(_text(said.get(b"data", said.get("data")))) if pair is True else _plain(said)
    named = {_text(name): item for name, item in said.items()}
    if mark not in (True, False) or "data" not in named or "type" not in named:
        return _plain(said)
    kind, descr = _text(named.get("kind", "")), named["type"]
    if kind == "O":
        raise BadValue("an array of Python objects as a pickle, which MsgPack() does not load")
    if kind == "V":
        descr = [tuple(_text(part) if isinstance(part, (str, bytes)) else part for part in field) for field in descr]
    dtype = np.dtype(descr if kind == "V" else _text(descr))
    shape = tuple(named.get("shape", ())) if mark else ()
    data = named["data"]
    if not isinstance(data, bytes):
        raise BadValue("an array whose numbers are no bytes")
    if dtype.hasobject or not dtype.itemsize or len(shape) > 64 or any(type(k) is not int or k < 0 for k in shape):
        raise BadValue(f"no array of numbers: {dtype}, shape {shape!r:.60}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise BadValue(f"{dtype}{list(shape)} are {math.prod(shape) * dtype.itemsize:,} bytes, got {len(data):,}")
    array = np.frombuffer(data, dtype).reshape(shape) if len(data) else np.empty(shape, dtype)
    return array if mark else array[()]


def _plain(said: dict[Any, Any]) -> dict[Any, Any]:
    """The map, with names as text where raw=True returned bytes."""
    return {name.decode("utf-8", "replace") if isinstance(name, bytes) else name: item for name, item in said.items()}


def _text(item: Any) -> str:
    return item.decode("latin1") if isinstance(item, bytes) else str(item)
