"""What a dataset seems to hold, guessed from bytes and keys; nothing is executed.

    one record     its format, and which decoder to try
    the keys       which fields the samples have: "image-000000001" and "label-000000001"
    both           the lines of code to paste: decoder and selection

Fields are found in two layouts:

    names in front    a stretch of keys for each name    image-1 image-2 ... label-1 label-2 ...
    names behind      the keys of a sample in a row      0.cls 0.jpg 1.cls 1.jpg ...
                                                         or a/x.cls a/x.jpg b/y.cls b/y.jpg ...
"""

from __future__ import annotations

import json
import pickletools
import re
import zlib
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from pario.commands.screen import printable
from pario.dataset.packed import packing_of
from pario.dataset.template import Template
from pario.decode.base import describe
from pario.decode.registry import find
from pario.decode.rows import BadValue
from pario.decode.tensor_protos import fields_of, outline
from pario.decode.unpickle import PLAIN
from pario.fetch.base import Fetcher
from pario.format.layout import MDB_DUPSORT, MDB_INTEGERKEY, MDB_REVERSEKEY
from pario.locate.base import Index
from pario.plan.selection import Selection, all_but
from pario.text import read_json

#: Bytes of a value that the guess uses: enough for a Datum with an image of 1,000 x 1,000 pixels.
MOST = 4 << 20
#: Decompressed bytes that the guess at a compressed record looks at.
_INSIDE = 64 << 10
#: The last number in a key, what stands before it, and behind it.
_PARTS = re.compile(rb"(.*?)([0-9]{1,18})([^0-9]*)", re.DOTALL)
#: More names than this are no fields.
_MOST_FIELDS = 8
#: Keys that are looked at in the beginning, the middle and the end.
_LOOK = 4 * _MOST_FIELDS
#: Numbers of records of two fields may differ by this share: samples may be incomplete.
_SHARE = 0.01
#: Records that are looked at: the first, the last, and some between them.
_SAMPLE = 9
#: With more kinds of keys nobody would paste a line for each.
_MOST_PREFIXES = 4


# -- one record --------------------------------------------------------------------------------------------------------


def kind_of(what: str) -> str:
    """The kind of a record, of what `guess` says about it: "a pickle" of "a pickle, protocol 4 of ..."."""
    kind = re.split(r"[,:]", what)[0]
    return "bytes of no known kind" if kind.startswith("bytes ") else re.sub(r" +\(.*", "", kind)


def guess(value: bytes, nbytes: int) -> tuple[str, str]:
    """(the format of these bytes, in a few words; the decoder to try, as one writes it: "pario.decode.Json()", "" if
    nothing suggests one). Executes nothing: it never loads a pickle.

    value : the first bytes of the record; nbytes : its length
    """
    if not value:
        return "empty", ""
    whole = len(value) == nbytes
    if whole and value[0] >> 3 <= 7 and (datum := _datum(value)):
        return datum, f"pario.decode.{find('datum').cls}()"
    if whole and value[0] == 0x0A and (tensors := outline(value)):
        return f"Caffe2 TensorProtos: {', '.join(tensors)}", f"pario.decode.{find('tensor_protos').cls}()"
    said, advice = describe(np.frombuffer(value, np.uint8))
    call = advice.removeprefix("Use ") if advice.startswith("Use pario.decode.") and advice.endswith("()") else ""
    if value[:1] == b"\x80" and len(value) > 1 and 2 <= value[1] <= 5:
        names = list(dict.fromkeys(_pickled(value)))
        trust = "allow=[]" if PLAIN.issuperset(names) else "allow_pickle=True"
        words = f"a pickle, protocol {value[1]}{' of ' if names else ''}{', '.join(names[:3])}"
        return words, f"pario.decode.Pickle({trust})"
    if "perhaps JSON" in said and whole:
        try:
            read_json(value)
            return f"JSON: {printable(value)}", call
        except ValueError:
            pass
    if ", " in said:
        kind, inside = said.split(", ", 1)[1], _inside(value)
        words, inner = guess(inside, len(inside)) if inside else ("", "")
        call = f"pario.decode.{find(kind[:4]).cls}({inner})" if kind.startswith(("zlib", "gzip")) else call
        return f"{kind} of {words}" if inside else kind, call
    try:
        text = value.decode()
        if all(c.isprintable() or c in "\t\r\n" for c in text):
            return f"text: {printable(text.replace(chr(10), ' ').encode())}", f"pario.decode.{find('text').cls}()"
    except UnicodeDecodeError:
        pass
    return f"bytes {value[:8].hex(' ')}{' ...' if nbytes > 8 else ''}", call


