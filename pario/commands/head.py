"""`head`: shows the first records, one from the middle and the last one, and guesses their format."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from pario.comm.base import together
from pario.commands.dataset import Dataset, Item, key_text, selected
from pario.commands.decoder import decoded, find_decoder
from pario.commands.guess import guess, kind_of, suggest
from pario.commands.screen import screen, table
from pario.dataset.reader import Reader
from pario.dataset.select import as_wanted, choose
from pario.format.tree import Tree

__all__ = ["guess", "head", "look", "sample"]

#: Bytes of a value that the guess uses: enough for a Datum with an image of 1,000 x 1,000 pixels.
MOST = 4 << 20


def head(path: str, count: int, db: str | None, decoder: str | None, select: str | None = None) -> int:
    chosen = find_decoder(decoder) if decoder else None
    dataset, most = Dataset(path), MOST if chosen is None else None
    if select is None:
        work = partial(sample, dataset, db, count, most)
        tree, items = dataset.together(work, "reading the first records")
    else:
        tree = dataset.together(partial(dataset.database, db), "opening the database")
        items = sample_of(path, db, count, selected(select), most)
    said = [guess(item.value, item.nbytes) for item in items]
    shown = said if chosen is None else decoded(chosen, items)
    rows = [("id", "key", "bytes", "the value" if chosen is None else f"decoded by {chosen!r}")]
    for item, what in zip(items, shown, strict=True):
        number = f"{'~' if item.about else ''}{item.id}"
        rows.append((number, key_text(tree, item.key), f"{item.nbytes:,}", what))
    screen.say(table(rows, left=2, words=True))
    if chosen is None:
        screen.say(look(items, said))
    dataset.close()
    return 0


def look(items: list[Item], said: list[str]) -> str:
    """What these records have in common, and the decoder to try. said : the guess at each"""
    kinds = list(dict.fromkeys(kind_of(what) for what in said))
    if len(kinds) > 1:
        return f"These records are not of one kind: {', '.join(kinds)}."
    tries = list(dict.fromkeys(suggest(item.value, item.nbytes) for item in items))
    if len(tries) > 1 and all("Pickle(" in one for one in tries):
        tries = [one for one in tries if "allow_pickle" in one]
    if len(tries) != 1 or not tries[0]:
        return "Nothing says which decoder reads them: see docs/decoders.md."
    return f"To try: decoder={tries[0]}"


def sample_of(path: str, db: str | None, count: int, select: Any, most: int | None = MOST) -> list[Item]:
    """Like `sample`, of the records that `select` picks. Collective; raises OptionError on all ranks."""
    with Reader(path, db=db) as reader:
        chosen = choose(as_wanted(select), reader, file_order=False)
        n = len(reader) if chosen is None else chosen.n
        ordinals = np.unique([*range(min(count, n)), n // 2, n - 1])
        with together(reader.world, "reading the records"):
            records = reader.read(ordinals if chosen is None else chosen.ids(ordinals))
            keys = reader.keys(records.ids)
        return [
            Item(int(i), key, len(value), value[:most].tobytes())
            for i, key, value in zip(records.ids, keys, records, strict=True)
        ]


def sample(dataset: Dataset, db: str | None, count: int, most: int | None = MOST) -> tuple[Tree, list[Item]]:
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
