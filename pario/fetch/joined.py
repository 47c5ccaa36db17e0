"""Several files as one space of addresses: a record may lie in any of them, and its extent stays at 16 bytes.

    file 0          file 1                  file 2
    |===========|   |===================|   |=====|
    bases[0] = 0    bases[1]                bases[2]        multiples of a chunk's size

An address is the offset in a file plus the file's base. Extents, the planning of reads and the ring work with addresses
and need not know of files; reads are divided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from pario.fetch.base import Fetcher, OneFile
from pario.fetch.checked import NONE_SEEN, Checked
from pario.records import EXTENT, Records

#: Files begin at multiples of this: a chunk of a tier lies in one file; pages and O_DIRECT's blocks begin where they
#: would.
_UNIT = 1 << 20
#: More files than this are not all named in a message.
_NAMED = 3


def bases_of(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """i64[files], the address at which each of the files with these sizes in bytes begins."""
    room = -(-np.array(sizes, np.int64) // _UNIT) * _UNIT
    return np.cumsum(room) - room


def joined_name(paths: Sequence[str]) -> str:
    """What stands for these files in messages."""
    if len(paths) <= _NAMED:
        return ", ".join(paths)
    return f"{paths[0]}, ..., {paths[-1]} ({len(paths)} files)"


class JoinedFetcher(Fetcher):
    """Reads from several files. Errors name the file, and the offset in it.

    files : fetchers of one file each, at least one; they are closed with this
    sizes : in bytes, of all that is addressed; None: as the files were when they were opened. All ranks must take the
        same ones, as the addresses follow from them

    Attributes
    ----------
    bases : i64[files], the address at which each begins
    """

    def __init__(self, files: Sequence[OneFile], sizes: Sequence[int] | None = None) -> None:
        self._files = tuple(files)
        lengths = np.array([file.nbytes for file in self._files] if sizes is None else sizes, np.int64)
        self.bases = bases_of(lengths)
        self.path = joined_name([file.path for file in self._files])
        self.nbytes = int(self.bases[-1] + lengths[-1])
        self.align = max(file.align for file in self._files)
        self.limited = any(file.limited for file in self._files)
        self.watched = any(file.watched for file in self._files)
        self._ends = self.bases + -(-lengths // self.align) * self.align

    @property
    def files(self) -> tuple[OneFile, ...]:
        return self._files

    def file_of(self, addresses: np.ndarray) -> np.ndarray:
        return _file_of(self.bases, addresses)

    def pread(self, offset: int, nbytes: int) -> bytes:
        number = int(self.file_of(np.array([offset]))[0])
        return self._files[number].pread(offset - int(self.bases[number]), nbytes)

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        begins, ends = reads["offset"], reads["offset"] + reads["nbytes"]
        first, last = self.file_of(begins), self.file_of(ends - 1)
        inside = first == last
        if not inside.all():
            self._read_across(reads[~inside], out, starts[~inside])
            reads, starts, first = reads[inside], starts[inside], first[inside]
        order = np.argsort(first, kind="stable")
        own, starts = reads[order], starts[order]
        own["offset"] -= self.bases[first[order]]
        for number, mine in _runs(first[order]):
            self._files[number].read(own[mine], out, starts[mine])

    def _read_across(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        """Reads that begin in one file and end in another one."""
        begins, ends = reads["offset"], reads["offset"] + reads["nbytes"]
        first, last = self.file_of(begins), self.file_of(ends - 1)
        for number in range(int(first.min()), int(last.max()) + 1):
            base = self.bases[number]
            begin = np.where(first < number, base, begins)
            stop = np.where(last > number, self._ends[number], ends)
            mine = np.flatnonzero((first <= number) & (number <= last) & (begin < stop))
            part = np.empty(len(mine), EXTENT)
            part["offset"], part["nbytes"] = begin[mine] - base, (stop - begin)[mine]
            self._files[number].read(part, out, (starts + begin - begins)[mine])

    def read_now(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> np.ndarray:
        there = np.zeros(len(reads), bool)
        numbers = self.file_of(reads["offset"])
        inside = np.flatnonzero(numbers == self.file_of(reads["offset"] + reads["nbytes"] - 1))
        for number in np.unique(numbers[inside]):
            mine = inside[numbers[inside] == number]
            own = reads[mine]
            own["offset"] -= self.bases[number]
            there[mine] = self._files[number].read_now(own, out, np.asarray(starts)[mine])
        return there

    def close(self) -> None:
        for file in self._files:
            file.close()


class JoinedChecked(Checked):
    """The checks of several files, of which each one has its own snapshot, page size and trust. Errors name the file,
    and the page and offset in it.

    files : of each file
    bases : i64[files], the address at which each begins
    """

    def __init__(self, files: Sequence[Checked], bases: np.ndarray) -> None:
        self.nodes = any(file.nodes for file in files)
        self._files = tuple(files)
        self._bases = bases
        #: one of them, if all need the same bytes besides a value
        self._alike = files[0] if len({file.shape for file in files}) == 1 else None

    def snapshot(self) -> None:
        for file in self._files:
            file.snapshot()

    def spans(self, offsets: np.ndarray, nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._alike is not None:  # files begin at multiples of the largest page
            return self._alike.spans(offsets, nbytes)
        order, numbers, own = _by_file(self._bases, offsets)
        begins, lengths, sizes = np.empty_like(offsets), np.empty_like(nbytes), nbytes[order]
        for number, mine in _runs(numbers):
            begin, lengths[order[mine]] = self._files[number].spans(own[mine], sizes[mine])
            begins[order[mine]] = begin + self._bases[number]
        return begins, lengths

    def records(self, records: Records, offsets: np.ndarray) -> None:
        for file, part, own in self._divided(records, offsets):
            file.records(part, own)

    def in_copy(self, records: Records, offsets: np.ndarray, seen: np.ndarray = NONE_SEEN) -> None:
        # In "global" order a batch has records of many files. (256 records of 3 KB out of 42: 580 us a batch, so 340;
        # out of one 300.)
        if len(seen) and (seen[records.ids >> 3] >> (records.ids & 7) & 1).all():
            return
        for file, part, own in self._divided(records, offsets):
            file.in_copy(part, own, seen)

    def _divided(self, records: Records, offsets: np.ndarray) -> Iterator[tuple[Checked, Records, np.ndarray]]:
        """The checks of each file, those of the records that lie in it, and their offsets there."""
        order, numbers, own = _by_file(self._bases, offsets)
        for number, mine in _runs(numbers):
            which = order[mine]
            ids, starts, nbytes = records.ids[which], records.starts[which], records.nbytes[which]
            yield self._files[number], Records(ids, records.data, starts, nbytes), own[mine]


def _by_file(bases: np.ndarray, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(order, numbers, offsets), each i64[n]: the addresses put in the order of their files, the file of each one then,
    and its offset there."""
    numbers = _file_of(bases, addresses)
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    return order, numbers, addresses[order] - bases[numbers]


def _runs(numbers: np.ndarray) -> Iterator[tuple[int, slice]]:
    """(a number, where it stands) for each run of equal numbers."""
    if len(numbers):
        cuts = (np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()
        for first, stop in pairwise([0, *cuts, len(numbers)]):
            yield int(numbers[first]), slice(first, stop)


def _file_of(bases: np.ndarray, addresses: np.ndarray) -> np.ndarray:
    return np.maximum(np.searchsorted(bases, addresses, side="right") - 1, 0)
