"""How the values of one packed database are packed, and the reserved entry that says so.

    a value                                          the reserved entry's value
    +--------+-----------+-------------+---------+   +----------+-----+------+--------------------+-----------+
    | slot   | checksum  | raw size    | payload |   | magic    | u32 | JSON | dictionaries,      | checksum  |
    | 1 byte | 4 bytes   | LEB128      |         |   | 8 bytes  |     |      | table of raw sizes | 8 bytes   |
    +--------+-----------+-------------+---------+   +----------+-----+------+--------------------+-----------+
               of the     only if slot                           bytes of the                      XXH3 of all
               raw value  is not 0                               JSON                              before

A value may be a block of several records (kernels/coded.py draws it), under the key of the last one; its slot has
BLOCK added. The reserved entry then has the form 2, and the table of how many records each entry has.

Slot 0 is "stored as it is"; slot k > 0 is codec k - 1 of the JSON's list "codecs". All numbers are little endian.
Offsets in the JSON count from its end.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from pario.codec.base import Codec, Failures, address_of, as_bytes, longs
from pario.codec.blocks import Entries
from pario.codec.library import own_version
from pario.codec.registry import make
from pario.errors import CorruptedError, DecodeError, OptionError, VersionMismatchError
from pario.kernels import coded
from pario.kernels.sums import sum_values
from pario.records import Records
from pario.text import DAMAGED, read_json, varint

#: the first bytes of the reserved entry's value; the last one is the version of its outer form: 2 with blocks
MAGIC = b"PARIOPK\x01"
_FORMS = (1, 2)
_VERSION = 1
_NAME = b"pario-packed"
_LEAST_FILL = 4
_NONE = np.empty(0, np.int64)
#: records of a block, and bytes of a value in one
MOST_RECORDS = MOST_VALUE = 0xFFFF
#: LMDB's default limit of a key
_LONGEST_KEY = 511
_SLOTS = coded.BLOCK - 1
#: A value is stored as it is unless compressing saves this share; kernels/coded.py says the same.
_PAYS = 5


class Packing(Entries):
    """Packs and unpacks the values of one database. Threads may share it; it can be pickled.

    codecs : those of the slots from 1 on; new values are packed by the first
    sizes : i64[n], the values' raw sizes in key order; empty while packing
    more : further entries of the JSON, such as "prediction"
    parts : further bytes beside the dictionaries, by name
    """

    def __init__(
        self, codecs: Sequence[Codec], sizes: np.ndarray | None = None, *, more: dict[str, Any] | None = None
    ) -> None:
        if len(codecs) > _SLOTS:
            raise OptionError(f"a packed database has at most {_SLOTS} codecs, got {len(codecs)}")
        self.codecs = list(codecs)
        self.more = dict(more or {})
        self.parts: dict[str, bytes] = {}
        self._sizes = None if sizes is None else longs(sizes)
        self._table: tuple[bytes, int, str] | None = None  # deflated sizes, how many, dtype
        # Contexts of threads that unpacked: taking them from the codecs anew takes longer than unpacking a small value.
        self._idle: list[tuple[np.ndarray, ExitStack]] = []  # append and pop are atomic

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_idle": []}

    def __repr__(self) -> str:
        return f"<Packing {', '.join(map(str, self.codecs)) or 'raw'}>"

    # -- how much it holds ---------------------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """Records of the database, without the reserved entry."""
        return self._table[1] if self._sizes is None and self._table else len(self.sizes)

    @property
    def sizes(self) -> np.ndarray:
        """i64[n], bytes. Raises CorruptedError if the table is damaged."""
        if self._sizes is None:
            self._sizes = _inflated(*self._table, "sizes") if self._table else np.zeros(0, np.int64)
        return self._sizes

    @sizes.setter
    def sizes(self, sizes: np.ndarray) -> None:
        self._sizes, self._table = longs(sizes), None

    # -- the reserved entry --------------------------------------------------------------------------------------------

    def entry(self) -> bytes:
        """The reserved entry's value."""
        parts: list[bytes] = []

        def kept(part: bytes) -> list[int]:
            parts.append(part)
            return [sum(map(len, parts[:-1])), len(part)]

        codecs = [c.describe() | {"dictionary": kept(c.dictionary) if c.dictionary else None} for c in self.codecs]
        dtype = "<u4" if not len(self.sizes) or int(self.sizes.max()) <= coded.MOST else "<u8"
        table = [*kept(_deflated(self.sizes, dtype)), "deflate", dtype]
        said = self.more | {"version": _VERSION, "codecs": codecs, "records": len(self.sizes), "sizes": table}
        said.setdefault("pario", own_version() or "unknown")
        magic = MAGIC
        if self.counts is not None:
            magic = MAGIC[:-1] + bytes(_FORMS[1:])
            said |= {"entries": len(self.counts), "counts": [*kept(_deflated(self.counts, "<u4")), "deflate", "<u4"]}
        if self.parts:
            said["parts"] = {name: kept(part) for name, part in self.parts.items()}
        text = json.dumps(said, separators=(",", ":"), sort_keys=True).encode()
        whole = magic + struct.pack("<I", len(text)) + text + b"".join(parts)
        return whole + struct.pack("<Q", _sum(whole))

    @classmethod
    def from_entry(cls, value: Any) -> Packing:
        """From the reserved entry's value.

        Raises CorruptedError for damage, VersionMismatchError for a newer form, OptionError for a codec that this
        pario does not have, or whose package is missing.
        """
        return cls._from_parts(*_read_entry(as_bytes(value).tobytes()))

    @classmethod
    def _from_parts(cls, said: dict[str, Any], parts: bytes) -> Packing:
        with _believing("reserved entry"):
            codecs = [
                (str(one["name"]), one.get("level"), one.get("options", {}), _part(parts, one["dictionary"] or [0, 0]))
                for one in said["codecs"]
            ]
            table = _table(said, parts, "sizes", "records")
            named = {str(name): _part(parts, where) for name, where in said.get("parts", {}).items()}
            if sum(map(len, named.values())) > len(parts):
                raise ValueError("parts that overlap")
        known = ("version", "codecs", "records", "sizes", "parts", "entries", "counts")
        with _believing("reserved entry", (TypeError, OverflowError, RecursionError)):  # what levels and options may be
            tools = [make(name, level, part, **options) for name, level, options, part in codecs]
        made = cls(tools, more={name: value for name, value in said.items() if name not in known})
        made.parts = named
        made._table = table
        made.counts = _counts(said, parts)
        return made

    # -- packing -------------------------------------------------------------------------------------------------------

    def pack(self, value: Any) -> bytes:
        """Header and payload of one value; raw where compressing saves less than 3 %."""
        data = as_bytes(value)
        zero = np.zeros(1, np.int64)
        packed, _, nbytes = self.pack_many(Records(zero, data, zero, np.array([len(data)], np.int64)))
        return packed[: int(nbytes[0])].tobytes()

    def pack_many(self, records: Records) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(u8[...], starts i64[n], nbytes i64[n]): the packed values, and where they lie, one after the other.

        Without the GIL for nearly all of the work where the codec has a C library.
        """
        n = len(records)
        first = longs(records.nbytes)
        largest = int(first.max()) if n else 0
        # More than what the values need raw: a codec writes a little more than that before it is found not to pay.
        out = np.empty(int(first.sum()) + 2 * coded.FIXED * n + largest + (largest >> 6) + 1024, np.uint8)
        starts, nbytes = np.zeros(n, np.int64), np.zeros(n, np.int64)
        with ExitStack() as stack:
            how = stack.enter_context(self.codecs[0].encoding()) if self.codecs else np.zeros(coded.HOW, np.int64)
            if self.codecs and how[coded.KIND] == coded.PYTHON and self.codecs[0].name != "raw":
                return self._pack_by_package(records)
            row = coded.pack_values(
                how, 1, address_of(records.data), records.data.nbytes, longs(records.starts), first,
                address_of(out), len(out), starts, nbytes,
            )  # fmt: skip
        if row < 0:
            raise OptionError(f"value {-1 - row} does not lie inside of the memory that it should come from")
        return out[:row], starts, nbytes

    def pack_entries(
        self, records: Records, keys: Sequence[bytes], counts: np.ndarray
    ) -> tuple[list[bytes], np.ndarray, np.ndarray]:
        """(keys, u8[...], nbytes i64[m]) of m entries of counts[i] records each: as `pack_many`, blocks among them."""
        nbytes, key_nbytes = longs(records.nbytes), np.fromiter(map(len, keys), np.int64, len(keys))
        out, sizes = np.empty(int(nbytes.sum() + key_nbytes.sum()) + 8 * len(keys), np.uint8), np.empty_like(counts)
        known = np.frombuffer(b"".join(keys), np.uint8)
        coded.join_blocks(counts, known, key_nbytes, as_bytes(records.data), longs(records.starts), nbytes, out, sizes)
        blocks = Records(np.arange(len(counts)), out, np.cumsum(sizes) - sizes, sizes)
        packed, starts, packed_nbytes = self.pack_many(blocks)
        packed = packed if packed.flags.writeable else packed.copy()
        packed[starts[counts > 1]] += coded.BLOCK
        return [keys[i] for i in (np.cumsum(counts) - 1).tolist()], packed, packed_nbytes

    def _pack_by_package(self, records: Records) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sums = np.zeros(len(records), np.uint64)
        sum_values(as_bytes(records.data), longs(records.starts), longs(records.nbytes), sums)
        parts, codec = [], self.codecs[0]
        for value, total in zip(records, sums & np.uint64(coded.MOST), strict=True):
            n = len(value)
            payload = codec.encode(value) if 0 < n <= codec.most else None
            size = varint(n)
            pays = payload is not None and len(size) + len(payload) <= n - (n >> _PAYS) and len(size) + len(payload) < n
            if payload is not None and n > coded.TIMES * (coded.FIXED + len(size) + len(payload)) + coded.MORE:
                pays = False
            head = bytes([int(pays)]) + int(total).to_bytes(4, "little")
            parts.append(head + size + payload if payload is not None and pays else head + value.tobytes())
        nbytes = np.array([len(part) for part in parts], np.int64)
        return np.frombuffer(b"".join(parts), np.uint8), np.cumsum(nbytes) - nbytes, nbytes

    # -- unpacking -----------------------------------------------------------------------------------------------------

    def raw_nbytes(self, records: Records) -> np.ndarray:
        """i64[n]: the values' sizes as their headers say; -1 where there is no header."""
        sizes = np.empty(len(records), np.int64)
        starts, nbytes = longs(records.starts), longs(records.nbytes)
        coded.raw_sizes(address_of(records.data), records.data.nbytes, starts, nbytes, sizes)
        return sizes

    def unpack(
        self,
        records: Records,
        out: np.ndarray,
        starts: np.ndarray,
        nbytes: np.ndarray | None = None,
        ordinals: np.ndarray | None = None,
    ) -> Failures:
        """Write the value of record i to `out` from starts[i] on, and nothing elsewhere; compare its checksum.

        Without the GIL for nearly all of the work. Never raises for bad data: returns the rows that failed; their
        content is undefined.

        out : u8[...], contiguous; starts : i64[n]
        nbytes : i64[n], the sizes of the table of sizes: a value with another one fails. None: as the headers say; a
            damaged header may then overwrite other rows of `out`. -1: as this value's header says, likewise.
        ordinals : as `self.ordinals` says; None: no record is in a block
        """
        n = len(records)
        codes, starts = np.empty(n, np.int64), longs(starts)
        expected = np.full(n, -1, np.int64) if nbytes is None else longs(nbytes)
        inside = _NONE if ordinals is None else longs(ordinals)
        with self._decoding() as hows:
            failed = coded.unpack_values(
                hows, address_of(records.data), records.data.nbytes, longs(records.starts), longs(records.nbytes),
                address_of(out, written=True), out.nbytes, starts, expected, inside, codes,
            )  # fmt: skip
        if not failed:
            return []
        why = dict[int, str]()
        for row in np.flatnonzero((codes[: len(inside)] == coded.LATER) & (inside >= 0)).tolist():
            to = out[starts[row] :]
            codes[row], why[row] = self._unpack_within(records[row], int(inside[row]), to, expected[row])
        if (codes == coded.LATER).any():
            why |= self._unpack_by_packages(records, out, starts, codes)
        return [(int(i), why.get(int(i), coded.WRONG[codes[i]])) for i in np.flatnonzero(codes != coded.OK)]

    def unpack_rows(
        self, records: Records, form: np.ndarray, which: np.ndarray, rows: np.ndarray, edges: np.ndarray,
        kept: np.ndarray, spare: np.ndarray,
    ) -> np.ndarray | None:  # fmt: skip
        """Unpack values that contain a row of an array, as `kernels.coded.unpack_rows` says, which has all but
        `records` from here: i64[n] codes, or None if all are OK. Those with the code FORM or LATER are to be unpacked
        by `unpack`."""
        codes = np.empty(len(records), np.int64)
        with self._decoding() as hows:
            failed = coded.unpack_rows(
                hows, address_of(records.data), records.data.nbytes, longs(records.starts), longs(records.nbytes),
                form, which, rows, edges, kept, spare, codes,
            )  # fmt: skip
        return codes if failed else None

    @contextmanager
    def _decoding(self) -> Iterator[np.ndarray]:
        """How the codecs of all slots are called: i64[slots, HOW], of one thread until the end."""
        try:
            hows, stack = self._idle.pop()
        except IndexError:
            stack, hows = ExitStack(), np.zeros((1 + len(self.codecs), coded.HOW), np.int64)
            hows[0, coded.KIND] = coded.RAW
            for slot, codec in enumerate(self.codecs, 1):
                hows[slot] = stack.enter_context(codec.decoding())
        try:
            yield hows
        finally:
            self._idle.append((hows, stack))

    def _unpack_by_packages(
        self, records: Records, out: np.ndarray, starts: np.ndarray, codes: np.ndarray
    ) -> dict[int, str]:
        """Decode what no C function could; writes the rows' codes, and returns further words."""
        rows = np.flatnonzero(codes == coded.LATER)
        sizes, why = self.raw_nbytes(records), dict[int, str]()
        firsts, ends = longs(records.starts), longs(records.starts) + longs(records.nbytes)
        slots = records.data[firsts[rows]]
        for slot in np.unique(slots):
            mine = rows[slots == slot]
            heads = firsts[mine] + coded.FIXED + _leb_bytes(sizes[mine])
            part = Records(mine, records.data, heads, ends[mine] - heads)
            codes[mine] = coded.OK
            for k, reason in self.codecs[int(slot) - 1].decode_by_package(part, out, starts[mine], sizes[mine]):
                codes[mine[k]] = coded.LATER
                why[int(mine[k])] = reason
        coded.check_values(address_of(records.data), firsts, rows, address_of(out), starts, sizes, codes)
        return why

    def _unpack_within(self, block: np.ndarray, ordinal: int, out: np.ndarray, expected: int) -> tuple[int, str]:
        """(code, why) of a value in a block, which is written to `out`; by a package. expected : bytes, or -1"""
        try:
            value = self.value(block, ordinal)
        except DecodeError as error:
            return coded.BAD, error.what
        if len(value) > len(out) or expected not in (-1, len(value)):
            return coded.SIZE, coded.WRONG[coded.SIZE]
        out[: len(value)] = np.frombuffer(value, np.uint8)
        return coded.OK, ""

    def unpack_one(self, value: Any, most: int = coded.MOST) -> bytes:
        """The raw value, which has `most` bytes at most. Raises DecodeError."""
        data = as_bytes(value)
        zero = np.zeros(1, np.int64)
        records = Records(zero, data, zero, np.array([len(data)], np.int64))
        size = int(self.raw_nbytes(records)[0])
        if size > most:
            raise DecodeError(f"a packed value says that it has {size:,} bytes, and {most:,} are the most")
        out = np.empty(max(size, 0), np.uint8)
        failures = self.unpack(records, out, zero)
        if failures:
            raise DecodeError(f"a packed value of {len(data):,} bytes cannot be unpacked: {failures[0][1]}")
        return out.tobytes()


