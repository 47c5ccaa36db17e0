"""`info` and `head`: the kind of file, its content, and how pario will read it; records, and what they seem to be."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pario.comm.base import on_root, together
from pario.commands.dataset import Dataset, Item, is_tar, key_text, name_of, selected
from pario.commands.decoder import decoded, find_decoder
from pario.commands.guess import MOST, guess, kind_of, lines_to_paste
from pario.commands.screen import counted, decimal_bytes, screen, table
from pario.dataset.packed import find_keys_within
from pario.dataset.reader import Reader
from pario.dataset.select import as_wanted, choose
from pario.decode.base import Decoder
from pario.decode.unpacking import Unpacking
from pario.errors import DatabaseError, EmptyError
from pario.format import layout
from pario.format.tree import Tree, named_database
from pario.locate.database import Database
from pario.locate.open import open_index
from pario.locate.sidecar import sidecar_places

if TYPE_CHECKING:
    from pario.codec.packing import Packing

#: `info` lists at most this many databases.
LISTED = 50

#: With at most this many leaf pages `info` builds a missing index itself; with more the user would wait too long.
SOON = 50_000

_WRITERS = {1: "LMDB 0.9", 2: "unreleased sources of 2017-2025, as in lmdb-js", 3: "LMDB 1.0"}

_FLAGS = {
    layout.MDB_DUPSORT: "duplicates (dupsort)",
    layout.MDB_DUPFIXED: "duplicates of one size",
    layout.MDB_INTEGERKEY: "integer keys",
    layout.MDB_INTEGERDUP: "integer duplicates",
    layout.MDB_REVERSEKEY: "keys compared from the end",
    layout.MDB_REVERSEDUP: "duplicates compared from the end",
}


def info(path: str, db: str | None, decoder: str | None) -> int:
    """Collective over all ranks. Builds an index in memory if none is saved and the file has few leaf pages."""
    chosen = find_decoder(decoder) if decoder else None
    if is_tar(path):
        return _info_of_tars(path, db, chosen)
    dataset = Dataset(path)
    s = dataset.snapshot
    order = "little" if s.byteorder == "little" else "big"
    allocated = os.stat(dataset.path).st_blocks * 512
    sparse = f" ({decimal_bytes(allocated)} on disk)" if allocated < 0.9 * s.file_bytes else ""
    rows = [
        ("file", f"{dataset.path}, {decimal_bytes(s.file_bytes)}{sparse}"),
        ("format", f"LMDB data format {s.version} ({_WRITERS[s.version]}), {8 * s.word}-bit, {order}-endian"),
        ("pages", f"{s.last_pgno + 1:,} in use, of {s.page_size:,} bytes"),
        ("transaction", f"{s.txnid:,} is the last one committed"),
    ]
    if s.sum_size:
        rows.append(("checksums", f"{s.sum_size} bytes per page; only its writer knows how to check them"))
    found: list[tuple[str, Tree]] = dataset.together(partial(_databases, dataset, db), "reading the databases")
    screen.say(_aligned(rows))
    screen.say()
    screen.say(_trees(dataset, found))
    screen.tell(path=dataset.path, bytes=s.file_bytes, format=s.version, page_size=s.page_size, transaction=s.txnid)
    screen.tell(databases=[{"name": name, "records": dataset.entries(tree), **_counts(tree)} for name, tree in found])
    try:
        tree = dataset.together(partial(dataset.database, db), "opening the database")
    except EmptyError:
        screen.say("\nThe database holds no record: there is nothing to read for training.")
        tree = None
    except DatabaseError as e:
        if db is not None:
            raise
        screen.say(f"\n{e.what[0].upper()}{e.what[1:]}. {e.hint or ''}")
        tree = None
    if tree is not None:
        pasted = _records(dataset, tree, db)
        work = partial(_sample, dataset, db, 1, MOST if chosen is None else None)
        tree, items = dataset.together(work, "reading three records")
        _look(tree, items, chosen, advise=not pasted)
    dataset.close()
    return 0


def _info_of_tars(path: str, db: str | None, decoder: Decoder | None) -> int:
    """`info` of a tar, or of several: their index says all."""
    with Reader(path, db=db, save_index=False) as reader:
        several = f"{len(reader.snapshots)} tars, " if len(reader.snapshots) > 1 else "tar, "
        nbytes = sum(snapshot.file_bytes for snapshot in reader.snapshots)
        rows = [("file", f"{reader.path}, {decimal_bytes(nbytes)}"), ("format", f"{several}read as it is")]
        screen.say(_aligned(rows))
        screen.tell(path=reader.path, bytes=nbytes, format="tar")
        index, tree = reader.index, _tree_of(reader)
        rows = _rows(index, tree, None, index.sidecar or "not saved yet: the first Loader does that")
        work = lambda: lines_to_paste(path, reader.file.pool.fetcher, index, None)  # noqa: E731
        lines = on_root(reader.world, "looking at a few records", work)
        screen.say()
        screen.say(_aligned(rows))
        _say_lines(lines)
    tree, items = _sample_of(path, db, 1, None, MOST if decoder is None else None)
    _look(tree, items, decoder, advise=False)
    return 0


def _look(tree: Tree, items: list[Item], decoder: Decoder | None, *, advise: bool) -> None:
    """What the first record, one from the middle and the last one seem to be, or what the decoder makes of them."""
    said = [guess(item.value, item.nbytes) for item in items]
    shown = [words for words, _ in said] if decoder is None else decoded(decoder, items)
    screen.say("\nRecords from the beginning, the middle and the end:")
    screen.tell(sample=_facts(tree, items, shown))
    keys = [key_text(tree, item.key)[:40] for item in items]
    width = max(12, *map(len, keys))
    for key, what in zip(keys, shown, strict=True):
        screen.say(f"  {key:<{width}}  {what}")
    if advise or len({kind_of(words) for words, _ in said}) > 1:
        screen.say(_advice(said))


def _databases(dataset: Dataset, db: str | None) -> list[tuple[str, Tree]]:
    """(words, tree) of the main database and of the named ones."""
    found = [("main database", dataset.main)]
    if db is not None:
        found.append((f'"{db}"', dataset.database(db)))
        return found
    for name in dataset.names(most=LISTED):
        found.append((f'"{name_of(name)}"', dataset.tree(named_database(dataset.main, name))))
    return found


def _trees(dataset: Dataset, found: list[tuple[str, Tree]]) -> str:
    rows: list[tuple[str, ...]] = [("", "entries", "depth", "branch pages", "leaf pages", "overflow pages", "flags")]
    for name, tree in found:
        d = tree.db
        flags = ", ".join(words for flag, words in _FLAGS.items() if d.md_flags & flag) or "-"
        numbers = (dataset.entries(tree), d.md_depth, d.md_branch_pages, d.md_leaf_pages, d.md_overflow_pages)
        rows.append((name, *(f"{n:,}" for n in numbers), flags))
    return table(rows, words=True)


def _counts(tree: Tree) -> dict[str, int]:
    names = ("depth", "branch_pages", "leaf_pages", "overflow_pages", "flags")
    return {name: int(getattr(tree.db, f"md_{name}")) for name in names}


def _records(dataset: Dataset, tree: Tree, db: str | None) -> bool:
    """Rows from the index: sizes, order, side-car; and lines to paste. Returns whether there is an index."""
    s = dataset.snapshot
    name = db.encode() if db is not None else None
    progress = screen.progress("leaf pages", "page")
    index: Any = None
    # Rank 0 decides, because other nodes may have other cache directories.
    places = [path for path in sidecar_places(dataset.path, name) if os.path.exists(path)]
    stale = dataset.world.bcast(places[0] if places else "")
    if tree.db.md_leaf_pages <= SOON or stale:
        index = open_index(Database(dataset.path, s, name), dataset.pool, dataset.world, save=False, progress=progress)
        packing = dataset.packed(tree)
        if packing is not None:
            find_keys_within(index, Unpacking([packing], [0]), partial(dataset.stored, index))
    option = f" --db {db}" if db is not None else ""
    if index is None:
        screen.say(
            f"\nNo index is saved yet, and its {tree.db.md_leaf_pages:,} leaf pages take a while to read. For record "
            f"sizes and the order in the file:\n  python -m pario data index {dataset.path}{option}"
        )
        return False
    if index.sidecar:
        saved = f"saved as {index.sidecar}"
    elif stale:
        saved = f"{stale} does not fit the file any more; it will be made anew"
    else:
        saved = f"not saved yet: python -m pario data index {dataset.path}{option}"
    screen.say()
    screen.say(_aligned(_rows(index, tree, dataset.packed(tree), saved)))
    screen.say()
    near = _near(index)
    fast = (
        "reads this file with its compiled kernels"
        if s.native
        else "reads this file, of another kind of machine, without its compiled kernels"
    )
    sequential = (
        "shuffle=False reads it from front to back"
        if index.by_offset is None or near > 0.95
        else 'shuffle=False follows the keys and jumps in the file; shuffle="block" reads it in long pieces'
    )
    screen.say(f"What pario does with it: it {fast}; {sequential}.")
    work = partial(lines_to_paste, dataset.path, dataset.fetcher, index, db)
    _say_lines(dataset.together(work, "looking at a few records"))
    return True


def _rows(index: Any, tree: Tree, packing: Packing | None, saved: str) -> list[tuple[str, str]]:
    """What the index says of the records. saved : where it is"""
    stored = sizes = index.extents["nbytes"]
    if packing is not None:
        stored, sizes = stored[packing.firsts], packing.sizes
    low, middle, high = int(sizes.min()), int(np.median(sizes)), int(sizes.max())
    same = low == high
    size = f"{low:,} bytes each" if same else f"{low:,} to {high:,} bytes, median {middle:,}"
    keys = index.keys(np.array([0, index.n - 1], np.int64))
    near = _near(index)
    rows = [
        ("records", f"{index.n:,} (ids 0 to {index.n - 1:,}, in key order); {size}"),
        ("", f"{decimal_bytes(int(sizes.sum()))} in all"),
        *([("packed", _packed_words(packing, int(stored.sum())))] if packing is not None else []),
        ("keys", f"first {key_text(tree, keys[0])}, last {key_text(tree, keys[1])}, {_order(tree, keys, index.n)}"),
    ]
    screen.tell(records=index.n, value_bytes=int(sizes.sum()), sizes={"least": low, "median": middle, "most": high})
    screen.tell(stored_bytes=int(stored.sum()), index=index.sidecar or None, in_key_order=index.by_offset is None)
    if index.meta:
        names = ", ".join(key_text(tree, key) for _, key in sorted(index.meta.items()))
        rows.append(("meta records", f'{names}: about the dataset; a Loader leaves them out, unless select="all"'))
    if index.by_offset is None:
        rows.append(("order", "the records lie in the file in key order"))
    else:
        rows.append(("order", f"{near:.1%} of the records lie near the one before in key order (1 MB or less apart)"))
    rows.append(("index", saved))
    return rows


def _say_lines(lines: list[str]) -> None:
    screen.tell(lines=lines)
    screen.say("\nTo read it:\n  import pario")
    for line in lines:
        screen.say(f"  {line}")
    if any("your_function" in line for line in lines):
        screen.say("your_function: of one record's bytes; it returns an array, a number, or a dict of them.")


def _packed_words(packing: Packing, stored: int) -> str:
    """How the values are packed. stored : their bytes in the file, headers included"""
    raw = int(packing.sizes.sum())
    said = [f"{codec}{_with_dictionary(len(codec.dictionary))}" for codec in packing.codecs]
    blocks = "" if packing.counts is None else f" in {counted(packing.entries, 'entry', 'entries')}"
    ratio = f", {raw / stored:.2f} times as many" if stored else ""
    return (
        f"{' and '.join(said) or 'nothing compressed'}{blocks}: {decimal_bytes(stored)} in the file hold "
        f"{decimal_bytes(raw)} of values{ratio}"
    )


def _with_dictionary(nbytes: int) -> str:
    return f" with a dictionary of {decimal_bytes(nbytes)}" if nbytes else ""


def _order(tree: Tree, keys: list[bytes], n: int) -> str:
    """How the keys are ordered, for somebody who sees the first and the last of n."""
    if tree.flags & layout.MDB_REVERSEKEY:
        return "in the order of their bytes from the end"
    if tree.flags & layout.MDB_INTEGERKEY:
        return "in the order of the numbers"
    text = "in the order of their bytes"
    first, last = keys
    if all(key.isdigit() for key in keys) and (len(first) != len(last) or int(last) - int(first) + 1 < n):
        text += ": 10 comes before 9"
    return text


def _near(index: Any) -> float:
    """Share of records that begin within 1 MB of the record before them in key order."""
    offsets = index.extents["offset"]
    return float((np.abs(np.diff(offsets)) <= 1e6).mean()) if len(offsets) > 1 else 1.0


def _aligned(rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"  {name:<12}  {text}" for name, text in rows)


def head(path: str, count: int, db: str | None, decoder: str | None, select: str | None) -> int:
    chosen = find_decoder(decoder) if decoder else None
    most = MOST if chosen is None else None
    if select is not None or is_tar(path):
        tree, items = _sample_of(path, db, count, None if select is None else selected(select), most)
    else:
        dataset = Dataset(path)
        work = partial(_sample, dataset, db, count, most)
        tree, items = dataset.together(work, "reading the first records")
        dataset.close()
    said = [guess(item.value, item.nbytes) for item in items]
    shown = [words for words, _ in said] if chosen is None else decoded(chosen, items)
    rows = [("id", "key", "bytes", "the value" if chosen is None else f"decoded by {chosen!r}")]
    for item, what in zip(items, shown, strict=True):
        number = f"{'~' if item.about else ''}{item.id}"
        rows.append((number, key_text(tree, item.key), f"{item.nbytes:,}", what))
    screen.tell(records=_facts(tree, items, shown))
    screen.say(table(rows, left=2, words=True))
    if chosen is None:
        screen.say(_advice(said))
    return 0


def _facts(tree: Tree, items: list[Item], shown: list[str]) -> list[dict[str, Any]]:
    return [
        {"id": item.id, "estimated": item.about, "key": key_text(tree, item.key), "bytes": item.nbytes, "value": what}
        for item, what in zip(items, shown, strict=True)
    ]


def _advice(said: list[tuple[str, str]]) -> str:
    """What these records have in common, and the decoder to try. said : the guess at each"""
    kinds = list(dict.fromkeys(kind_of(words) for words, _ in said))
    if len(kinds) > 1:
        return f"These records are not of one kind: {', '.join(kinds)}."
    tries = list(dict.fromkeys(call for _, call in said))
    if len(tries) > 1 and all("Pickle(" in one for one in tries):
        tries = [one for one in tries if "allow_pickle" in one]
    if len(tries) != 1 or not tries[0]:
        return "Nothing says which decoder reads them: see docs/decoders.md."
    return f"To try: decoder={tries[0]}"


def _tree_of(reader: Reader) -> Tree:
    """Says how keys are ordered, and has no pages."""
    record = reader.index.database.record
    assert record is not None  # of an open index
    return Tree(lambda _: b"", reader.snapshot, record)


def _sample_of(path: str, db: str | None, count: int, select: Any, most: int | None) -> tuple[Tree, list[Item]]:
    """Like `_sample`, of the records that `select` picks. Collective; raises OptionError on all ranks."""
    with Reader(path, db=db, save_index=not is_tar(path)) as reader:
        chosen = choose(as_wanted(select), reader, file_order=False)
        n = len(reader) if chosen is None else chosen.n
        ordinals = np.unique([*range(min(count, n)), n // 2, n - 1])
        with together(reader.world, "reading the records"):
            records = reader.read(ordinals if chosen is None else chosen.ids(ordinals))
            keys = reader.keys(records.ids)
        return _tree_of(reader), [
            Item(int(i), key, len(value), value[:most].tobytes())
            for i, key, value in zip(records.ids, keys, records, strict=True)
        ]


def _sample(dataset: Dataset, db: str | None, count: int, most: int | None) -> tuple[Tree, list[Item]]:
    """The database, and the first `count` records, one from the middle, and the last one, none of them twice.

    most : bytes of a value; None: all
    """
    nbytes = dataset.snapshot.file_bytes if most is None else most
    tree = dataset.database(db)
    items = dataset.first_items(tree, count, nbytes)
    if dataset.entries(tree) > count + 1:
        middle = dataset.middle_item(tree, nbytes)
        last = items[-1].key
        if tree.order(middle.key) > tree.order(last):  # type: ignore[operator]
            items.append(middle)
    if dataset.entries(tree) > count:
        items.append(dataset.last_item(tree, nbytes))
    return tree, items
