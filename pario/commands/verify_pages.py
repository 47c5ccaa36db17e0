"""Which page of the file belongs to what. Each belongs to one tree, to one value or to the list of free pages, and
none to two of them; a page that belongs to nothing is lost to LMDB, and harmless.

Every rank keeps one bit per page of the file for what it has seen itself; rank 0 puts the bits of all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pario.comm.base import AnyWorld
from pario.errors import CorruptedError
from pario.format.layout import NUM_METAS
from pario.format.meta import Snapshot

#: Page ranges that are used twice and explained; all are counted.
EXPLAINED = 20
#: Users of one such range that each rank names.
NAMED = 4
#: Pages of overflow runs that are marked at once.
PIECE = 1 << 20
#: Bytes of bits that rank 0 receives at once, from all ranks together.
GATHERED = 16 << 20


def runs_of(sizes: np.ndarray, most: int) -> Iterator[slice]:
    """Neighbours that have `most` together, or one of them alone that has more. sizes : i64[k]"""
    ends, at = np.cumsum(sizes), 0
    while at < len(ends):
        done = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, done + most, side="right")))
        yield slice(at, stop)
        at = stop


class PageSet:
    """A set of page numbers below `n`: one bit each."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.bits = np.zeros(-(-n // 8), np.uint8)

    def has(self, pages: np.ndarray) -> np.ndarray:
        """bool[k]; pages : i64[k], all below n"""
        return self.bits[pages >> 3] & _bit(pages) != 0

    def add(self, pages: np.ndarray) -> np.ndarray:
        """Add pages (i64[k], all below n); returns bool[k], whether each one is new here."""
        new = ~self.has(pages)
        order = np.argsort(pages, kind="stable")
        ordered = pages[order]
        new[order[1:][ordered[1:] == ordered[:-1]]] = False
        np.bitwise_or.at(self.bits, pages >> 3, _bit(pages))
        return new

    def count(self) -> int:
        step = 1 << 20
        return sum(int(np.unpackbits(self.bits[at : at + step]).sum()) for at in range(0, len(self.bits), step))

    def ranges(self) -> np.ndarray:
        """i64[m, 2]: the first page of each unbroken range of members, and the page behind its last."""
        edges: list[np.ndarray] = []
        before = np.zeros(1, np.uint8)
        step = 1 << 20
        for at in range(0, len(self.bits), step):
            members = np.unpackbits(self.bits[at : at + step], bitorder="little")
            edges.append(np.flatnonzero(np.diff(members, prepend=before)) + 8 * at)
            before = members[-1:]
        if before[0]:
            edges.append(np.array([8 * len(self.bits)]))
        return np.concatenate([np.empty(0, np.int64), *edges]).astype(np.int64).reshape(-1, 2)


def _bit(pages: np.ndarray) -> np.ndarray:
    return np.left_shift(1, pages & 7).astype(np.uint8)


class Claim(NamedTuple):
    """Pages that things of one kind take: item i takes `counts[i]` pages from page `pages[i]` on.

    what : "a leaf page of the main database", "the value of record {} of ..."
    pages : i64[k]
    counts : of pages that each claims, needs : that it would need; None: one each
    records : i64[k], the record that each belongs to, or None
    """

    what: str
    pages: np.ndarray
    counts: np.ndarray | None = None
    needs: np.ndarray | None = None
    records: np.ndarray | None = None


class User(NamedTuple):
    """One of those that use the same page."""

    what: str
    record: int | None
    too_long: bool