_LOST = "Its dictionaries and sizes are there alone: restore the file from a copy, or pack the source again"


def _sum(data: bytes) -> int:
    out, zero = np.zeros(1, np.uint64), np.zeros(1, np.int64)
    sum_values(np.frombuffer(data, np.uint8), zero, np.array([len(data)], np.int64), out)
    return int(out[0])


def _read_entry(whole: bytes) -> tuple[dict[str, Any], bytes]:
    """What a reserved entry says, and its parts. Raises CorruptedError, VersionMismatchError."""
    if len(whole) < len(MAGIC) + 12 or whole[:7] != MAGIC[:7]:
        raise CorruptedError("the reserved entry of a packed database does not begin as it should", hint=_LOST)
    if whole[7] not in _FORMS:
        raise VersionMismatchError(f"packed by a newer pario: form {whole[7]} of the reserved entry")
    if struct.unpack("<Q", whole[-8:])[0] != _sum(whole[:-8]):
        raise CorruptedError("the reserved entry of a packed database is damaged: its checksum differs", hint=_LOST)
    with _believing("reserved entry"):
        (length,) = struct.unpack_from("<I", whole, len(MAGIC))
        head = len(MAGIC) + 4
        said = read_json(whole[head : head + length])
        parts = whole[head + length : -8]
        version = said["version"]
    if version != _VERSION:
        raise VersionMismatchError(f"packed by a newer pario: version {version} of the reserved entry")
    return said, parts


