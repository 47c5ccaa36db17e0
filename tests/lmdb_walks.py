"""Random walks: every reading call of pario.lmdb, compared with py-lmdb's on the very same file.

    python -m tests.lmdb_walks --calls 100000 [--seed 0] [--only dupfixed_3]

A call's answer is its value, with the type of every bytes and memoryview in it, or the name of the exception's class.
Where py-lmdb itself leaves a cursor's place undefined the walk positions both cursors again:

* after a seek that found nothing, also inside getmulti (py-lmdb's place is the slot where the key would be put);
* `first_dup` and `last_dup` after a move that found nothing (py-lmdb gives a value with an empty key);
* in data format 3, the moves onwards after `last`, `first_dup` (LMDB 1.0.2 lacks a correction that 0.9 has).
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb as real

import pario.lmdb as ours

Pairs = list[tuple[bytes, bytes]]
Rng = random.Random

#: py-lmdb's engines: LMDB 0.9 writes data format 1, LMDB 1.0 data format 3.
ENGINES = {1: 0, 3: 1}
MDB_REVERSEDUP = 0x40

# -- databases ---------------------------------------------------------------------------------------------------------


def name_of(rng: Rng, i: int) -> bytes:
    return (b"%d", b"%08d", b"key/%d")[i % 3] % i if i % 11 else rng.randbytes(1 + i % 40)


def small(rng: Rng) -> Pairs:
    return [(name_of(rng, i), rng.randbytes(rng.choice((0, 1, 7, 30, 100)))) for i in range(700)]


def large(rng: Rng) -> Pairs:
    sizes = (0, 3, 2020, 2030, 2040, 4080, 4096, 9000, 50_000)
    return [(b"%05d" % i, rng.randbytes(rng.choice(sizes))) for i in range(120)]


def deep(rng: Rng) -> Pairs:
    """Keys of 500 bytes, seven to a page: five levels."""
    return [(b"%06d" % rng.randrange(10**6) + bytes(500), b"%d" % i) for i in range(900)]


def dups(rng: Rng) -> Pairs:
    """One, a few (sub-pages), many duplicates (trees), and long ones (deep trees)."""
    found = []
    for i in range(60):
        many, most = ((1, 20), (rng.randrange(2, 20), 30), (400, 20), (150, 400))[0 if i % 3 == 0 else i % 17 % 4]
        found += [(b"k%d" % i, rng.randbytes(rng.randrange(1, most))) for _ in range(many)]
    return found


def fixed(width: int) -> Callable[[Rng], Pairs]:
    def pairs(rng: Rng) -> Pairs:
        found = []
        for i in range(50):
            many = 1 if i % 3 == 0 else 2500 if i == 10 else rng.randrange(2, 100)
            found += [(b"k%d" % i, rng.randbytes(width)) for _ in range(many)]
        return found

    return pairs


def integers(width: int) -> Callable[[Rng], Pairs]:
    def pairs(rng: Rng) -> Pairs:
        keys = [rng.getrandbits(8 * width - 1).to_bytes(width, sys.byteorder) for _ in range(500)]
        return [(key, rng.randbytes(i % 50)) for i, key in enumerate(keys)]

    return pairs


def integer_dups(width: int) -> Callable[[Rng], Pairs]:
    def pairs(rng: Rng) -> Pairs:
        keys = [rng.getrandbits(20) for _ in range(60)]
        many = [1 if i % 3 == 0 else 1500 if i == 10 else rng.randrange(2, 60) for i in range(60)]
        return [
            (key.to_bytes(8, sys.byteorder), rng.getrandbits(8 * width - 1).to_bytes(width, sys.byteorder))
            for key, n in zip(keys, many, strict=True)
            for _ in range(n)
        ]

    return pairs


def palindromes(rng: Rng) -> Pairs:
    """Duplicates of one order whether compared from the front or from the back."""
    triples = [bytes((a, b, a)) for a in range(40) for b in range(0, 250, 25)]
    return [(b"k%d" % i, v) for i in range(30) for v in rng.sample(triples, (1, 12, 300)[i % 3])]


def nothing(rng: Rng) -> Pairs:
    return []


#: name -> (flags of open_db, pairs in any order)
KINDS: dict[str, tuple[dict[str, bool], Callable[[Rng], Pairs]]] = {
    "small": ({}, small),
    "large": ({}, large),
    "deep": ({}, deep),
    "empty": ({}, nothing),
    "one": ({}, lambda rng: [(b"only", b"")]),
    "dups": ({"dupsort": True}, dups),
    "empty_dups": ({"dupsort": True}, nothing),
    "dupfixed_1": ({"dupsort": True, "dupfixed": True}, fixed(1)),
    "dupfixed_3": ({"dupsort": True, "dupfixed": True}, fixed(3)),
    "dupfixed_8": ({"dupsort": True, "dupfixed": True}, fixed(8)),
    "integerkey_4": ({"integerkey": True}, integers(4)),
    "integerkey_8": ({"integerkey": True}, integers(8)),
    "integerdup_4": ({"dupsort": True, "dupfixed": True, "integerdup": True, "integerkey": True}, integer_dups(4)),
    "integerdup_8": ({"dupsort": True, "dupfixed": True, "integerdup": True, "integerkey": True}, integer_dups(8)),
    "reversekey": ({"reverse_key": True}, small),
    "reversekey_dups": ({"reverse_key": True, "dupsort": True}, dups),
    "reversedup": ({"dupsort": True}, palindromes),  # with MDB_REVERSEDUP set in the file: no argument does it
}

#: Databases whose records are in the main database, by file.
MAINS: dict[str, Callable[[Rng], Pairs]] = {
    "mixed": lambda rng: small(rng)[:300],  # beside all the KINDS
    "main_large": large,
    "main_deep": deep,
    "main_empty": nothing,
}

#: (file, database) of every walk
PLACES = [("mixed", name.encode()) for name in KINDS] + [(name, None) for name in MAINS]


def make(folder: Path, file: str, version: int) -> str:
    """The data file, written once per folder."""
    path = folder / f"{file}-{version}.mdb"
    if path.exists():
        return os.fspath(path)
    half = os.fspath(path) + ".half"
    rng = Rng(f"{file} {version}")
    options: dict[str, Any] = {"map_size": 1 << 28, "max_dbs": 32, "sync": False, "lock": False}
    env = real.open(half, subdir=False, lib_version=ENGINES[version], **options)
    with env.begin(write=True) as txn:
        for key, value in MAINS[file](rng):
            txn.put(key, value)
    if file == "mixed":
        for name, (flags, pairs) in KINDS.items():
            db = env.open_db(name.encode(), **flags)
            records = pairs(rng)
            rng.shuffle(records)
            gone = rng.sample(records, len(records) // 10)
            with env.begin(write=True, db=db) as txn:
                for key, value in records:
                    txn.put(key, value)
            with env.begin(write=True, db=db) as txn:
                for key, value in gone:
                    txn.delete(key, value if flags.get("dupsort") else b"")
    env.close()
    if file == "mixed":
        _set_reversedup(half, version)
    os.rename(half, path)
    return os.fspath(path)


def _set_reversedup(path: str, version: int) -> None:
    """Give the database "reversedup" its flag: in its record, wherever copies of that lie in the file."""
    raw = bytearray(Path(path).read_bytes())
    name = b"reversedup" + (b"\0\0" if version == 3 else b"")
    at, found = raw.find(name), 0
    while at >= 0:
        flags = at + len(name) + 4
        if struct.unpack_from("=H", raw, flags)[0] == 0x04:
            struct.pack_into("=H", raw, flags, 0x04 | MDB_REVERSEDUP)
            found += 1
        at = raw.find(name, at + 1)
    assert found
    Path(path).write_bytes(raw)


# -- answers -----------------------------------------------------------------------------------------------------------


def plain(thing: Any) -> Any:
    """A value that can be compared and kept: memoryviews as ("memoryview", read-only, bytes)."""
    if isinstance(thing, memoryview):
        return ("memoryview", thing.readonly, thing.tobytes())
    if isinstance(thing, (tuple, list)):
        return type(thing)(map(plain, thing))
    return thing


def answer(call: Callable[[], Any]) -> Any:
    """What a call returns, or the name of its error."""
    try:
        return plain(call())
    except Exception as e:
        return f"raises {type(e).__name__}"


def shown(entry: Any) -> str:
    """A line of the log, long keys cut."""
    texts = map(repr, entry)
    return ", ".join(text if len(text) < 80 else f"{text[:60]} ... {len(text)}" for text in texts)


class Difference(AssertionError):
    """pario.lmdb answered otherwise than py-lmdb."""


MOVES = ("first", "last", "next", "prev", "next_dup", "prev_dup", "next_nodup", "prev_nodup")
DUP_ENDS = ("first_dup", "last_dup")
SEEKS = ("set_key", "set_range", "set_key_dup", "set_range_dup", "get")
ITERATORS = ("iternext", "iterprev", "iternext_dup", "iterprev_dup", "iternext_nodup", "iterprev_nodup")
#: What `info()` tells that does not speak of maps and readers.
INFO = ("map_size", "last_pgno", "last_txnid", "max_readers")

#: Arguments of getmulti that contradict each other.
WRONG_FLAGS: tuple[dict[str, Any], ...] = (
    {"keyfixed": True},
    {"dupfixed_bytes": 3},
    {"dupfixed_bytes": -1, "dupdata": True},
    {"values": False, "dupdata": True},
    {"keyfixed": True, "dupdata": True},
)

#: How many items are taken from an iterator before something else happens.
STEPS = (0, 1, 1, 2, 3, 5, 8, 10, 20, 40, 600)

#: What is known of where the cursor is.
HERE, OFF, LOST = "here", "off", "lost"


class Walk:
    """The same calls on py-lmdb and pario. `calls` counts them by name; a difference raises Difference."""

    def __init__(self, path: str, db: bytes | None, version: int, seed: int, **options: Any) -> None:
        self.rng = Rng(seed)
        self.version = version
        self.title = f"{os.path.basename(path)} {db!r} format {version} seed {seed}"
        self.calls: Counter[str] = Counter()
        self.log: list[Any] = []
        self.envs = (
            real.open(path, subdir=False, readonly=True, lock=False, max_dbs=32),
            ours.open(path, subdir=False, readonly=True, lock=False, max_dbs=32, **options),
        )
        self.dbs = tuple(env.open_db(db, create=False) for env in self.envs)
        self.flags = self.dbs[0].flags()
        self.dupsort = self.flags["dupsort"]
        with self.envs[0].begin(db=self.dbs[0]) as txn:
            self.pairs = [(bytes(k), bytes(v)) for k, v in txn.cursor()]
        self.keys = sorted({key for key, _ in self.pairs})
        self.begin()

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def begin(self) -> None:
        self.buffers = self.rng.random() < 0.4
        self.txns = tuple(e.begin(db=d, buffers=self.buffers) for e, d in zip(self.envs, self.dbs, strict=True))
        self.cursors = tuple(t.cursor() for t in self.txns)
        self.log.append(("begin", self.buffers))
        self.place, self.at_end = OFF, False
        self.iterators: list[tuple[Any, Any]] = []

    def same(self, what: str, things: tuple[Any, Any], call: Callable[[Any], Any], *notes: Any) -> Any:
        """One call on both."""
        self.calls[what] += 1
        self.log.append((what, *notes))
        del self.log[:-40]
        theirs, mine = (answer(lambda t=thing: call(t)) for thing in things)
        if mine != theirs or type(mine) is not type(theirs):
            last = "\n  ".join(map(shown, self.log))
            raise Difference(f"{self.title}: after\n  {last}\npy-lmdb: {theirs!r:.400}\npario:   {mine!r:.400}")
        return mine

    def cursor(self, what: str, *arguments: Any, **named: Any) -> Any:
        return self.same(what, self.cursors, lambda c: getattr(c, what)(*arguments, **named), *arguments, named)

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        kind = self.rng.random()
        if self.place == LOST:
            self.position()
        elif kind < 0.42:
            self.move()
        elif kind < 0.62:
            self.seek()
        elif kind < 0.75:
            self.iterate()
        elif kind < 0.80:
            self.getmulti()
        elif kind < 0.90:
            self.of_txn()
        elif kind < 0.92:
            self.mistake()
        elif kind < 0.925:
            self.end()
        elif kind < 0.94:
            self.cursors = self.same("cursor", self.txns, lambda t: None) or tuple(t.cursor() for t in self.txns)
            self.place, self.at_end, self.iterators = OFF, False, []
        if self.place != LOST:
            self.look()

    def look(self) -> None:
        self.cursor(self.rng.choice(("item", "item", "key", "value")))
        if self.rng.random() < 0.2:
            self.cursor("count")

    def position(self) -> None:
        """Both stand somewhere again."""
        if self.keys and self.rng.random() < 0.5:
            found = self.cursor("set_key", self.rng.choice(self.keys))
            self.at_end = False
        else:
            what = self.rng.choice(("first", "last"))
            found = self.cursor(what)
            self.at_end = what == "last"
        self.place = HERE if found is True else OFF

    def move(self) -> None:
        what = self.rng.choice(MOVES + DUP_ENDS if self.place == HERE else MOVES)
        if what in DUP_ENDS and self.version == 3 and self.at_end:
            what = "next"
        self.moved(what, self.cursor(what))

    def moved(self, what: str, found: Any) -> None:
        self.place = HERE if found is True else OFF
        if what.startswith(("last", "prev")) or found is not True:
            self.at_end = True  # perhaps
        elif what == "first":
            self.at_end = False

    def some_key(self) -> bytes:
        rng = self.rng
        if not self.keys:
            return bytes(8)
        key = rng.choice(self.keys)
        chance = rng.random()
        if chance < 0.7:
            return key
        if self.flags["integerkey"]:
            return rng.randbytes(len(key) - 1) + b"\0" if chance < 0.9 else bytes(map(lambda x: x ^ 1, key))
        near = (key[:-1], key + b"\0", key[:-1] + rng.randbytes(1), rng.randbytes(3), key + bytes(600))
        return rng.choice(near)

    def some_value(self, key: bytes) -> bytes:
        rng = self.rng
        if not self.pairs:
            return bytes(8)
        _, value = rng.choice(self.pairs)
        if rng.random() < 0.6:
            values = [v for k, v in self.pairs if k == key] or [value]
            value = rng.choice(values)
        if rng.random() < 0.3:
            same_width = self.flags["integerdup"] or self.flags["dupfixed"]
            value = rng.randbytes(len(value)) if same_width else value[:-1] + rng.randbytes(1)
        return value

    def given(self, key: bytes) -> Any:
        """A key as callers have it: bytes mostly."""
        return self.rng.choice((bytes, bytes, bytes, bytearray, memoryview))(key) if self.rng.random() < 0.2 else key

    def seek(self) -> None:
        what = self.rng.choice(SEEKS)
        key = self.some_key()
        if what.endswith("_dup"):
            found = self.cursor(what, self.given(key), self.given(self.some_value(key)))
        elif what == "get":
            found = self.cursor(what, key, *self.rng.choice(((), (b"none",), (None,))))
            found = self.same("key", self.cursors, lambda c: bytes(c.key())) != b""
        else:
            found = self.cursor(what, self.given(key) if self.rng.random() < 0.95 or what == "set_key" else b"")
        self.place = HERE if found is True else LOST
        self.at_end = False

    def getmulti(self) -> None:
        rng = self.rng
        keys = [self.some_key() for _ in range(rng.randrange(6))]
        named: dict[str, Any] = {}
        choice = rng.random()
        if choice < 0.25:
            named["values"] = False
        elif choice < 0.6 and self.dupsort:
            named["dupdata"] = True
            if self.flags["dupfixed"] and choice < 0.5:
                named["dupfixed_bytes"] = len(self.pairs[0][1]) if self.pairs else 4
                named["keyfixed"] = rng.random() < 0.5
        elif choice < 0.65 and not self.dupsort and len(self.pairs) < 1000:
            named["dupdata"] = True
        elif choice < 0.7:
            named.update(rng.choice(WRONG_FLAGS))
        keyform: Callable[[list[bytes]], Any] = rng.choice((list, tuple, iter))
        self.same("getmulti", self.cursors, lambda c: c.getmulti(keyform(keys), **named), keys, named)
        self.place = LOST

    def iterate(self) -> None:
        rng = self.rng
        if not self.iterators or rng.random() < 0.6:
            what = rng.choice(ITERATORS)
            flags = rng.choice(({}, {"keys": False}, {"values": False}, {"keys": True, "values": True}))
            if rng.random() < 0.1:
                backwards = rng.random() < 0.5
                self.iterators = []
                both = self.pair_of("_iter_from", self.some_key(), backwards)
                what = "iterprev" if backwards else "iternext"
            else:
                both = self.pair_of(what, **flags)
            if both is None:
                return
            self.iterators = [*self.iterators[-1:], both]
            if what.startswith("iterprev"):
                self.at_end = True
        both = rng.choice(self.iterators)
        # What _iter_from gives where there is nothing has ended: py-lmdb's would begin when the cursor is moved.
        fresh = self.log[-1][0] == "_iter_from"
        for i in range(rng.choice(STEPS) or fresh):
            found = self.same("next()", both, lambda it: next(it))
            self.place = OFF if found == "raises StopIteration" else HERE
            if self.place == OFF:
                self.at_end = True
                if fresh and i == 0:
                    self.place = LOST
                # py-lmdb's would go on when the cursor is moved; a Python iterator that has ended does not.
                self.iterators.remove(both)
                break
            if i % 64 == 63 or rng.random() < 0.02:
                self.look()
            if rng.random() < 0.02:
                # Somebody moves the cursor meanwhile.
                self.move()
                if self.place != HERE:
                    break

    def pair_of(self, what: str, *arguments: Any, **named: Any) -> tuple[Any, Any] | None:
        """An iterator of each."""
        made: list[Any] = []

        def make(cursor: Any) -> str:
            made.append(getattr(cursor, what)(*arguments, **named))
            return "an iterator"

        self.same(what, self.cursors, make, *arguments, named)
        if what == "_iter_from":
            self.place, self.at_end = HERE, True
        return (made[0], made[1]) if len(made) == 2 else None

    def of_txn(self) -> None:
        """Calls of the transaction and the environment; the cursor stays where it is."""
        rng = self.rng
        choice = rng.randrange(12)
        if choice < 6:
            key = self.given(self.some_key())
            rest = rng.choice(((), (b"none",), ((),)))
            self.same("Transaction.get", self.txns, lambda t: t.get(key, *rest), key)
        elif choice == 6:
            self.same("Transaction.stat", self.txns, lambda t: t.stat())
        elif choice == 7:
            both = tuple(zip(self.txns, self.dbs, strict=True))
            self.same("Transaction.stat", both, lambda b: b[0].stat(b[1]))
            key = self.some_key()
            self.same("Transaction.get", both, lambda b: b[0].get(key, db=b[1]))
        elif choice == 8:
            self.same("Environment.stat", self.envs, lambda e: e.stat())
            self.same("Transaction.id", self.txns, lambda t: t.id())
        elif choice == 9:
            self.same("Environment.dbs", self.envs, lambda e: e.dbs())
            self.same("Environment.info", self.envs, lambda e: [e.info()[name] for name in INFO])
        elif choice == 10:
            name = rng.choice((*(n.encode() for n in KINDS), b"no such database", b"k"))
            both = tuple((e, t) for e, t in zip(self.envs, self.txns, strict=True))
            self.same("open_db", both, lambda b: b[0].open_db(name, txn=b[1], create=False).flags(), name)
        else:
            self.same("_Database.flags", self.dbs, lambda d: d.flags())

    def mistake(self) -> None:
        """Wrong arguments."""
        rng = self.rng
        wrong: Any = rng.choice(("text", None, 7, 1.5, b""))
        choice = rng.randrange(7)
        if choice == 0:
            self.same("Transaction.get", self.txns, lambda t: t.get(wrong), wrong)
        elif choice == 1:
            self.cursor("set_key", wrong)
            self.place = LOST
        elif choice == 2:
            self.cursor("set_range", wrong if wrong != b"" else None)
            self.place = LOST
        elif choice == 3:
            # None means "empty" to py-lmdb's calls with two arguments, by chance: not documented.
            self.cursor("set_key_dup", self.some_key(), wrong if wrong is not None else 7)
            self.place = LOST
        elif choice == 4:
            self.cursor("set_range_dup", wrong if wrong is not None else 7, b"x")
            self.place = LOST
        elif choice == 5:
            self.same("getmulti", self.cursors, lambda c: c.getmulti([wrong]), wrong)
            self.place = LOST
        else:
            self.same("put", self.txns, lambda t: t.put(b"a", b"b"))
            self.same("delete", self.txns, lambda t: t.delete(b"a"))
            # py-lmdb then looks at the cursor's hidden place again, even if the last move found nothing.
            self.place = LOST

    def end(self) -> None:
        """The transaction or cursor ends; its parts must say so."""
        what = self.rng.choice(("abort", "commit", "close", "exit"))
        if what == "close":
            self.cursor("close")
        elif what == "exit":
            self.same("__exit__", self.txns, lambda t: t.__exit__(None, None, None))
        else:
            self.same(what, self.txns, lambda t: getattr(t, what)())
        for call in self.rng.sample((*MOVES, "item", "key", "value", "count"), 4):
            self.cursor(call)
        self.cursor("set_key", b"k")
        for both in self.iterators:
            self.same("next()", both, lambda it: next(it))
        if what != "close":
            self.same("Transaction.get", self.txns, lambda t: t.get(b"k"))
            self.same("Transaction.stat", self.txns, lambda t: t.stat())
            self.same("abort", self.txns, lambda t: t.abort())
        else:
            for txn in self.txns:
                txn.abort()
        self.begin()


def run(folder: Path, calls: int, seed: int = 0, only: str | None = None) -> Counter[str]:
    """Walks over every database of both formats in turn, until so many calls have been compared."""
    wanted = [
        (file, db, version)
        for version in ENGINES
        for file, db in PLACES
        if only is None or only in (file, (db or b"").decode())
    ]
    done: Counter[str] = Counter()
    per_walk = max(calls // len(wanted), 1)
    for round_ in itertools.count():
        for file, db, version in wanted:
            done += walked(make(folder, file, version), db, version, seed + round_, per_walk)
        if done.total() >= calls:
            return done
    raise AssertionError


def walked(path: str, db: bytes | None, version: int, seed: int, calls: int) -> Counter[str]:
    """One walk of at least so many calls. Every third has a cache of few pages."""
    options = {"cache_bytes": 0} if seed % 3 == 2 else {}
    walk = Walk(path, db, version, seed, **options)
    try:
        while walk.calls.total() < calls:
            walk.step()
    finally:
        walk.close()
    return walk.calls


def lines(done: Counter[str]) -> Iterator[str]:
    for what, n in done.most_common():
        yield f"{n:10,}  {what}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Random walks over LMDBs: pario.lmdb against py-lmdb, call by call.")
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one kind of database")
    args = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = run(Path(folder), args.calls, args.seed, args.only)
    print("\n".join(lines(done)))
    print(f"{done.total():,} calls on {2 * len(PLACES)} databases in {time.monotonic() - begin:.0f} s: no difference")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
