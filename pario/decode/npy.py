"""NumPy's own files in records: .npy and .npz, read without ever unpickling.

A .npy file is a header (a Python literal with dtype, order and shape) and the numbers. Records of one dtype and shape
mostly have the same header, byte for byte: their rows are copied, or read, without looking at it again.
"""

from __future__ import annotations

import ast
import io
import math
import zipfile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pario.decode.base import Draw, Failures, Verbatim, columns, flat, past_caches
from pario.decode.rows import BadValue, Column, FieldDecoder, RowDecoder, RowOptions
from pario.kernels.pack import pack_rows
from pario.records import Records

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MAGIC = b"\x93NUMPY"
#: The longest header that is read, in bytes; NumPy's own limit is 10,000.
_LONGEST = 10_000


class NpySpec(NamedTuple):
    """column : of the array. header : record 0's bytes before its numbers, if its rows are copied as they are"""

    column: Column
    header: bytes


def array_of(data: np.ndarray) -> tuple[np.ndarray, int]:
    """(the array, bytes of the header) of a .npy file u8[k]; a view. Raises BadValue."""
    head = data[:12].tobytes()
    if not head.startswith(_MAGIC):
        raise BadValue("it does not begin as a .npy file does")
    if len(head) < 12:
        raise BadValue("the header is cut off")
    wide = head[6] > 1
    if head[6] not in (1, 2, 3):
        raise BadValue(f"version {head[6]} of the .npy format is unknown")
    length = int.from_bytes(head[8:12] if wide else head[8:10], "little")
    begin = (12 if wide else 10) + length
    if length > _LONGEST or begin > len(data):
        raise BadValue(f"a header of {length:,} bytes in a record of {len(data):,}")
    dtype, fortran, shape = _header(data[begin - length : begin].tobytes())
    want, got = math.prod(shape) * dtype.itemsize, len(data) - begin
    if want != got:
        raise BadValue(f"{dtype}{list(shape)} are {want:,} bytes, the record has {got:,}")
    array = data[begin:].view(dtype) if got else np.empty(0, dtype)
    return array.reshape(shape, order="F" if fortran else "C"), begin


def _header(text: bytes) -> tuple[np.dtype, bool, tuple[int, ...]]:
    if b"\\" in text:  # NumPy writes none, and Python would warn of those that mean nothing
        raise BadValue("the header is no description of an array")
    try:
        said = ast.literal_eval(text.decode("latin1").strip())
        descr, fortran, shape = said["descr"], said["fortran_order"], said["shape"]
        dtype = np.lib.format.descr_to_dtype(descr)
    except Exception as error:  # a hostile literal may raise anything, RecursionError and MemoryError among it
        raise BadValue(f"the header is no description of an array: {type(error).__name__}") from error
    if dtype.hasobject:
        raise BadValue("the array holds Python objects as a pickle, which pario does not load here")
    if not dtype.itemsize or not isinstance(fortran, bool) or not isinstance(shape, tuple) or len(shape) > 32:
        raise BadValue(f"the header is no description of an array: {descr!r:.60}, {shape!r:.60}")
    if any(type(k) is not int or not 0 <= k < 1 << 62 for k in shape):
        raise BadValue(f"the header is no description of an array: shape {shape!r:.60}")
    return dtype, fortran, shape