def counts_in(entry: bytes) -> np.ndarray | None:
    """i64[entries], how many records each entry of a database has, by its reserved entry; None: one each. Raises
    CorruptedError, VersionMismatchError."""
    if entry[len(MAGIC) - 1 : len(MAGIC)] == MAGIC[-1:]:  # most have no blocks: nothing more is read of them
        return None
    return _counts(*_read_entry(entry))


def _counts(said: dict[str, Any], parts: bytes) -> np.ndarray | None:
    if "counts" not in said:
        return None
    with _believing("reserved entry"):
        counts, n = _inflated(*_table(said, parts, "counts", "entries"), "counts"), int(said["records"])
        if (counts < 1).any() or (counts > MOST_RECORDS).any() or int(counts.sum()) != n:
            raise ValueError(f"{int(counts.sum()):,} records in {len(counts):,} entries, and there are {n:,}")
    return counts


@contextmanager
def _believing(what: str, damaged: tuple[type[Exception], ...] = DAMAGED) -> Iterator[None]:
    """What is wrong with a part that anybody may have written is a CorruptedError. damaged : what says so"""
    try:
        yield
    except damaged as error:
        raise CorruptedError(f"the {what} of a packed database is damaged: {error}", hint=_LOST) from None


def _table(said: dict[str, Any], parts: bytes, name: str, rows: str) -> tuple[bytes, int, str]:
    """(deflated numbers, how many, dtype) of a table of the reserved entry. Raises ValueError and the like."""
    first, length, how, dtype = said[name]
    if how != "deflate" or dtype not in ("<u4", "<u8") or int(said[rows]) < 0:
        raise ValueError(f"a table of {name} in the form {how} {dtype}")
    return _part(parts, [first, length]), int(said[rows]), dtype


