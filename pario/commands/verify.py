"""`verify`: look at every page and every record of the newest snapshot, and say what is damaged.

Works from the file alone, in Python and NumPy: neither the saved index nor the scanning kernels are believed. At the
end the index that training would use is compared with what was found.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pario.commands.dataset import Dataset, name_of
from pario.commands.screen import counted, decimal_bytes, screen, seconds
from pario.errors import CorruptedError, FileError, ParioError
from pario.format.layout import F_BIGDATA, F_SUBDATA, P_OVERFLOW
from pario.format.page import Page
from pario.format.tree import Tree, check_ascending, clean_name, dup_order, named_database
from pario.locate.index import open_index
from pario.locate.snapshot import check_snapshot
from pario.plan.coalesce import coalesce
from pario.plan.shard import even_split
from pario.records import EXTENT

__all__ = ["verify"]

#: Bytes of values that are read at once per rank.
CHUNK = 32 << 20

#: Damages that are shown; all are counted.
SHOWN = 20

#: Leaf pages between two looks at the progress bar.
STRIDE = 64


@dataclass
class Found:
    """What one rank saw of one database."""

    records: int = 0
    inline_bytes: int = 0
    runs: list[tuple[int, int, int]] = field(default_factory=list)  # page, bytes, record id (among this rank's)
    damages: list[ParioError] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)  # of databases among the records


def verify(path: str, db: str | None) -> int:
    """Exit status: 1 if anything is damaged. Collective over all ranks: leaf pages and records are divided."""
    dataset = Dataset(path)
    started = time.perf_counter()
    damages, names = _database(dataset, None if db is None else db.encode())
    if db is None:
        for name in names:
            damages += _database(dataset, name)[0]
    check = partial(check_snapshot, dataset.fetcher, dataset.snapshot)
    dataset.together(check, "looking whether a writer was at work")
    took = seconds(time.perf_counter() - started)
    screen.say(
        f"damaged in {counted(damages, 'place')}; looked for {took}"
        if damages
        else f"no damage found, in {took}. Checked: page headers, bounds and numbers; key order; counts; every byte "
        "could be read. Not checked: what the bytes mean (LMDB keeps no checksum), pages that are free."
    )
    dataset.close()
    return 1 if damages else 0


def _database(dataset: Dataset, name: bytes | None) -> tuple[int, list[bytes]]:
    """(number of damages, names of the databases that lie in this one). Collective."""
    words = "main database" if name is None else f'database "{name_of(name)}"'
    world = dataset.world
    tree = dataset.main
    if name is not None:
        tree = dataset.together(lambda: dataset.tree(named_database(dataset.main, name)), "opening the database")
    if tree.db.md_root < 0:
        screen.say(f"{words}: empty")
        return 0, []
    found = Found()
    leaves = _leaf_numbers(tree, found)
    start, stop = even_split(len(leaves), world.size, world.rank)
    _walk(tree, leaves, start, stop, found)
    first = world.exscan(found.records)
    _read_runs(dataset, found, first)
    names = [name for share in world.allgather(found.names) for name in share]
    shares = world.allgather((found.records, found.inline_bytes, [r[:2] for r in found.runs], found.damages))
    records = sum(share[0] for share in shares)
    value_bytes = sum(share[1] + sum(nbytes for _, nbytes in share[2]) for share in shares)
    damages: list[ParioError] = [damage for share in shares for damage in share[3]]
    if not damages:
        damages += _counts(tree, records)
    if not damages and not names:  # a database of databases is no dataset: there is no index of it
        pages = np.array([page for share in shares for page, _ in share[2]], np.int64)
        sizes = np.array([nbytes for share in shares for _, nbytes in share[2]], np.int64)
        damages += _index_agrees(dataset, name, records, pages, sizes)
    for damage in damages[:SHOWN]:
        screen.say(f"{words}: {damage}")
    if len(damages) > SHOWN:
        screen.say(f"{words}: and {len(damages) - SHOWN:,} more")
    state = f"{len(damages):,} damaged" if damages else "all sound"
    held = f", {counted(len(names), 'named database')} among them" if names else ""
    screen.say(f"{words}: {counted(records, 'record')} found{held}, {decimal_bytes(value_bytes)} of values; {state}")
    return len(damages), names


def _leaf_numbers(tree: Tree, found: Found) -> np.ndarray:
    """i64[k], page numbers of all leaves in key order. Damaged branch pages are noted on rank 0, and passed over."""
    pages = np.array([tree.db.md_root], np.int64)
    for level in range(1, tree.db.md_depth):
        below: list[np.ndarray] = []
        for pgno in pages.tolist():
            try:
                below.append(tree.page(pgno, level).children())
            except FileError as e:
                if screen.rank == 0:
                    found.damages.append(e)
        pages = np.concatenate(below) if below else np.empty(0, np.int64)
    return pages


def _walk(tree: Tree, leaves: np.ndarray, start: int, stop: int, found: Found) -> None:
    """Look at the leaves [start, stop) of all."""
    last: bytes | None = None
    if start > 0:
        try:
            before = tree.page(int(leaves[start - 1]), tree.db.md_depth)
            last = before.key(before.n - 1)
        except FileError:
            pass  # the rank before says it
    bar = screen.bar(stop - start, "leaf pages", "page")
    for k in range(start, stop):
        try:
            leaf = tree.page(int(leaves[k]), tree.db.md_depth)
        except FileError as e:
            found.damages.append(e)
            last = None
            continue
        for i in range(leaf.n):
            try:
                key = leaf.key(i)
                if last is not None:
                    check_ascending(tree.order, last, key, leaf)
                last = key
                _item(tree, leaf, i, found)
            except FileError as e:
                found.damages.append(e)
        if (k - start) % STRIDE == STRIDE - 1:
            bar.update(STRIDE)
    screen.end_bar()


def _item(tree: Tree, leaf: Page, i: int, found: Found) -> None:
    node = leaf.node(i)
    if node.flags == F_SUBDATA:  # a named database among records: looked at for itself
        node.db()
        found.records += 1
        found.names.append(clean_name(node.key, leaf.snapshot))
        return
    dups = tree.dups(node)
    if dups is None:
        if node.flags & F_BIGDATA:
            run = node.overflow()
            found.runs.append((run.pgno, run.nbytes, found.records))
        else:
            found.inline_bytes += node.nbytes
        found.records += 1
        return
    before: bytes | None = None
    pairs = dups.items() if isinstance(dups, Tree) else ((dups, k) for k in range(dups.n))
    order = dups.order if isinstance(dups, Tree) else dup_order(tree.flags, leaf.snapshot.layout)
    for page, k in pairs:
        value = page.key(k)
        if before is not None:
            check_ascending(order, before, value, page)
        before = value
        found.records += 1
        found.inline_bytes += len(value)


def _read_runs(dataset: Dataset, found: Found, first: int) -> None:
    """Read all values that lie on overflow pages, in file order, and look at the page header before each."""
    s = dataset.snapshot
    runs = np.array(found.runs, np.int64).reshape(-1, 3)
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    ends = np.cumsum(runs[:, 1] + s.header)
    bar = screen.bar(int(ends[-1]) if len(ends) else 0, "values", "B")
    at = 0
    while at < len(runs):
        done = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, done + CHUNK, side="right")))
        chunk = runs[at:stop]
        try:
            found.damages += _read_chunk(dataset, chunk, first)
        except FileError:
            # One of them: which? Each for itself.
            for k in range(len(chunk)):
                try:
                    found.damages += _read_chunk(dataset, chunk[k : k + 1], first)
                except FileError as e:
                    record = {"record": first + int(chunk[k, 2]), "page": int(chunk[k, 0])}
                    found.damages.append(e.at(**record))
        at = stop
        bar.update(int(ends[stop - 1]) - bar.n)
    screen.end_bar()


def _read_chunk(dataset: Dataset, runs: np.ndarray, first: int) -> list[ParioError]:
    s = dataset.snapshot
    offsets = runs[:, 0] * s.page_size + s.header
    plan = coalesce(
        offsets,
        np.ascontiguousarray(runs[:, 1]),
        lead_bytes=s.header,
        align=dataset.fetcher.align,
        gap_bytes=64 << 10,
        read_bytes=4 << 20,
        file_bytes=dataset.fetcher.nbytes,
    )
    data = np.empty(plan.nbytes, np.uint8)
    dataset.pool.read(plan.reads, data, plan.starts)
    heads = data[(plan.record_starts - s.header)[:, None] + np.arange(s.header)]
    fields = heads.view(s.layout.page)[:, 0]
    pages_at = s.layout.pages_at
    order = "<" if s.byteorder == "little" else ">"
    pages = np.ascontiguousarray(heads[:, pages_at : pages_at + 4]).view(f"{order}u4")[:, 0].astype(np.int64)
    need = (s.header - 1 + runs[:, 1] + s.sum_size) // s.page_size + 1
    wrong = (fields["mp_pgno"].astype(np.int64) != runs[:, 0]) | (fields["mp_flags"] != P_OVERFLOW) | (pages < need)
    damages: list[ParioError] = []
    for k in np.flatnonzero(wrong):
        head = fields[k]
        damages.append(
            CorruptedError(
                f"the overflow page of this record says: page {head['mp_pgno']}, flags {head['mp_flags']:#x}, "
                f"{pages[k]:,} pages; expected page {runs[k, 0]}, flags {P_OVERFLOW:#x}, at least {need[k]:,} pages",
                page=int(runs[k, 0]),
                offset=int(runs[k, 0]) * s.page_size,
                record=first + int(runs[k, 2]),
            )
        )
    return damages


def _counts(tree: Tree, records: int) -> list[ParioError]:
    if records == tree.db.md_entries:
        return []
    return [CorruptedError(f"{records:,} records found, but the database says it has {tree.db.md_entries:,}")]


def _index_agrees(
    dataset: Dataset, name: bytes | None, records: int, pages: np.ndarray, sizes: np.ndarray
) -> list[ParioError]:
    """Is the index (saved or newly made) the same as what was found? Collective."""
    s = dataset.snapshot
    try:
        index = open_index(dataset.path, dataset.pool, s, dataset.world, db=name, save=False)
    except ParioError as e:
        return [e]
    theirs = np.sort(index.extents, order=["offset", "nbytes"])
    on_pages = np.sort(_extents(pages * s.page_size + s.header, sizes), order=["offset", "nbytes"])
    if index.n != records or not np.isin(on_pages["offset"], theirs["offset"]).all():
        return [
            CorruptedError(
                f"the index has {index.n:,} records where {records:,} were found, or places them elsewhere",
                hint=f"Delete {index.sidecar} and run `python -m pario index`" if index.sidecar else None,
            )
        ]
    return []


def _extents(offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    out = np.empty(len(offsets), EXTENT)
    out["offset"], out["nbytes"] = offsets, sizes
    return out
