"""The lines of code to paste for a dataset: decoder and selection, guessed from a sample of its records."""

from __future__ import annotations

import json
import re

import numpy as np

from pario.commands.dataset import Dataset
from pario.commands.guess import guess, kind_of, suggest
from pario.commands.head import MOST
from pario.commands.layouts import Field, fields_of
from pario.dataset.packed import packing_of
from pario.locate.base import Index
from pario.plan.selection import Selection, all_but

__all__ = ["lines_to_paste"]

#: Records that are looked at: the first, the last, and some between them.
_SAMPLE = 9
#: With more kinds of keys nobody would paste a line for each.
_MOST_PREFIXES = 4


def lines_to_paste(dataset: Dataset, index: Index, db: str | None) -> list[str]:
    """Reads a sample of the values; executes nothing."""
    fields = fields_of(index)
    if fields and (line := _line_of_fields(dataset, index, db, fields)):
        return [line]
    rest = all_but(list(index.meta), index.n)
    chosen = Selection(index.n, "", runs=rest)
    ids = chosen.ids(np.unique(np.linspace(0, chosen.n - 1, min(chosen.n, _SAMPLE)).astype(np.int64)))
    prefixes = [_prefix(key) for key in index.keys(ids)]
    told = _told(dataset, index, ids)
    groups: dict[bytes | None, list[tuple[str, bytes, int]]] = {}
    for known, one in zip(prefixes, told, strict=True):
        groups.setdefault(known, []).append(one)
    # One line, unless other keys mean other kinds of records.
    apart = {prefix: {kind for kind, *_ in ones} for prefix, ones in groups.items()}
    if not (1 < len(groups) <= _MOST_PREFIXES and b"" not in groups and len(set(map(frozenset, apart.values()))) > 1):
        groups = {None: told}
    lines = []
    for prefix, ones in groups.items():
        kinds = list(dict.fromkeys(kind for kind, *_ in ones))
        words = [_quoted(dataset.path), "64", _decoder(kinds, *ones[0][1:]), 'shuffle="global"']
        words += [f'db="{db}"'] if db is not None else []
        words += [f"select={prefix!r}"] if prefix is not None else []
        lines.append(f"loader = pario.Loader({', '.join(words)})  # {', '.join(kinds)}")
    return lines


def _line_of_fields(dataset: Dataset, index: Index, db: str | None, fields: list[Field]) -> str:
    """"" if the records are all of one kind, and nothing beside them says that they are samples: folders, perhaps."""
    pairs, kinds = [], []
    for name, template, ids in fields:
        few = ids[:: -(-len(ids) // _SAMPLE)]
        told = _told(dataset, index, np.array(few))
        mine = list(dict.fromkeys(kind for kind, *_ in told))
        decoder = _decoder(mine, *told[0][1:]).replace("pario.decode.Raw()", "None")
        pairs.append(f"{_quoted(name)}: ({_quoted(template)}, {decoder})")
        kinds.append(", ".join(mine))
    if len(set(kinds)) == 1 and not index.meta:
        return ""
    words = [_quoted(dataset.path), "64", f"fields={{{', '.join(pairs)}}}", 'shuffle="global"']
    words += [f'db="{db}"'] if db is not None else []
    return f"loader = pario.Loader({', '.join(words)})  # {'; '.join(kinds)}"


def _told(dataset: Dataset, index: Index, ids: np.ndarray) -> list[tuple[str, bytes, int]]:
    """(kind, first bytes, length) of these records."""
    told = []
    offsets, nbytes = index.extents_of(ids)
    packing = None if index.entries[0] is None else packing_of(index.entries[0], index.n, index.path)
    for offset, size in zip(offsets.tolist(), nbytes.tolist(), strict=True):
        if packing is not None:
            value = packing.unpack_one(dataset.fetcher.pread(offset, size))
            told.append((kind_of(guess(value, len(value))), value, len(value)))
            continue
        value = dataset.fetcher.pread(offset, min(size, MOST)) if size else b""
        told.append((kind_of(guess(value, size)), value, size))
    return told


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _prefix(key: bytes) -> bytes:
    """What stands before the first digit."""
    found = re.match(rb"[^0-9]*", key)
    return found[0] if found else b""


def _decoder(kinds: list[str], value: bytes, nbytes: int) -> str:
    """value : the first bytes of one of the records; nbytes : its length"""
    if len(kinds) > 1:
        return "your_function"
    return "pario.decode.Raw()" if kinds[0] == "bytes of no known kind" else suggest(value, nbytes) or "your_function"