def _inside(value: bytes) -> bytes:
    """The beginning of what a zlib or gzip record holds; b"" for anything else."""
    window = zlib.MAX_WBITS | 16 if value[:2] == b"\x1f\x8b" else zlib.MAX_WBITS if value[:1] == b"\x78" else 0
    if not window:
        return b""
    try:
        return zlib.decompressobj(window).decompress(value, _INSIDE)
    except zlib.error:
        return b""


def _datum(value: bytes) -> str:
    """A description of a Caffe Datum, "" for anything else. In Python: compiling a kernel for five records is too
    slow."""
    numbers = {1: 0, 2: 0, 3: 0, 5: 0, 7: 0}
    data, floats = b"", 0
    try:
        for field, wire, content in fields_of(value):
            if wire == 0 and field in numbers:
                numbers[field] = content
            elif wire == 2 and field == 4:
                data = content
            elif wire in (2, 5) and field == 6:
                floats += len(content) // 4
            else:
                return ""
    except BadValue:
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


def _pickled(value: bytes) -> list[str]:
    """Names of the classes and functions that a pickle would call, read from its opcodes."""
    names: list[str] = []
    strings: list[str] = []
    memo: dict[int, str | None] = {}
    last: str | None = None  # the string that the opcode before has pushed
    try:
        for op, argument, _ in pickletools.genops(value):
            pushed: str | None = None
            if op.name == "GLOBAL":
                names.append(str(argument).replace(" ", "."))
            elif op.name == "STACK_GLOBAL" and len(strings) >= 2:
                names.append(".".join(strings[-2:]))
            elif op.name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
                memo[len(memo) if argument is None else int(argument)] = pushed = last
            elif op.name in ("GET", "BINGET", "LONG_BINGET"):
                pushed = memo.get(int(argument or 0))
                strings += [] if pushed is None else [pushed]
            elif isinstance(argument, str):
                strings.append(argument)
                pushed = argument
            last = pushed
    except Exception:
        pass  # a truncated or broken pickle: show what was found so far
    return names


# -- the fields of the samples -----------------------------------------------------------------------------------------


class _Field(NamedTuple):
    """template : as one writes it; ids : records of it, a few from everywhere"""

    name: str
    template: str
    ids: list[int]


def _fields_of(index: Index) -> list[_Field]:
    """The fields, if there are several of which the same numbers, or names, have records; else []. Looks at a few
    hundred keys."""
    record = index.database.record
    if record is None or record.md_flags & (MDB_DUPSORT | MDB_INTEGERKEY | MDB_REVERSEKEY):
        return []
    found: list[_Field] = []
    if len(index.files) == 1:
        stretches = _stretches(index)
        found = _behind(index, *stretches[0]) if len(stretches) == 1 else _in_front(index, stretches)
    found = found or _extensions(index)
    names = [field.name for field in found]
    return found if len(found) > 1 and all(names) and len(set(names)) == len(names) else []


def _stretches(index: Index) -> list[tuple[int, int]]:
    """[low, high) of the records whose keys have the same bytes before the last number; [] if there are too many."""
    found: list[tuple[int, int]] = []
    low = 0
    while low < index.n:
        if low in index.meta:
            low += 1
            continue
        parts = _PARTS.fullmatch(index.keys([low])[0])
        if parts is None or len(found) == _MOST_FIELDS:
            return []
        before = parts[1]

        def begin(i: int, before: bytes = before) -> bool:
            return index.keys([i])[0][: len(before)] > before

        high = bisect_right(range(index.n), False, lo=low, key=begin) if before else index.n
        while high - 1 in index.meta:
            high -= 1
        found.append((low, high))
        low = high
    return found


def _in_front(index: Index, stretches: list[tuple[int, int]]) -> list[_Field]:
    found = []
    numbers = set()
    for low, high in stretches:
        ids = np.unique(np.linspace(low, high - 1, min(high - low, _LOOK)).astype(np.int64))
        parts = [_PARTS.fullmatch(key) for key in index.keys(ids)]
        if None in parts or len({(one[1], one[3]) for one in parts if one}) != 1 or parts[0] is None:
            return []
        numbers.add((int(parts[0][2]), int(parts[-1][2]) if parts[-1] else 0))
        found.append(_field(parts[0][1], [one[2] for one in parts if one], parts[0][3], ids.tolist(), parts[0][1]))
    counts = [high - low for low, high in stretches]
    same = bool(counts) and max(counts) - min(counts) <= _SHARE * max(counts)
    return found if same and min(counts) > 1 and len(numbers) == 1 else []