def inflated(part: bytes, most: int) -> bytes:
    """What a part of the reserved entry inflates to. Raises ValueError if it is damaged, or if that is more than `most`
    bytes: anybody may have written it, and a few bytes can say that they are terabytes."""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(part, most + 1)
    except zlib.error as e:
        raise ValueError(str(e)) from None
    if len(found) > most:
        raise ValueError(f"it inflates to more than {most:,} bytes")
    if not stream.eof or stream.unused_data:
        raise ValueError("it ends too early, or bytes follow its end")
    return found


def _part(parts: bytes, where: Sequence[int]) -> bytes:
    first, length = where
    if not 0 <= first <= len(parts) - length or length < 0:
        raise ValueError(f"bytes {first} to {first + length} of {len(parts)}")
    return parts[first : first + length]


def _deflated(sizes: np.ndarray, dtype: str) -> bytes:
    """Differences from one size to the next: of values of one size almost nothing is left."""
    numbers = sizes.astype(dtype)
    numbers[1:] -= numbers[:-1].copy()
    return zlib.compress(numbers.tobytes(), 6)


def _inflated(table: bytes, n: int, dtype: str, what: str) -> np.ndarray:
    wanted = n * np.dtype(dtype).itemsize
    with _believing(f"table of {what}", (ValueError, OverflowError)):
        data = inflated(table, wanted)
        if len(data) != wanted:
            raise ValueError(f"{len(data):,} bytes instead of {wanted:,}")
    return np.cumsum(np.frombuffer(data, dtype), dtype=dtype).astype(np.int64)