class Npy(RowDecoder):
    """{"data": [b, ...]} from records that are .npy files. Never unpickles.

    Parameters
    ----------
    ragged : None, "flat", "pad" or "list"
        None: every record has the dtype and shape of record 0. Else: see docs/decoders.md.
    pad_value, pad_multiple : number, int
        Of "pad": what fills the rest, and what the first axis is a multiple of.
    """

    spec: Any

    def value(self, record: np.ndarray, number: int, draw: Draw, key: bytes) -> Any:
        return array_of(record)[0]

    def learn_at(self, record: np.ndarray, number: int, draw: Draw) -> Any:
        column = super().learn_at(record, number, draw)["data"]
        array, begin = array_of(record)
        plain = not column.ragged and not self.optional and array.flags.c_contiguous and array.size > 0
        self.spec = NpySpec(column, record[:begin].tobytes() if plain else b"")
        return self.spec

    def _columns(self) -> dict[str, Column]:
        return {"data": self._learnt().column}

    @property
    def copies(self) -> bool:  # type: ignore[override]
        return self.verbatim() is not None and type(self).decode is Npy.decode

    def verbatim(self) -> Verbatim | None:
        header = self._learnt().header
        return Verbatim("data", len(header)) if header else None

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        header, rows = self._learnt().header, out["data"]
        if not header or not len(records):
            return super().decode(records, out, draw)
        data, starts, nbytes, failed = columns(records)
        want = rows[:1].nbytes
        nbytes = nbytes - len(header)
        nbytes[~self._same(records)] = -1  # no row has this size: these are left for later
        n = pack_rows(data, starts + len(header), nbytes, flat(rows), want, failed, past_caches(rows))
        return self._others(records, rows, [int(i) for i in failed[:n]])

    def decode_rest(self, records: Records, out: dict[str, np.ndarray]) -> list[int]:
        length = len(self._learnt().header)
        good = self._same(records) & (records.nbytes == length)
        return np.flatnonzero(~good).tolist()

    def _same(self, records: Records) -> np.ndarray:
        """Which records begin with record 0's header: bool[n]."""
        header = np.frombuffer(self._learnt().header, np.uint8)
        starts = np.asarray(records.starts)
        inside = (np.asarray(records.nbytes) >= len(header)) & (starts >= 0)
        inside &= starts + len(header) <= len(records.data)
        found = np.zeros(len(records), bool)
        at = starts[inside]
        found[inside] = (records.data[at[:, None] + np.arange(len(header))] == header).all(axis=1)
        return found

    def _others(self, records: Records, rows: np.ndarray, which: list[int]) -> Failures:
        """Read the records whose header is another one: it may say the same in other words."""
        failures: Failures = []
        for i in which:
            part = Records(records.ids[i : i + 1], records.data, records.starts[i : i + 1], records.nbytes[i : i + 1])
            failures += [(i, why) for _, why in super().decode(part, {"data": rows[i : i + 1]}, Draw())]
        return failures


class Npz(FieldDecoder):
    """A column for each array of records that are .npz files, compressed or not. Never unpickles.

    Parameters
    ----------
    fields : names, or name -> dtype, optional
        The arrays to read; without, those of record 0.
    ragged : None, "flat", "pad" or "list", or a dict of names with these
        None: every array has the dtype and shape that it has in record 0. Else: see docs/decoders.md.
    pad_value, pad_multiple : number, int
        Of "pad": what fills the rest, and what the first axis is a multiple of.
    optional : names, optional
        Of what records may lack: beside x comes x_there, bool[b]; see docs/decoders.md.
    most_bytes : int
        Records whose arrays would take more memory than this are bad.
    """

    parallel = True

    def __init__(self, fields: Any = "all", *, most_bytes: int = 120 << 20, **rows: Unpack[RowOptions]) -> None:
        super().__init__("all" if fields is None else fields, **rows)
        self.most_bytes = int(most_bytes)

    def value(self, record: np.ndarray, number: int, draw: Draw, key: bytes) -> dict[str, np.ndarray]:
        try:
            with zipfile.ZipFile(io.BytesIO(record.tobytes())) as archive:
                files = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                wanted = files if self.fields == "all" else [name for name in map(str, self.fields) if name in files]
                total = sum(files[name].file_size for name in wanted)
                if total > self.most_bytes:
                    raise BadValue(f"its arrays would take {total:,} bytes; most_bytes is {self.most_bytes:,}")
                return {name: _member(archive, files[name]) for name in wanted}
        except zipfile.BadZipFile as error:
            raise BadValue(f"it is no .npz file: {error}") from error

    def named(self, value: Any) -> dict[str, Any]:
        if self.fields == "all":
            return super().named(value)
        missing = [name for name in map(str, self.fields) if name not in value and name not in self.optional]
        if missing:
            raise BadValue(f"no array {missing[0]!r} in the .npz file")
        return dict(value)


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BadValue(f"{info.filename!r} is compressed in a way that NumPy does not use")
    with archive.open(info) as file:
        data = file.read(info.file_size)
    try:
        return array_of(np.frombuffer(data, np.uint8))[0]
    except BadValue as error:
        raise BadValue(f"{info.filename!r}: {error}") from error