def _looked_at(low: int, high: int) -> list[int]:
    """Ids from the beginning, the middle and the end of a stretch."""
    ids = [i for begin in (low, (low + high - _LOOK) // 2, high - _LOOK) for i in range(max(low, begin), begin + _LOOK)]
    return sorted({i for i in ids if i < high})


def _grouped(samples: dict[bytes, set[bytes]], groups: dict[bytes, list[int]]) -> bool:
    """Whether these samples have nearly all of these groups of records: at each end of a look one may be cut."""
    whole = sum(len(has) == len(groups) for has in samples.values())
    return 1 < len(groups) <= _MOST_FIELDS and whole >= len(samples) - 6 and whole >= 2


def _behind(index: Index, low: int, high: int) -> list[_Field]:
    """Of one stretch, in which the keys of a sample stand in a row."""
    ids = _looked_at(low, high)
    parts = [_PARTS.fullmatch(key) for key in index.keys(ids)]
    groups: dict[bytes, list[int]] = {}
    samples: dict[bytes, set[bytes]] = {}
    for i, one in zip(ids, parts, strict=True):
        if one is None:
            return []
        groups.setdefault(one[3], []).append(i)
        samples.setdefault(one[2], set()).add(one[3])
    by_id = dict(zip(ids, parts, strict=True))
    if not _grouped(samples, groups) or len({one[1] for one in by_id.values() if one}) != 1:
        return []
    found = []
    for after, mine in sorted(groups.items()):
        digits = [one[2] for one in map(by_id.get, mine) if one]
        first = by_id[mine[0]]
        found.append(_field(first[1] if first else b"", digits, after, mine, after))
    return found


def _extensions(index: Index) -> list[_Field]:
    """Of paths whose part up to the name's first dot says which sample it is, as in WebDataset's tars."""
    groups: dict[bytes, list[int]] = {}
    samples: dict[bytes, set[bytes]] = {}
    ids = [i for i in _looked_at(0, index.n) if i not in index.meta]
    for i, key in zip(ids, index.keys(ids), strict=True):
        folder, slash, name = key.rpartition(b"/")
        stem, dot, after = name.partition(b".")
        groups.setdefault(dot + after, []).append(i)
        samples.setdefault(folder + slash + stem, set()).add(dot + after)
    if not _grouped(samples, groups) or b"" in groups:
        return []
    found = []
    # The first field says which samples there are: {}.png would take x.seg.png for one of its own.
    ends = {after: sum(other.endswith(after) for other in groups) for after in groups}
    for after, mine in sorted(groups.items(), key=lambda one: (ends[one[0]], one[0])):
        text = (b"{}" + _written(after)).decode("utf-8", errors="replace")
        found.append(_Field("_".join(re.findall(r"\w+", after.decode(errors="replace"))), text, mine))
    return found


def _field(before: bytes, digits: list[bytes], after: bytes, ids: list[int], name: bytes) -> _Field:
    width = min(map(len, digits))
    padded = any(one[:1] == b"0" for one in digits) and width > 1
    hole = b"%%0%dd" % width if padded else b"%d"
    text = (_written(before) + hole + _written(after)).decode("utf-8", errors="replace")
    words = re.findall(r"\w+", name.decode(errors="replace"))
    fits = all(Template(text).parse(before + one + after) is not None for one in digits)
    return _Field("_".join(words) if fits else "", text, ids)


def _written(literal: bytes) -> bytes:
    """As it stands in a template."""
    return re.sub(rb"[%{}]", lambda one: one[0] * 2, literal)


# -- lines to paste ----------------------------------------------------------------------------------------------------


def lines_to_paste(path: str, fetcher: Fetcher, index: Index, db: str | None) -> list[str]:
    """Reads a sample of the values; executes nothing. path : as it stands in them; fetcher : of the open file"""
    fields = _fields_of(index)
    if fields and (line := _line_of_fields(path, fetcher, index, db, fields)):
        return [line]
    rest = all_but(list(index.meta), index.n)
    chosen = Selection(index.n, "", runs=rest)
    ids = chosen.ids(np.unique(np.linspace(0, chosen.n - 1, min(chosen.n, _SAMPLE)).astype(np.int64)))
    prefixes = [_prefix(key) for key in index.keys(ids)]
    told = _told(fetcher, index, ids)
    groups: dict[bytes | None, list[tuple[str, str, bytes]]] = {}
    for known, one in zip(prefixes, told, strict=True):
        groups.setdefault(known, []).append(one)
    # One line, unless other keys mean other kinds of records.
    apart = {prefix: {kind for kind, *_ in ones} for prefix, ones in groups.items()}
    if not (1 < len(groups) <= _MOST_PREFIXES and b"" not in groups and len(set(map(frozenset, apart.values()))) > 1):
        groups = {None: told}
    lines = []
    for prefix, ones in groups.items():
        kinds = list(dict.fromkeys(kind for kind, *_ in ones))
        words = [_quoted(path), "64", _decoder(ones), 'shuffle="global"']
        words += [f'db="{db}"'] if db is not None else []
        words += [f"select={prefix!r}"] if prefix is not None else []
        lines.append(f"loader = pario.Loader({', '.join(words)})  # {', '.join(kinds)}")
    return lines


def _line_of_fields(path: str, fetcher: Fetcher, index: Index, db: str | None, fields: list[_Field]) -> str:
    """"" if the records are all of one kind, and nothing beside them says that they are samples: folders, perhaps."""
    pairs, kinds = [], []
    for name, template, ids in fields:
        few = ids[:: -(-len(ids) // _SAMPLE)]
        told = _told(fetcher, index, np.array(few))
        mine = list(dict.fromkeys(kind for kind, *_ in told))
        decoder = _decoder(told).replace("pario.decode.Raw()", "None")
        pairs.append(f"{_quoted(name)}: ({_quoted(template)}, {decoder})")
        kinds.append(", ".join(mine))
    by_extension = all(re.search(r"[d}]\.", template) for _, template, _ in fields)
    if len(set(kinds)) == 1 and not index.meta and not by_extension:
        return ""
    words = [_quoted(path), "64", f"fields={{{', '.join(pairs)}}}", 'shuffle="global"']
    words += [f'db="{db}"'] if db is not None else []
    return f"loader = pario.Loader({', '.join(words)})  # {'; '.join(kinds)}"


def _told(fetcher: Fetcher, index: Index, ids: np.ndarray) -> list[tuple[str, str, bytes]]:
    """(kind, decoder to try, first bytes) of these records."""
    told = []
    offsets, nbytes = index.extents_of(ids)
    entry = index.entries[0]
    packing = None if entry is None else packing_of(entry, index.n, index.path, records=True)
    ordinals = packing.ordinals(ids) if packing is not None else None
    for row, (offset, size) in enumerate(zip(offsets.tolist(), nbytes.tolist(), strict=True)):
        if packing is not None:
            value = packing.value(fetcher.pread(offset, size), -1 if ordinals is None else int(ordinals[row]))
            size = len(value)
        else:
            value = fetcher.pread(offset, min(size, MOST)) if size else b""
        words, call = guess(value, size)
        told.append((kind_of(words), call, value))
    return told


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _prefix(key: bytes) -> bytes:
    """What stands before the first digit."""
    found = re.match(rb"[^0-9]*", key)
    return found[0] if found else b""


def _decoder(told: list[tuple[str, str, bytes]]) -> str:
    """told : of records, as of `_told`"""
    calls = {call for _, call, _ in told}
    if calls == {"pario.decode.Image()"}:
        sizes = {_picture_size(value) for *_, value in told} - {None}
        return f"pario.decode.Image({224 if len(sizes) > 1 else ''})"
    kinds = {kind for kind, *_ in told}
    if kinds == {"bytes of no known kind"}:
        return "pario.decode.Raw()"
    return (told[0][1] if len(kinds) == 1 else "") or "your_function"


def _picture_size(value: bytes) -> tuple[int, ...] | None:
    """(height, width) in pixels; None: it cannot be decoded, or its end is missing."""
    from pario.decode.image import decode  # with its codecs
    from pario.decode.measured import BadImage

    try:
        return decode(np.frombuffer(value, np.uint8), "RGB").shape[:2]
    except BadImage:
        return None
