"""Damaged files: pario.lmdb must give the right answer or an error, and never crash, hang, or eat memory.

    python -m tests.lmdb_fuzz --files 20000 [--seed 0] [--jobs 2]
    python -m tests.lmdb_fuzz --one 1234            what seed 1234 does, and what comes of it

Small LMDBs of all kinds, in both of py-lmdb's data formats and with pages of 4 to 64 KiB, are damaged (bytes and fields
changed, pages exchanged, copied, overwritten, the file cut) and read in every way. `Shape` knows what every byte of the
sound file means, from a walk of its own; so the truth about a damaged file is known:

* bytes of keys and values: what is read has exactly these bytes changed. A search may miss what is out of order.
* bytes that mean nothing: nothing changes, and there is no error.
* all the rest: the truth, or an error of lmdb's tree. Anything else is a finding.

Child processes do the reading, under limits of memory and time; who dies is known by the seed it was at.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb as real
import numpy as np

import pario.lmdb as ours
from pario.lmdb import native

Rng = random.Random
Span = tuple[int, int]
Pairs = list[tuple[bytes, bytes]]

#: Memory that a child may take on top of what it has before the first damaged file, and time per file.
MEMORY_BYTES = 1 << 30
SECONDS = 30
#: Files per child: fresh processes do not hide what grows slowly.
BATCH = 2000

#: Where the pario is that the children are to read with.
HOME = str(Path(ours.__file__).parents[2])

BRANCH, LEAF, OVERFLOW, LEAF2 = 0x01, 0x02, 0x04, 0x20
BIGDATA, SUBDATA, DUPDATA = 0x01, 0x02, 0x04
INVALID = (1 << 64) - 1

#: Classes of bytes that are the user's.
DATA = {"key", "dup", "value"}
#: With these damaged, a search may miss.
ORDER = {"key", "dup", "separator"}
#: Stored numbers that `stat` and `count` hand on; nothing else depends on them.
COUNTERS = {"db.branches", "db.leaves", "db.overflows", "db.entries", "dup db.entries", "old db.entries"}
#: Nothing in the file tells: pointers to another sound page of the kind that belongs there, and copies of such a page
#: that carry the number of their new place; to another run that is long enough (in format 3: of as many pages, by the
#: same transaction); another order that the few keys of a page are in by chance; and `quiet`.
UNTOLD = {
    "child", "db.root", "dup db.root", "run.pgno", "db.flags", "a copied page", "one byte", "bytes of a run",
    "no duplicates",
}  # fmt: skip


# -- what every byte means ---------------------------------------------------------------------------------------------


class Shape:
    """A sound file of 64-bit little-endian LMDB, every byte classified.

    names : classes; kind : u8[file], index into names; fields : (offset, bytes, class) of what is a number
    items : database -> spans of (key, value) in cursor order, as the newest meta page has it
    older : the same as the other meta page has it
    """

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.names = ["unused"]
        self.kind = np.zeros(len(raw), np.uint8)
        self.fields: list[tuple[int, int, str]] = []
        self.header, self.base = (16, 0) if raw[16:20] == b"\xde\xc0\xef\xbe" else (24, 24)
        self.version = self.number(self.header + 4, 4)
        self.size = self.number(self.header + 24, 4)
        metas = [self.header, self.size + self.header]
        metas.sort(key=lambda at: self.number(at + 128, 8))
        self.items: dict[bytes | None, list[tuple[Span, Span]]] = {}
        # The older one first, so that bytes of both count as the newer one's.
        self.prefix = "old "
        self.meta(metas[0])
        self.older, self.items, self.prefix = self.items, {}, ""
        self.meta(metas[1])
        self.dupsort = dict(self.flags)

    def number(self, at: int, nbytes: int) -> int:
        return int.from_bytes(self.raw[at : at + nbytes], "little")

    def mark(self, at: int, nbytes: int, name: str, is_number: bool = True) -> int:
        """Returns the number there."""
        name = self.prefix + name
        if name not in self.names:
            self.names.append(name)
        self.kind[at : at + nbytes] = self.names.index(name)
        if is_number:
            self.fields.append((at, nbytes, name))
        return self.number(at, nbytes)

    def meta(self, at: int) -> None:
        self.mark(at - self.header, 8, "meta.pgno")
        self.mark(at - 6, 2, "meta.flags")
        self.flags: dict[bytes | None, bool] = {}
        for offset, nbytes, name in (
            (0, 4, "magic"), (4, 4, "version"), (8, 8, "address"), (16, 8, "mapsize"), (24, 4, "page size"),
            (28, 2, "env flags"), (30, 42, "free db"), (120, 8, "last_pg"), (128, 8, "txnid"),
        ):  # fmt: skip
            self.mark(at + offset, nbytes, f"meta.{name}", nbytes <= 8)
        self.database(None, at + 72, "")

    def database(self, name: bytes | None, at: int, prefix: str) -> None:
        root, depth, flags, _ = self.record(at, prefix)
        self.flags[name] = bool(flags & 4)
        self.items[name] = []
        if root != INVALID:
            self.tree(name, root, depth, None)

    def record(self, at: int, prefix: str) -> tuple[int, int, int, int]:
        pad = self.mark(at, 4, f"{prefix}db.pad")
        flags = self.mark(at + 4, 2, f"{prefix}db.flags")
        depth = self.mark(at + 6, 2, f"{prefix}db.depth")
        for i, what in enumerate(("branches", "leaves", "overflows", "entries")):
            self.mark(at + 8 + 8 * i, 8, f"{prefix}db.{what}")
        return self.mark(at + 40, 8, f"{prefix}db.root"), depth, flags, pad

    def page_header(self, at: int, prefix: str = "") -> tuple[int, int, int]:
        """(flags, items, pad)"""
        self.mark(at, 8, f"{prefix}page.pgno")
        if self.version > 1:
            self.mark(at + 8, 8, f"{prefix}page.txnid")
        h = at + self.header
        flags = self.mark(h - 6, 2, f"{prefix}page.flags")
        pad = self.mark(h - 8, 2, f"{prefix}page.pad" if flags & LEAF2 else f"{prefix}page.no pad")
        lower = self.mark(h - 4, 2, f"{prefix}page.lower")
        self.mark(h - 2, 2, f"{prefix}page.no upper" if flags & LEAF2 else f"{prefix}page.upper")
        return flags, (lower - (self.header - self.base)) // 2, pad

    def tree(self, name: bytes | None, pgno: int, depth: int, key: Span | None) -> None:
        """A tree of the database `name`; of duplicates of a key if one is given."""
        at = pgno * self.size
        flags, n, pad = self.page_header(at)
        if flags & LEAF2:
            self.fixed(name, at, n, pad, key)
            return
        for i in range(n):
            pointer = at + self.header + 2 * i
            node = at + self.base + self.mark(pointer, 2, "pointer")
            if flags & BRANCH:
                below = self.mark(node, 6, "child")
                nbytes = self.mark(node + 6, 2, "separator bytes")
                self.mark(node + 8, nbytes, "separator", False)
                self.tree(name, below, depth - 1, key)
            else:
                self.leaf_node(name, node, key)

    def fixed(self, name: bytes | None, at: int, n: int, pad: int, key: Span | None) -> None:
        assert key is not None
        for i in range(n):
            start = at + self.header + i * pad
            self.mark(start, pad, "dup", False)
            self.items[name].append((key, (start, pad)))

    def leaf_node(self, name: bytes | None, node: int, key: Span | None) -> None:
        nbytes = self.mark(node, 4, "node.dsize")
        flags = self.mark(node + 4, 2, "node.flags")
        k = self.mark(node + 6, 2, "node.ksize")
        if key is not None:
            self.mark(node + 8, k, "dup", False)
            self.items[name].append((key, (node + 8, k)))
            return
        own = (node + 8, k)
        data = node + 8 + k + (k & 1 if self.version > 1 else 0)
        self.mark(node + 8, k, "name" if flags & SUBDATA and not flags & DUPDATA else "key", False)
        if flags & BIGDATA:
            pgno = self.mark(data, 8, "run.pgno")
            if self.version > 1:
                self.mark(data + 8, 8, "run.txnid")
                self.mark(data + 16, 8, "run.pages")
            page = pgno * self.size
            self.mark(page, 8, "overflow.pgno")
            if self.version > 1:
                self.mark(page + 8, 8, "overflow.txnid")
            self.mark(page + self.header - 8, 2, "overflow.no pad")
            self.mark(page + self.header - 6, 2, "overflow.flags")
            self.mark(page + self.header - 4, 4, "overflow.pages")
            self.mark(page + self.header, nbytes, "value", False)
            self.items[name].append((own, (page + self.header, nbytes)))
        elif flags == SUBDATA | DUPDATA:
            root, depth, _, _ = self.record(data, "dup ")
            self.tree(name, root, depth, own)
        elif flags == SUBDATA:
            title = self.raw[node + 8 : node + 8 + k].rstrip(b"\0")
            self.items[name].append((own, (data, nbytes)))
            self.database(title, data, "")
        elif flags == DUPDATA:
            self.sub_page(name, data, own)
        else:
            self.mark(data, nbytes, "value", False)
            self.items[name].append((own, (data, nbytes)))

    def sub_page(self, name: bytes | None, at: int, key: Span) -> None:
        flags, n, pad = self.page_header(at, "sub-")
        if flags & LEAF2:
            self.fixed(name, at, n, pad, key)
            return
        for i in range(n):
            node = at + self.base + self.mark(at + self.header + 2 * i, 2, "sub-pointer")
            self.leaf_node(name, node, key)

    def quiet(self, damaged: bytes) -> set[str]:
        """What a damaged file has of changes to numbers that no other number of the page contradicts."""
        found = set()
        for at, nbytes, name in self.fields:
            old, new = self.number(at, nbytes), int.from_bytes(damaged[at : at + nbytes], "little")
            # Nodes lie at even places: one byte more or less may be the one that fills up.
            if name == "node.dsize" and self.number(at + 4, 2) & BIGDATA and new != old:
                found.add("bytes of a run")
            elif name in ("node.ksize", "node.dsize", "separator bytes") and abs(new - old) == 1:
                found.add("one byte")
            elif name == "node.flags" and old & DUPDATA and not new:
                found.add("no duplicates")
        return found

    def touched(self, damaged: bytes) -> set[str]:
        """Classes of the bytes in which a damaged file differs."""
        n = min(len(damaged), len(self.raw))
        mine, other = np.frombuffer(self.raw, np.uint8), np.frombuffer(damaged, np.uint8)
        kinds = set(np.unique(self.kind[:n][mine[:n] != other[:n]]).tolist())
        if n < len(self.raw):
            kinds |= set(np.unique(self.kind[n:]).tolist())
        found = {self.names[i] for i in kinds}
        return found | {"the end"} if n < len(self.raw) and found != {"unused"} else found


def records(items: dict[bytes | None, list[tuple[Span, Span]]], raw: bytes) -> dict[bytes | None, Pairs]:
    return {name: [(raw[k : k + kn], raw[v : v + vn]) for (k, kn), (v, vn) in spans] for name, spans in items.items()}


# -- sound files -------------------------------------------------------------------------------------------------------


def plain(env: real.Environment, rng: Rng) -> None:
    """Two commits; short, long and empty values; some deleted."""
    sizes = (0, 1, 40, 300, 2100, 5000)
    for part in range(2):
        with env.begin(write=True) as txn:
            for i in range(70):
                txn.put(b"%d" % (i * 7919 % 1009 + part), rng.randbytes(rng.choice(sizes)))
            for key in [b"%d" % (i * 7919 % 1009) for i in range(0, 70, 9)]:
                txn.delete(key)


def deep(env: real.Environment, rng: Rng) -> None:
    """Long keys: three levels."""
    for part in range(2):
        with env.begin(write=True) as txn:
            for i in range(part, 130, 2):
                txn.put(b"%05d" % (i * 37 % 1000) + bytes(400), b"%d" % i)


def named(env: real.Environment, rng: Rng) -> None:
    """Databases of several kinds, records in the main one."""
    with env.begin(write=True) as txn:
        for i in range(12):
            txn.put(b"plain %d" % i, rng.randbytes(i * 20))
    for name, flags, key, value in (
        (b"dups", {"dupsort": True}, 3, 0),
        (b"fixed", {"dupsort": True, "dupfixed": True}, 3, 3),
        (b"fixed 1", {"dupsort": True, "dupfixed": True}, 3, 1),
        (b"integers", {"dupsort": True, "dupfixed": True, "integerkey": True, "integerdup": True}, 8, 8),
        (b"backwards", {"reverse_key": True}, 4, 50),
        (b"empty", {}, 0, 0),
    ):
        db = env.open_db(name, **flags)
        with env.begin(write=True, db=db) as txn:
            for i in range(25 if key else 0):
                many = 1 if not flags.get("dupsort") or i % 3 == 0 else 900 if i == 7 else rng.randrange(2, 20)
                for _ in range(many):
                    n = value or rng.randrange(1, 25)
                    txn.put((i * 131).to_bytes(8, "little")[:key], rng.getrandbits(8 * n - 1).to_bytes(n, "little"))


def long_values(env: real.Environment, rng: Rng) -> None:
    """Overflow runs of one page and of many, some longer than needed."""
    for part in range(3):
        with env.begin(write=True) as txn:
            for i in range(9):
                key = b"%d" % (i + 6 * part)
                if i % 3 == 0:
                    txn.put(key, rng.randbytes(17_000))
                txn.put(key, rng.randbytes((3000, 4080, 4081, 9000)[i % 4]))


#: kind -> (writer, page sizes to which the file is enlarged)
BASES: dict[str, tuple[Callable[[real.Environment, Rng], None], tuple[int, ...]]] = {
    "plain": (plain, (8192, 32768)),
    "deep": (deep, ()),
    "named": (named, (16384,)),
    "long_values": (long_values, (65536,)),
}


def enlarge(shape: Shape, size: int) -> bytes:
    """The same LMDB with larger pages: the nodes of every page at its new end, overflow runs without a gap."""
    raw, old = shape.raw, shape.size
    starts = {at // old for at, _, name in shape.fields if name.endswith(("page.pgno", "overflow.pgno"))}
    out = bytearray(len(raw) // old * size)
    for number in range(len(raw) // old):
        at, to = number * old, number * size
        page = bytearray(raw[at : at + old])
        h = shape.header
        flags = int.from_bytes(page[h - 6 : h - 4], "little")
        if number < 2:
            struct.pack_into("<I", page, h + 24, size)
        elif number not in starts:
            continue
        elif flags & OVERFLOW:
            pages = int.from_bytes(page[h - 4 : h], "little")
            page = bytearray(raw[at : at + pages * old])
        elif not flags & LEAF2:
            lower, upper = struct.unpack_from("<HH", page, h - 4)
            n = (lower - (h - shape.base)) // 2
            pointers = struct.unpack_from(f"<{n}H", page, h)
            more = size - old
            nodes = page[shape.base + upper :]
            struct.pack_into("<H", page, h - 2, upper + more)
            struct.pack_into(f"<{n}H", page, h, *(p + more for p in pointers))
            out[to + shape.base + upper + more : to + size] = nodes
            page = page[: h + 2 * n]
        else:
            (upper,) = struct.unpack_from("<H", page, h - 2)
            struct.pack_into("<H", page, h - 2, (upper + size - old) & 0xFFFF)
        out[to : to + len(page)] = page
    return bytes(out)


def make_bases(folder: Path) -> list[str]:
    """Write the sound files; returns their names."""
    made = []
    for kind, (write, sizes) in BASES.items():
        for version in (0, 1):
            place = os.fspath(folder / "new")
            options: dict[str, Any] = {"map_size": 1 << 24, "max_dbs": 8, "subdir": False, "lock": False}
            with real.open(place, lib_version=version, sync=False, **options) as env:
                write(env, Rng(f"{kind} {version}"))
            # The file ends where LMDB stopped writing.
            raw = Path(place).read_bytes()
            os.unlink(place)
            name = f"{kind}-{1 + 2 * version}-4096"
            (folder / name).write_bytes(raw)
            made.append(name)
            for size in sizes:
                if size == 65536 and not version:
                    continue  # data format 1 ends at 32 KiB
                name = f"{kind}-{1 + 2 * version}-{size}"
                (folder / name).write_bytes(enlarge(Shape(raw), size))
                made.append(name)
    return made


def truth_by_py_lmdb(path: str) -> dict[bytes | None, Pairs]:
    """Every database of a sound file."""
    found: dict[bytes | None, Pairs] = {}
    with real.open(path, subdir=False, readonly=True, lock=False, max_dbs=16) as env:
        for name in (None, *env.dbs()):
            db = env.open_db(name, create=False)
            with env.begin(db=db) as txn:
                found[name] = [(bytes(k), bytes(v)) for k, v in txn.cursor()]
    return found


# -- damage ------------------------------------------------------------------------------------------------------------


def damage(shape: Shape, rng: Rng) -> tuple[str, bytes]:
    """(what was done, the damaged file)"""
    raw = bytearray(shape.raw)
    pages = len(raw) // shape.size
    chance = rng.random()

    def page(number: int) -> slice:
        return slice(number * shape.size, (number + 1) * shape.size)

    if chance < 0.35:
        done = []
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            at, nbytes, name = field_of(shape, rng)
            value = some_number(rng, int.from_bytes(raw[at : at + nbytes], "little"), pages) % (1 << 8 * nbytes)
            raw[at : at + nbytes] = value.to_bytes(nbytes, "little")
            done.append(f"{name} at {at} = {value}")
        return ", ".join(done), bytes(raw)
    if chance < 0.60:
        done = []
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            at, nbytes, name = field_of(shape, rng)
            at += rng.randrange(nbytes)
            raw[at] ^= 1 << rng.randrange(8)
            done.append(f"bit of {name} at {at}")
        return ", ".join(done), bytes(raw)
    if chance < 0.75:
        spots = [rng.randrange(len(raw)) for _ in range(rng.choice((1, 3, 20)))]
        for at in spots:
            raw[at] = rng.randrange(256)
        return f"bytes at {spots}", bytes(raw)
    if chance < 0.83:
        cut = rng.choice((rng.randrange(len(raw)), rng.randrange(pages) * shape.size, rng.randrange(200)))
        return f"cut to {cut}", bytes(raw[:cut])
    a, b = rng.randrange(pages), rng.randrange(pages)
    if chance < 0.88:
        raw[page(a)], raw[page(b)] = raw[page(b)], raw[page(a)]
        return f"pages {a} and {b} exchanged", bytes(raw)
    if chance < 0.93:
        raw[page(a)] = raw[page(b)]
        if rng.random() < 0.5:  # with the number of its new place
            raw[a * shape.size : a * shape.size + 8] = a.to_bytes(8, "little")
            return f"page {b} over {a}, renumbered", bytes(raw)
        return f"page {b} over {a}", bytes(raw)
    if chance < 0.98:
        keep = rng.choice((0, 8, shape.header))
        new = rng.choice((bytes, lambda n: b"\xff" * n, rng.randbytes))(shape.size - keep)
        raw[a * shape.size + keep : (a + 1) * shape.size] = new
        return f"page {a} from byte {keep} on filled", bytes(raw)
    return "longer", bytes(raw) + rng.randbytes(rng.choice((1, 100, shape.size, 3 * shape.size)))


def field_of(shape: Shape, rng: Rng) -> tuple[int, int, str]:
    """A number in the file, each class as likely as the other."""
    name = rng.choice(shape.by_class_names)  # type: ignore[attr-defined]
    return rng.choice(shape.by_class[name])  # type: ignore[attr-defined]


def some_number(rng: Rng, old: int, pages: int) -> int:
    near = (old + 1, old - 1, old + 2, old - 2, old * 2, old ^ 0x8000)
    small = (0, 1, 2, 3, 0xFF, pages - 1, pages, rng.randrange(pages), rng.randrange(pages))
    large = (0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 47, (1 << 63) - 1, 1 << 63, INVALID)
    return rng.choice((*near, *small, *large, rng.getrandbits(16), rng.getrandbits(64)))


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failed:
    """A call that raised."""

    name: str
    is_ours: bool
    text: str


def tried(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as e:
        # What the reader raises is of lmdb's tree, and tells its place.
        return Failed(type(e).__name__, isinstance(e, ours.Error), f"{e}")


Answers = dict[tuple[Any, ...], Any]


def read_all(path: str, sound: dict[bytes | None, Pairs], dupsort: dict[bytes | None, bool]) -> Answers:
    """Every call, whatever the others gave. (database, call, argument) -> answer"""
    answers: Answers = {}
    env = tried(lambda: ours.open(path, subdir=False, readonly=True, lock=False, max_dbs=16))
    if isinstance(env, Failed):
        return {(None, "open"): env}
    answers[None, "env.stat"] = tried(env.stat)
    answers[None, "info"] = tried(env.info)
    answers[None, "dbs"] = tried(env.dbs)
    for name, pairs in sound.items():
        limit = 4 * len(pairs) + 100
        db = tried(lambda n=name: env.open_db(n, create=False))
        if isinstance(db, Failed):
            answers[name, "open_db"] = db
            continue
        txn = tried(lambda d=db: env.begin(db=d))
        if isinstance(txn, Failed):
            answers[name, "begin"] = txn
            continue
        with txn:
            read_database(answers, name, txn, pairs, limit, dupsort.get(name, False))
    env.close()
    return answers


def read_database(answers: Answers, name: bytes | None, txn: Any, pairs: Pairs, limit: int, dupsort: bool) -> None:
    def note(call: Callable[[], Any], *what: Any) -> Any:
        answers[(name, *what)] = result = tried(call)
        return result

    def taken(iterator: Iterator[Any]) -> list[Any]:
        found = list(itertools.islice(iterator, limit))
        if len(found) == limit:
            raise RuntimeError("an iterator without an end")
        return found

    note(txn.stat, "stat")
    for what in ("iternext", "iterprev", "iternext_nodup", "iterprev_nodup"):
        note(lambda w=what: taken(getattr(txn.cursor(), w)(keys=True, values=True)), what)
        note(lambda w=what: taken(getattr(txn.cursor(), w)(values=False)), what, "keys")
    keys = list(dict.fromkeys(key for key, _ in pairs))
    cursor = txn.cursor()
    for key in keys:
        note(lambda k=key: txn.get(k), "get", key)
        note(lambda k=key: (cursor.set_range(k), cursor.item()), "set_range", key)
    note(lambda: cursor.getmulti(keys), "getmulti")
    note(lambda: cursor.getmulti(keys, values=False), "getmulti", "keys")
    if not dupsort:
        return
    for key in keys:
        note(lambda k=key: cursor.set_key(k) and cursor.count(), "count", key)
        note(lambda k=key: cursor.set_key(k) and taken(cursor.iternext_dup()), "iternext_dup", key)
        note(
            lambda k=key: cursor.set_key(k) and cursor.last_dup() and taken(cursor.iterprev_dup()), "iterprev_dup", key
        )
    for key, value in pairs[:: max(1, len(pairs) // 40)]:
        note(lambda k=key, v=value: cursor.set_key_dup(k, v) and cursor.item(), "set_key_dup", key, value)
        note(lambda k=key, v=value: cursor.set_range_dup(k, v) and cursor.item(), "set_range_dup", key, value)
    note(lambda: cursor.getmulti(keys, dupdata=True), "getmulti", "dups")


def expected_of(found: dict[bytes | None, Pairs]) -> Callable[[tuple[Any, ...]], Any]:
    """What a call gives on records `found`; ... for "not to be compared"."""
    values: dict[bytes | None, dict[bytes, list[bytes]]] = {}
    for name, pairs in found.items():
        values[name] = {}
        for key, value in pairs:
            values[name].setdefault(key, []).append(value)

    def expected(place: tuple[Any, ...]) -> Any:
        name, what, *rest = place
        if name not in found:
            return ...
        pairs, by_key = found[name], values[name]
        keys = rest == ["keys"]
        if what in ("iternext", "iterprev"):
            wanted: list[Any] = pairs if what == "iternext" else pairs[::-1]
            return [key for key, _ in wanted] if keys else wanted
        if what == "iternext_nodup":
            return list(by_key) if keys else [(key, many[0]) for key, many in by_key.items()]
        if what == "iterprev_nodup":
            return list(by_key)[::-1] if keys else [(key, many[-1]) for key, many in by_key.items()][::-1]
        if what == "getmulti":
            if keys:
                return list(by_key)
            return pairs if rest else [(key, many[0]) for key, many in by_key.items()]
        if not rest:
            return ...
        many = by_key.get(rest[0])
        if many is None:
            return ...
        return {
            "get": many[0],
            "set_range": (True, (rest[0], many[0])),
            "count": len(many),
            "iternext_dup": many,
            "iterprev_dup": many[::-1],
        }.get(what, (rest[0], rest[-1]))

    return expected


#: Calls that search: with keys out of order they may miss, or find the next one.
SEARCHES = {
    "get", "set_range", "getmulti", "count", "iternext_dup", "iterprev_dup", "set_key_dup", "set_range_dup",
}  # fmt: skip


def judge(answers: Answers, expected: Callable[[tuple[Any, ...]], Any], touched: set[str]) -> list[str]:
    """What is wrong."""
    wrong = []
    for place, answer in answers.items():
        what = place[1]
        if isinstance(answer, Failed):
            if not answer.is_ours:
                wrong.append(f"{what}: a foreign {answer.name}: {answer.text}")
            elif touched <= {"unused", "value"}:
                wrong.append(f"{what}: false alarm, {answer.name}: {answer.text}")
            continue
        wanted = expected(place)
        if wanted is ... or answer == wanted:
            continue
        if what in SEARCHES and touched & ORDER:
            continue
        if what == "count" and touched & COUNTERS:
            continue
        wrong.append(f"{what}: {answer!r:.100} for {wanted!r:.100}")
    return wrong


@dataclass
class Base:
    name: str
    shape: Shape
    dupsort: dict[bytes | None, bool] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, name: str) -> Base:
        shape = Shape((folder / name).read_bytes())
        by_class: dict[str, list[tuple[int, int, str]]] = {}
        for place in shape.fields:
            by_class.setdefault(place[2], []).append(place)
        shape.by_class, shape.by_class_names = by_class, list(by_class)  # type: ignore[attr-defined]
        return cls(name, shape, shape.dupsort)


def examine(base: Base, damaged: bytes, path: str) -> tuple[set[str], list[str], Answers]:
    """Read the damaged file in every way. (classes touched, what is wrong, the answers)"""
    shape = base.shape
    with open(path, "wb") as f:
        f.write(damaged)
    touched = shape.touched(damaged)
    answers = read_all(path, records(shape.items, shape.raw), base.dupsort)
    # Beyond the end there is nothing; whoever needs it must have raised.
    whole = damaged + bytes(max(0, len(shape.raw) - len(damaged)))
    wrong = judge(answers, expected_of(records(shape.items, whole)), touched)
    if wrong and any("meta" in name for name in touched):
        # With the newer meta page undone, the file is what it was before: that is a truth, too.
        older = judge(answers, expected_of(records(shape.older, whole)), touched)
        wrong = min(wrong, older, key=len)
    return touched, wrong, answers


# -- child processes ---------------------------------------------------------------------------------------------------


def seed_of(bases: list[Base], seed: int) -> tuple[Base, str, bytes]:
    rng = Rng(seed)
    base = bases[seed % len(bases)]
    what, damaged = damage(base.shape, rng)
    return base, what, damaged


def child(folder: Path, seeds: Iterable[int]) -> None:
    """One line before each seed, one after it."""
    native.compile_now()
    bases = [Base.load(folder, name) for name in json.loads((folder / "names").read_text())]
    path = os.fspath(folder / f"damaged-{os.getpid()}")
    for base in bases:  # everything is compiled and loaded
        touched, wrong, _ = examine(base, base.shape.raw, path)
        assert not touched, base.name
        assert not wrong, (base.name, wrong)
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for seed in seeds:
        os.write(1, b"at %d\n" % seed)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)  # its signal ends the process
        base, what, damaged = seed_of(bases, seed)
        touched, wrong, answers = examine(base, damaged, path)
        if wrong:
            touched |= base.shape.quiet(damaged)
        if what.endswith("renumbered"):
            touched.add("a copied page")
        signal.setitimer(signal.ITIMER_REAL, 0)
        names = Counter(answer.name for answer in answers.values() if isinstance(answer, Failed))
        report = {
            "seed": seed, "base": base.name, "what": what, "touched": sorted(touched), "wrong": wrong[:5],
            "errors": sorted(names), "opened": (None, "open") not in answers, "n": len(answers),
        }  # fmt: skip
        os.write(1, json.dumps(report).encode() + b"\n")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin
    os.write(1, json.dumps({"grown": grown << 10}).encode() + b"\n")
    os.unlink(path)


#: A report that is not a child's own.
NOBODY: dict[str, Any] = {"touched": [], "what": "?", "base": "?", "errors": []}


def tolerated(report: dict[str, Any]) -> bool:
    """Are the wrong answers such as no reader can tell from right ones?"""
    plainly = not any(": a foreign " in text or ": false alarm" in text for text in report["wrong"])
    return plainly and bool(UNTOLD & set(report["touched"]))


def batch(folder: Path, seeds: range) -> list[dict[str, Any]]:
    """Reports of these seeds; a dead child is a report, too, and another one goes on."""
    reports: list[dict[str, Any]] = []
    while seeds:
        words = [
            sys.executable,
            __file__,
            "--child",
            os.fspath(folder),
            *map(str, (seeds.start, seeds.stop, seeds.step)),
        ]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([HOME, os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        output, complaints = process.communicate(timeout=SECONDS * len(seeds) + 300)
        at = None
        for line in output.splitlines():
            if line.startswith("at "):
                at = int(line[3:])
            else:
                reports.append(json.loads(line))
        if process.returncode == 0:
            if complaints:  # compiled code cannot raise: what it says there is an error nobody sees
                reports.append({**NOBODY, "seed": seeds.start, "wrong": [f"said {complaints[-2000:]}"]})
            break
        if at is None:
            raise RuntimeError(f"the child did not begin: {complaints}")
        why = f"the child ended with status {process.returncode}: {complaints[-2000:]}"
        reports.append(
            {"seed": at, "wrong": [why], "touched": [], "what": "?", "base": "?", "died": True, "errors": []}
        )
        seeds = range(at + seeds.step, seeds.stop, seeds.step)
    return reports


def run(files: int, seed: int = 0, jobs: int = 1, batch_files: int = BATCH) -> list[dict[str, Any]]:
    """Reports of the seeds from `seed` on, and one of {"grown": bytes} per child."""
    from concurrent.futures import ThreadPoolExecutor

    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        folder = Path(name)
        (folder / "names").write_text(json.dumps(make_bases(folder)))
        parts = [range(at, min(at + batch_files, seed + files)) for at in range(seed, seed + files, batch_files)]
        with ThreadPoolExecutor(jobs) as pool:
            return list(itertools.chain.from_iterable(pool.map(lambda part: batch(folder, part), parts)))


def one(seed: int) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bases = [Base.load(folder, base) for base in make_bases(folder)]
        base, what, damaged = seed_of(bases, seed)
        print(base.name, "|", what)
        touched, wrong, answers = examine(base, damaged, os.fspath(folder / "damaged"))
        print("touched:", *sorted(touched), sep="\n  ")
        for text in sorted({f"{a.name}: {a.text}" for a in answers.values() if isinstance(a, Failed)}):
            print("raised", text[:300])
        for text in wrong:
            print("WRONG", text)
    return bool(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description="Read damaged LMDBs with pario.lmdb.")
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--one", type=int, metavar="SEED")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(Path(args.child[0]), range(*map(int, args.child[1:])))
        return 0
    if args.one is not None:
        return one(args.one)
    begin = time.monotonic()
    reports = run(args.files, args.seed, args.jobs)
    grown = max((report["grown"] for report in reports if "grown" in report), default=0)
    reports = [report for report in reports if "seed" in report]
    bad = [report for report in reports if report["wrong"]]
    silent = [report for report in bad if tolerated(report)]
    findings = [report for report in bad if not tolerated(report)]
    for report in findings:
        print(
            report["seed"], report["base"], report["what"][:150], report["touched"][:8], report["wrong"][:2], sep=" | "
        )
    kinds = Counter(" + ".join(sorted(set(report["touched"]) & UNTOLD)[:2]) for report in silent)
    errors = Counter(name for report in reports for name in report["errors"])
    raised = sum(bool(report["errors"]) for report in reports)
    print("errors raised, by files:", dict(errors.most_common()))
    print("wrong answers that no check tells from right ones, by what was changed:", dict(kinds.most_common(20)))
    print(
        f"{len(reports):,} damaged files in {time.monotonic() - begin:.0f} s: {raised:,} gave errors, "
        f"{len(reports) - raised - len(bad):,} right answers only, {len(silent):,} answers of the kinds above, "
        f"{len(findings):,} findings, {sum('died' in report for report in reports)} dead processes; "
        f"memory grew by {grown >> 20} MiB at most"
    )
    return bool(findings)


if __name__ == "__main__":
    raise SystemExit(main())