class PageUse:
    """Who uses which page. `mark` and `claim` are this rank's own affair, `twice` is collective."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        # Pages that were freed before they were ever written may lie behind the end of the file: only numbers of the
        # free list do so rightly, and `last_pgno` may be damaged.
        self._n = min(snapshot.last_pgno + 1, -(-snapshot.file_bytes // snapshot.page_size))
        self._used = PageSet(self._n)
        self._twice = PageSet(self._n)
        self._free = PageSet(self._n)
        self._unwritten: list[np.ndarray] = []
        self._claims: list[Claim] = []

    def mark(self, pages: np.ndarray) -> np.ndarray:
        """Mark pages (i64[k]) as used; returns bool[k], False for those that this rank had marked before. Pages behind
        the end of the file are passed over: reading them is an error of its own."""
        inside = pages < self._n
        new = np.ones(len(pages), bool)
        new[inside] = self._used.add(pages[inside])
        self._twice.add(pages[~new])
        return new

    def mark_runs(self, pages: np.ndarray, counts: np.ndarray) -> None:
        """Mark `counts[i]` pages from `pages[i]` on, for all i."""
        for part in runs_of(counts, PIECE):
            first, many = pages[part], counts[part]
            starts = np.repeat(first - (np.cumsum(many) - many), many)
            self.mark(starts + np.arange(int(many.sum())))

    def claim(self, claim: Claim) -> None:
        """Keep who uses these pages, for the message in case somebody else does, too."""
        if len(claim.pages):
            self._claims.append(claim)

    def free(self, pages: np.ndarray) -> None:
        """These pages (i64[k], below last_pgno + 1) are in the list of free pages. On rank 0."""
        written = pages[pages < self._n]
        self._unwritten.append(pages[pages >= self._n])
        self.mark(written)
        self._free.add(written)

    def twice(self, world: AnyWorld) -> tuple[int, list[CorruptedError]]:
        """(ranges of pages that are used more than once, errors about the first of them). Collective."""
        self._put_together(world)
        found = self._twice.ranges() if world.rank == 0 else np.empty((0, 2), np.int64)
        count, ranges = world.bcast((len(found), found[:EXPLAINED]))
        shares = world.allgather([self._users(low, high) for low, high in ranges.tolist()])
        errors = []
        for k, (low, high) in enumerate(ranges.tolist()):
            users = [user for share in shares for user in share[k][1]]
            total = sum(share[k][0] for share in shares)
            errors.append(_used_twice(low, high, users, total, self._snapshot.page_size))
        return count, errors

    def totals(self) -> tuple[int, int, int]:
        """Pages of the whole file that are in use (the meta pages among them), free, and neither. On rank 0, after
        `twice`, if all trees and the list of free pages were looked at."""
        unwritten = len(np.unique(np.concatenate([np.empty(0, np.int64), *self._unwritten])))
        seen, free = self._used.count(), self._free.count()
        lost = self._snapshot.last_pgno + 1 - NUM_METAS - seen - unwritten
        return NUM_METAS + seen - free, free + unwritten, lost

    def _put_together(self, world: AnyWorld) -> None:
        """Bring all ranks' bits to rank 0. A page that two ranks have marked is used twice."""
        step = max(1, GATHERED // world.size)
        for start in range(0, len(self._used.bits), step):
            part = slice(start, start + step)
            used = world.gather_array(self._used.bits[part])
            twice = world.gather_array(self._twice.bits[part])
            if used is None or twice is None:
                continue
            both = np.bitwise_or.reduce(twice.reshape(world.size, -1), axis=0)
            union = np.zeros_like(both)
            for share in used.reshape(world.size, -1):
                both |= union & share
                union |= share
            self._used.bits[part] = union
            self._twice.bits[part] = both

    def _users(self, low: int, high: int) -> tuple[int, list[User]]:
        """(how many things on this rank use pages of [low, high), the first of them)"""
        total = 0
        users: list[User] = []
        for claim in self._claims:
            counts = np.ones(len(claim.pages), np.int64) if claim.counts is None else claim.counts
            needs = counts if claim.needs is None else claim.needs
            hits = np.flatnonzero((claim.pages < high) & (claim.pages + counts > low))
            total += len(hits)
            # What claims more than it needs comes first: its header is the likely culprit.
            for i in hits[np.argsort(needs[hits] - counts[hits], kind="stable")][:NAMED].tolist():
                record = None if claim.records is None else int(claim.records[i])
                too_long = bool(counts[i] > needs[i])
                text = claim.what.format(f"{record:,}" if record is not None else "")
                if claim.counts is not None:
                    text += f" ({_pages(int(claim.pages[i]), int(claim.pages[i] + counts[i]))}"
                    text += f", though {needs[i]:,} would do)" if too_long else ")"
                users.append(User(text, record, too_long))
        pages = np.arange(low, min(high, low + PIECE))
        if self._free.has(pages).any():
            total += 1
            users.append(User("the list of free pages", None, False))
        return total, users


def _used_twice(low: int, high: int, users: list[User], total: int, page_size: int) -> CorruptedError:
    users = sorted(users, key=lambda user: not user.too_long)[:NAMED]
    by = ", and by ".join(user.what for user in users)
    more = f", and by {total - len(users):,} more" if total > len(users) else ""
    if total == 1:  # a number that the free list holds twice
        by += " twice"
    records = [user.record for user in users if user.record is not None]
    return CorruptedError(
        f"{_pages(low, high)} used more than once: by {by}{more}",
        page=low,
        offset=low * page_size,
        record=records[0] if records else None,
    )


def _pages(low: int, high: int) -> str:
    return f"page {low:,}" if high == low + 1 else f"pages {low:,} to {high - 1:,}"
