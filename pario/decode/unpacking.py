"""Values as they were before `python -m pario data pack`: sizes and bytes of records, whichever file they lie in.

    stored    header, packed bytes          what the store, the tiers and the ring hold
    raw       the value                     what decoders see

`codec/packing.py` knows one database. Here the records of several come together, of which some may be packed, each with
codecs of its own, and others not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pario.decode.base import Failures, columns
from pario.errors import DecodeError
from pario.kernels.coded import FORM, LATER, OK, TABLE, TIMES, WRONG
from pario.kernels.pack import copy_ranges
from pario.records import Records

if TYPE_CHECKING:
    from pario.codec.packing import Packing

#: Unpacked values begin at multiples of this many bytes.
ALIGN = 16
#: A header is believed that says at most TIMES the packed bytes, and this many more.
_SMALL = 64 << 10
#: The reason where nothing more is known: `Packing.raw_nbytes` found no size that makes sense.
BAD = "the header of the packed value is damaged"


class Unpacking:
    """Unpacks records of one file, or of several. Any thread.

    packings : of each file; None: its values are not packed
    starts : the first record of each
    has_blocks : records of one share their bytes with others
    """

    def __init__(self, packings: Sequence[Packing | None], starts: Sequence[int]) -> None:
        self.packings = tuple(packings)
        self._starts = np.array(starts, np.int64)
        self.has_blocks = any(packing is not None and packing.counts is not None for packing in packings)

    def __repr__(self) -> str:
        return f"Unpacking({', '.join(map(repr, self.packings))})"

    def raw_nbytes(self, records: Records) -> np.ndarray:
        """i64[n]: bytes of the values, as their headers say; -1 where a header is damaged."""
        raw = np.array(records.nbytes, np.int64)
        for packing, rows in self._by_file(records.ids):
            if packing is not None:
                raw[rows] = packing.raw_nbytes(_rows(records, rows))
                own, ordinals = self._within(packing, _of(records.ids, rows))
                if ordinals is not None:  # not the bytes of the block, which a damaged header says, but the value's own
                    sizes = np.where(ordinals < 0, raw[rows], packing.sizes[own])
                    raw[rows] = np.where(sizes <= raw[rows], sizes, -1)
        # Nobody gets memory for a size that only a damaged header says. (Ratios like these are rare: a look at the
        # table of sizes, which is unpacked for it.)
        odd = raw > TIMES * records.nbytes + _SMALL
        if odd.any():
            rows = np.flatnonzero(odd)
            wrong = rows[raw[rows] != self.sizes(np.asarray(records.ids)[rows], raw[rows])]
            raw[wrong] = -1
        return raw

    def unpack(self, records: Records, raw: np.ndarray, out: np.ndarray, starts: np.ndarray) -> Failures:
        """out[starts[i] : starts[i] + raw[i]] = value i. Returns the rows that failed; their bytes are undefined.

        raw : i64[n], as `raw_nbytes` says: rows with -1 fail, and nothing is written for them; out : u8[...]
        starts : i64[n]
        """
        damaged = raw < 0
        if damaged.any():
            # Their headers may still name a size, for which nobody has made room: it would be the neighbours'.
            sound = np.flatnonzero(~damaged)
            failures = self.unpack(_rows(records, sound), raw[sound], out, np.asarray(starts)[sound])
            bad = [(int(row), BAD) for row in np.flatnonzero(damaged)]
            return sorted(bad + [(int(sound[row]), why) for row, why in failures])
        failures = []
        for packing, rows in self._by_file(records.ids):
            part = _rows(records, rows)
            if packing is not None:
                wrong = packing.unpack(part, out, _of(starts, rows), _of(raw, rows), self._within(packing, part.ids)[1])
                failures += [(int(rows[row]), why) for row, why in wrong]
                continue
            data, at, nbytes, _ = columns(part)
            wanted = np.ones(len(rows), np.bool_)
            copy_ranges(data, at, nbytes, out, np.array(starts[rows], np.int64), wanted)
            failures += [(int(row), "lies outside the bytes that were read") for row in rows[~wanted]]
        return sorted(failures)

    def unpack_rows(
        self, records: Records, form: np.ndarray, rows: np.ndarray, edges: np.ndarray, kept: np.ndarray,
        spare: np.ndarray,
    ) -> tuple[Failures, list[int]]:  # fmt: skip
        """Unpack values that contain a row of an array: value i's to where row i lies, what stands before and behind it
        to edges[i], and their number to kept[i]. Returns the rows that failed, and those that `unpack` is to unpack:
        they have another size, or no C function decodes them.

        form : i64[3], bytes before a row, of a row, and at most behind it
        rows : u8[n * row], which no other thread may use; edges : u8[n, bytes before and behind]; kept : i64[n]
        spare : u8[bytes of the largest such value]
        """
        if self.has_blocks:
            return [], list(range(len(records)))
        codes = np.full(len(records), FORM, np.int64)
        for packing, mine in self._by_file(records.ids):
            if packing is not None:
                found = packing.unpack_rows(_rows(records, mine), form, mine, rows, edges, kept, spare)
                codes[mine] = OK if found is None else found
        again = (codes == FORM) | (codes == LATER)
        wrong = np.flatnonzero((codes != OK) & ~again).tolist()
        return [(row, WRONG[codes[row]]) for row in wrong], np.flatnonzero(again).tolist()

    def unpacked(self, records: Records) -> tuple[Records, Failures]:
        """The records with their values, in new memory, and (row, reason) of those that failed: they have no bytes."""
        raw = self.raw_nbytes(records)
        nbytes = np.maximum(raw, 0)
        starts, total = laid_out(nbytes)
        out = np.empty(total, np.uint8)
        failures = self.unpack(records, raw, out, starts)
        nbytes[[row for row, _ in failures]] = 0
        return Records(records.ids, out, starts, nbytes), failures

    def keys(self, records: Records, of_entries: list[bytes]) -> tuple[list[bytes], Failures]:
        """The keys of these records, and (row, reason) of those whose block cannot be unpacked.

        of_entries : the keys of the entries that they lie in, which the others have, too
        """
        keys, failures = list(of_entries), []
        for packing, rows in self._by_file(records.ids):
            ordinals = None if packing is None else self._within(packing, records.ids[rows])[1]
            if packing is None or ordinals is None:
                continue
            begin, block, why = -1, list[bytes](), ""
            for row, k in zip(rows.tolist(), ordinals.tolist(), strict=True):
                if k < 0:
                    continue
                if begin != records.starts[row]:
                    begin, why = int(records.starts[row]), ""
                    try:
                        block = packing.block(records[row], of_entries[row])[0]
                    except DecodeError as error:
                        why = error.what
                if not why and k < len(block):
                    keys[row] = block[k]
                else:
                    failures.append((row, why or WRONG[TABLE]))
        return keys, failures

    def _within(self, packing: Packing, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """(i64[m], the numbers of these records in their file, and i64[m], `packing.ordinals` of them)."""
        own = ids - self._starts[self._file_of(ids)] if packing.counts is not None else ids
        return own, packing.ordinals(own)

    def sizes(self, ids: np.ndarray, stored: np.ndarray) -> np.ndarray:
        """i64[m]: bytes of these records' values, by the tables of the reserved entries. stored : packed sizes"""
        sizes, own = np.array(stored, np.int64), ids - self._starts[self._file_of(ids)]
        for packing, mine in self._by_file(ids):
            if packing is not None:
                sizes[mine] = packing.sizes[own[mine]]
        return sizes

    def _file_of(self, ids: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._starts, ids, side="right") - 1

    def _by_file(self, ids: np.ndarray) -> list[tuple[Packing | None, np.ndarray]]:
        """(packing, rows) of the files in which these records lie; those that are not packed together."""
        if len(self.packings) == 1:
            return [(self.packings[0], np.arange(len(ids)))]
        numbers = self._file_of(ids)
        packed = [number for number in np.unique(numbers).tolist() if self.packings[number] is not None]
        found: list[tuple[Packing | None, np.ndarray]] = [
            (self.packings[number], np.flatnonzero(numbers == number)) for number in packed
        ]
        rest = np.flatnonzero(~np.isin(numbers, packed))
        return [*found, (None, rest)] if len(rest) else found


def laid_out(nbytes: np.ndarray) -> tuple[np.ndarray, int]:
    """(starts i64[n], bytes) of values that lie one after the other, each at an aligned place. nbytes : i64[n]"""
    room = -(-nbytes // ALIGN) * ALIGN
    ends = np.cumsum(room)
    return ends - room, int(ends[-1]) if len(ends) else 0


def _rows(records: Records, rows: np.ndarray) -> Records:
    if len(rows) == len(records):
        return records
    return Records(records.ids[rows], records.data, records.starts[rows], records.nbytes[rows])


def _of(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return values if len(rows) == len(values) else values[rows]
