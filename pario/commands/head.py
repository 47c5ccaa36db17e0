"""`head`: shows the first records, one from the middle and the last one, and guesses their format."""

from __future__ import annotations

import json
import pickletools
import re
from functools import partial

import numpy as np

from pario.commands.dataset import Dataset, Item, key_text
from pario.commands.screen import printable, screen, table
from pario.decode.base import describe
from pario.format.tree import Tree

__all__ = ["guess", "head"]

#: Bytes of a value that the guess uses: enough for a Datum with an image of 1,000 x 1,000 pixels.
MOST = 4 << 20


def head(path: str, count: int, db: str | None) -> int:
    dataset = Dataset(path)
    work = partial(_items, dataset, db, count)
    tree, items = dataset.together(work, "reading the first records")
    said = [guess(item.value, item.nbytes) for item in items]
    rows = [("id", "key", "bytes", "the value")]
    for item, what in zip(items, said, strict=True):
        number = f"{'~' if item.about else ''}{item.id}"
        rows.append((number, key_text(tree, item.key), f"{item.nbytes:,}", what))
    screen.say(table(rows, left=2, words=True))
    kinds = list(dict.fromkeys(kind_of(what) for what in said))
    if len(kinds) > 1:
        screen.say(f"These records are not of one kind: {', '.join(kinds)}.")
    dataset.close()
    return 0


def _items(dataset: Dataset, db: str | None, count: int) -> tuple[Tree, list[Item]]:
    """The database, and the first `count` records, one from the middle, and the last one, none of them twice."""
    tree = dataset.database(db)
    items = dataset.first_items(tree, count, MOST)
    if tree.db.md_entries > count + 1:
        middle = dataset.middle_item(tree, MOST)
        last = items[-1].key
        if tree.order(middle.key) > tree.order(last):  # type: ignore[operator]
            items.append(middle)
    if tree.db.md_entries > count:
        items.append(dataset.last_item(tree, MOST))
    return tree, items


def kind_of(what: str) -> str:
    """The kind of a record, of what `guess` says about it: "a pickle" of "a pickle, protocol 4 of ..."."""
    kind = re.split(r"[,:]", what)[0]
    return "bytes of no known kind" if kind.startswith("bytes ") else re.sub(r" +\(.*", "", kind)


def guess(value: bytes, nbytes: int) -> str:
    """A guess at the format of these bytes, in a few words. Executes nothing: it never loads a pickle.

    value : the first bytes of the record; nbytes : its length
    """
    if not value:
        return "empty"
    whole = len(value) == nbytes
    if whole and value[0] >> 3 <= 7 and (datum := _datum(value)):
        return datum
    said = describe(np.frombuffer(value, np.uint8))[0]
    if value[:1] == b"\x80" and len(value) > 1 and 2 <= value[1] <= 5:
        return f"a pickle, protocol {value[1]}{_pickled(value)}"
    if "perhaps JSON" in said and whole:
        try:
            json.loads(value)
            return f"JSON: {printable(value)}"
        except ValueError:
            pass
    if ", " in said:
        return said.split(", ", 1)[1]
    try:
        text = value.decode()
        if all(c.isprintable() or c in "\t\r\n" for c in text):
            return f"text: {printable(text.replace(chr(10), ' ').encode())}"
    except UnicodeDecodeError:
        pass
    return f"bytes {value[:8].hex(' ')}{' ...' if nbytes > 8 else ''}"


def _datum(value: bytes) -> str:
    """A description of a Caffe Datum, "" for anything else. In Python: compiling a kernel for five records is too
    slow."""
    numbers = {1: 0, 2: 0, 3: 0, 5: 0, 7: 0}
    data, floats, at = b"", 0, 0
    try:
        while at < len(value):
            tag, at = _varint(value, at)
            field, kind = tag >> 3, tag & 7
            if kind == 0 and field in numbers:
                numbers[field], at = _varint(value, at)
            elif kind == 2 and field in (4, 6):
                nbytes, at = _varint(value, at)
                if at + nbytes > len(value):
                    return ""
                data, floats = (value[at : at + nbytes], floats) if field == 4 else (data, floats + nbytes // 4)
                at += nbytes
            elif kind == 5 and field == 6:
                floats, at = floats + 1, at + 4
            else:
                return ""
    except IndexError:
        return ""
    channels, height, width, label = (numbers[k] for k in (1, 2, 3, 5))
    if numbers[7]:
        inner = describe(np.frombuffer(data, np.uint8))[0].split(", ")[-1]
        return f"Caffe Datum with {inner}, label {label}"
    count = channels * height * width
    if not count or count not in (len(data), floats):
        return ""
    what = "u8 pixels" if len(data) == count else "floats"
    return f"Caffe Datum, {channels} x {height} x {width} {what}, label {label}"


def _varint(value: bytes, at: int) -> tuple[int, int]:
    """(number, offset of its end). Raises IndexError if the bytes end too early."""
    number = shift = 0
    while shift < 70:
        byte = value[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at
    raise IndexError


def _pickled(value: bytes) -> str:
    """Names of the classes that a pickle would create, read from its opcodes."""
    names: list[str] = []
    strings: list[str] = []
    try:
        for op, argument, _ in pickletools.genops(value):
            if op.name == "GLOBAL":
                names.append(str(argument).replace(" ", "."))
            elif op.name == "STACK_GLOBAL" and len(strings) >= 2:
                names.append(".".join(strings[-2:]))
            elif isinstance(argument, str):
                strings.append(argument)
    except Exception:
        pass  # a truncated or broken pickle: show what was found so far
    return f" of {', '.join(dict.fromkeys(names[:3]))}" if names else ""