def _leb_bytes(numbers: np.ndarray) -> np.ndarray:
    """i64[n]: bytes of each number as `varint` writes it."""
    bounds = np.int64(1) << np.arange(7, 63, 7, dtype=np.int64)
    return 1 + np.searchsorted(bounds, numbers, side="right")


# -- the reserved key --------------------------------------------------------------------------------------------------


def reserved_key(
    last: bytes | None = None, *, integer: int = 0, reverse: bool = False, longest: int = _LONGEST_KEY
) -> bytes:
    """The key of the reserved entry, which sorts behind every other key.

    last : the last key of the database, in its own order; None: it is empty
    integer : bytes of the keys of an MDB_INTEGERKEY database, 4 or 8; 0: it is none
    reverse : MDB_REVERSEKEY
    longest : bytes of the longest key that this LMDB takes

    Raises OptionError if there is no such key.
    """
    if integer:
        key = b"\xff" * integer
        if last == key:
            raise OptionError(f"the largest key, {key.hex()}, is taken, and pario needs it for the reserved entry")
        return key
    before = b"" if last is None else last[::-1] if reverse else last
    for fill in range(_LEAST_FILL, longest - len(_NAME) + 1):
        key = b"\xff" * fill + _NAME
        if key > before:
            return key[::-1] if reverse else key
    raise OptionError(f"no key of at most {longest} bytes sorts behind the last one, {before[:16].hex()}...")


def is_reserved_key(key: bytes, *, integer: bool = False, reverse: bool = False) -> bool:
    """Whether a key has the form of `reserved_key`; the value decides whether the entry is one."""
    key = bytes(key)
    if integer:
        return len(key) in (4, 8) and key == b"\xff" * len(key)
    if reverse:
        key = key[::-1]
    fill = len(key) - len(_NAME)
    return fill >= _LEAST_FILL and key == b"\xff" * fill + _NAME
