"""`head`: the first records, and what they seem to be."""

from __future__ import annotations

import json
import pickletools
from functools import partial

import numpy as np

from pario.commands.dataset import Dataset, Item
from pario.commands.screen import printable, screen, table
from pario.decode.base import describe

__all__ = ["guess", "head"]

#: Bytes of a value that are looked at: enough for a Datum with an image of 1,000 x 1,000 pixels.
MOST = 4 << 20


def head(path: str, count: int, db: str | None) -> int:
    dataset = Dataset(path)
    work = partial(_items, dataset, db, count)
    items = dataset.together(work, "reading the first records")
    rows = [("id", "key", "bytes", "the value")]
    for item in items:
        rows.append((str(item.id), printable(item.key), f"{item.nbytes:,}", guess(item.value, item.nbytes)))
    screen.say(table(rows, left=2, words=True))
    dataset.close()
    return 0


def _items(dataset: Dataset, db: str | None, count: int) -> list[Item]:
    return dataset.first_items(dataset.database(db), count, MOST)


def guess(value: bytes, nbytes: int) -> str:
    """What these bytes may be, in a few words. Nothing is executed: a pickle is looked at, never loaded.

    value : the first bytes of the record; nbytes : how many it has
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
    """The words for a Caffe Datum, "" for anything else. In Python: a kernel would be compiled for five records."""
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
    """(number, where it ends). Raises IndexError where the bytes end."""
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
        pass  # a cut or broken pickle: what was seen so far is shown
    return f" of {', '.join(dict.fromkeys(names[:3]))}" if names else ""
