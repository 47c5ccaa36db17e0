"""Pickled records, on request only: without code of the file for plain data, or with all of it."""

from __future__ import annotations

import codecs
import io
import pickle
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from pario.decode.base import Draw
from pario.decode.rows import BadValue, FieldDecoder, RowOptions
from pario.decode.unpickle import NotAllowed, unpickle, whole
from pario.errors import OptionError

if TYPE_CHECKING:
    from typing_extensions import Unpack

_WHY = (
    "unpickling runs code that the writer of the file chose: it can read, change and send whatever this account can. "
)


class Pickle(FieldDecoder):
    """Values of pickled records, one per record.

    Pickle(allow=[])               plain data only: numbers, strings, lists, dicts, sets, dates, NumPy arrays
    Pickle(allow=["my.Class"])     and these classes and functions of the pickle, by their full names
    Pickle(allow_pickle=True)      everything, as pickle.loads does: runs code that the writer of the file chose

    Without either of them it is an OptionError. `allow` unpickles in Python, more slowly than allow_pickle=True does.

    Parameters
    ----------
    fields : None, "all", names, or name -> dtype
        None: {"data": object[b]}, each record's value. "all": a column for each name of record 0; the two elements of a
        list of two are "data" and "label". Names: these columns; "a.b" is b in a, "a.0" the first element of list a; of
        objects and namedtuples, their attributes.
    allow : list of "module.Class", optional
        What a pickle may use besides plain data. Each is trusted: with it, a hostile pickle can do what the class does.
    allow_pickle : bool
        Trust the file as a whole.
    encoding : str
        How strings of Python 2 are read, as in `pickle.loads`; "bytes" leaves them as they are.
    ragged : None, "flat", "pad", "list" or "object", or a dict of names with these
        How arrays whose sizes differ become one: see docs/decoders.md.
    pad_value, pad_multiple : number, int
        Of "pad": what fills the rest, and what the first axis is a multiple of.
    optional : names, optional
        Of what records may lack: beside x comes x_there, bool[b]; see docs/decoders.md.
    """

    def __init__(
        self,
        fields: Any = None,
        *,
        allow: Iterable[str] | None = None,
        allow_pickle: bool = False,
        encoding: str = "latin1",
        **rows: Unpack[RowOptions],
    ) -> None:
        super().__init__(fields, **rows)
        if allow is None and allow_pickle is not True:
            raise OptionError(
                f"Pickle() has to be told how far to trust the file: {_WHY.rstrip()}",
                hint="allow=[] reads plain data and arrays without running any; allow_pickle=True trusts the file.",
            )
        if allow is not None and allow_pickle:
            raise OptionError("allow and allow_pickle=True contradict each other: give one of them")
        if isinstance(allow, str) or not all(isinstance(name, str) and "." in name for name in allow or ()):
            raise OptionError(f'allow must be a list of "module.Class", got {allow!r}')
        try:
            if encoding != "bytes":
                codecs.lookup(encoding)
        except (LookupError, TypeError) as e:
            raise OptionError(f"encoding must be the name of one, or 'bytes', got {encoding!r}") from e
        self.encoding = encoding
        self.allow, self.allow_pickle = None if allow is None else list(allow), allow_pickle
        if allow is None:
            warnings.warn(
                f"Pickle(allow_pickle=True): {_WHY}Pickle(allow=[]) reads plain data and arrays without it.",
                UserWarning,
                stacklevel=2,
            )

    def value(self, record: np.ndarray, number: int, draw: Draw, key: bytes) -> Any:
        if self.allow is None:
            file: Any = io.BytesIO(record)
            if record[:2].tobytes() < b"\x80\x04":  # without frames pickle would read byte by byte
                file = io.BufferedReader(file)
            value = pickle.load(file, encoding=self.encoding)
            whole(file)
            return value
        try:
            return unpickle(record.tobytes(), self.allow, self.encoding)
        except NotAllowed as error:
            raise BadValue(
                f"the pickle uses {error.name}, which is no plain data; allow=[{error.name!r}] trusts this one, "
                "allow_pickle=True the whole file"
            ) from error
