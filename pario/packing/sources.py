"""What a path is that shall be packed: an LMDB, a folder tree or a tar; and several of them as one.

A source is described first, which reads little: by `identity` a partial file knows whether it is still the same one.
Then all ranks open it.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from pario.codec.packing import Packing
from pario.comm.base import AnyWorld, on_root, together
from pario.errors import FileError, InvalidError, MissingError, OptionError, SnapshotError
from pario.fetch.resolve import resolve
from pario.format.layout import MDB_DUPFIXED, MDB_DUPSORT, MDB_INTEGERDUP, MDB_INTEGERKEY, MDB_REVERSEDUP
from pario.format.meta import SNIFF_BYTES, Snapshot, sniff
from pario.format.tree import list_names
from pario.packing.folder import FileItems, Tree, read_tree
from pario.packing.items import Database, Items, databases_of, open_items
from pario.packing.tars import MemberItems, inflate, is_compressed, is_tar, read_members
from pario.records import Records
from pario.text import counted

#: Of an LMDB or a tar.
_ENDING = re.compile(r"(.+?)\.(?:lmdb|mdb|t(?:gz|bz2|xz|zst)|tar(?:\.(?:gz|bz2|xz|zst|lz4))?)", re.DOTALL)


@dataclass
class Opened:
    """A source that all ranks have open.

    databases : (name, records) of each database, the main one (None) first
    more, parts : what the reserved entry of the main database keeps of it beside the values
    """

    databases: list[tuple[bytes | None, Items]]
    more: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, bytes] = field(default_factory=dict)

    def close(self) -> None:
        for _, items in self.databases:
            items.close()


class Source(ABC):
    """What one path means. Local, but for `open`.

    kind : "lmdb", "folder" or "tar"
    identity : tells whether it has changed; plain data for JSON
    in_folder : an LMDB that is a folder with data.mdb
    """

    kind: str
    in_folder = False

    def __init__(self, path: str, identity: dict[str, Any]) -> None:
        self.path = path
        self.identity = {"kind": self.kind, "path": os.path.abspath(path), **identity}

    @property
    def name(self) -> str:
        """The last part of the path, without the ending of an LMDB or a tar."""
        name = os.path.basename(os.path.abspath(self.path))
        if name == "data.mdb":
            name = os.path.basename(os.path.dirname(os.path.abspath(self.path)))
        found = _ENDING.fullmatch(name)
        return found[1] if found else name

    def warnings(self) -> list[str]:
        """What of it is not packed."""
        return []

    @abstractmethod
    def open(self, world: AnyWorld, scratch: str) -> Opened:
        """Collective. scratch : a folder of ours. Raises FileError on all ranks."""


class LmdbSource(Source):
    """The databases of an LMDB: the named ones of `dbs`, or all that py-lmdb can create."""

    kind = "lmdb"

    def __init__(self, path: str, dbs: Sequence[str] = ()) -> None:
        file = resolve(path)
        snapshot, found = databases_of(file, [os.fsencode(name) for name in dbs] or None)
        self._txnid = snapshot.txnid
        status = os.stat(file)
        self.in_folder = os.path.isdir(path)
        told = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "txnid": snapshot.txnid}
        super().__init__(path, {**told, "databases": list(dbs)} if dbs else told)
        main = found[0]._replace(records=0) if dbs else found[0]
        refused = [(one, why) for one in (main, *found[1:]) if (why := _refusal(one, snapshot)) is not None]
        left_out = [one for one, _ in refused]
        self._databases = [main._replace(records=0) if main in left_out else main]
        self._databases += [one for one in found[1:] if one not in left_out]
        self._left_out = [f"{path}: left out: {why.what}. {why.hint}" for _, why in refused]
        if refused and not any(one.records for one in self._databases):
            raise refused[0][1]

    def warnings(self) -> list[str]:
        return self._left_out

    def open(self, world: AnyWorld, scratch: str) -> Opened:
        opened = Opened([])
        with ExitStack() as stack:
            stack.callback(opened.close)
            for database in self._databases:
                opened.databases.append((database.name, open_items(database, world)))
            with together(world, "opening the source"):
                self._check_same(opened)
            stack.pop_all()
        packing: Packing | None = getattr(opened.databases[0][1], "packing", None)
        if packing is not None:  # what it was packed from is that of the new one, too
            own = ("prediction", "pario", "block")
            opened.more = {name: told for name, told in packing.more.items() if name not in own}
            opened.parts = packing.parts if world.rank == 0 else {}
        return opened

    def _check_same(self, opened: Opened) -> None:
        """Each database is opened by itself."""
        for _, items in opened.databases:
            if items.txnid not in (None, self._txnid):
                told = f"it was written to while it was opened: transaction {items.txnid} follows {self._txnid}"
                hint = "Give the command again when nobody writes to it."
                raise SnapshotError(told, path=self._databases[0].path, hint=hint)


class FolderSource(Source):
    """A folder tree."""

    kind = "folder"

    def __init__(self, path: str, tree: Tree) -> None:
        self._tree = tree
        listed = repr((self._tree.rows, self._tree.sizes)).encode()
        super().__init__(path, {"names": len(self._tree.rows), "listing": xxh3_128_hexdigest(listed)})

    def warnings(self) -> list[str]:
        return [f"{self.path}: {line}" for line in self._tree.told()]

    def open(self, world: AnyWorld, scratch: str) -> Opened:
        items = FileItems(self.path, self._tree)
        return Opened([(None, items)], {"source": self.kind}, {"tree": self._tree.part()} if world.rank == 0 else {})


class TarSource(Source):
    """A tar, compressed or not."""

    kind = "tar"

    def __init__(self, path: str, hashed: bool) -> None:
        status = os.stat(path)
        self._hashed = hashed
        super().__init__(path, {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns})

    def open(self, world: AnyWorld, scratch: str) -> Opened:
        path = self.path
        if compressed := world.bcast(is_compressed(path) is not None if world.rank == 0 else None):
            path = os.path.join(scratch, f"{zlib.crc32(os.fsencode(path)):08x}.tar")
        with together(world, "reading the tar"):
            if world.rank == 0 and compressed:
                inflate(self.path, path)
        members = on_root(world, "reading the tar", lambda: read_members(path, self._hashed))
        with together(world, "opening the tar"):
            items = MemberItems(path, members)
            opened = Opened([(None, items)], {"source": self.kind}, items.parts() if world.rank == 0 else {})
        return opened


class SeveralSources(Source):
    """Several sources, in one database."""

    kind = "several"

    def __init__(self, sources: Sequence[Source], prefix: bool) -> None:
        self._sources = list(sources)
        self._prefix = prefix
        self.path = ", ".join(source.path for source in sources)
        self.identity = {"kind": self.kind, "prefix": prefix, "sources": [source.identity for source in sources]}
        names = [source.name for source in sources]
        twice = [name for name in names if names.count(name) > 1]
        if prefix and twice:
            paths = [source.path for source in sources if source.name == twice[0]]
            told = f"{paths[0]} and {paths[1]} have the same name, so that their keys would have the same prefix"
            raise OptionError(told, hint="Rename one, or use --no-prefix if no key is in both.")

    def warnings(self) -> list[str]:
        return [line for source in self._sources for line in source.warnings()]

    def open(self, world: AnyWorld, scratch: str) -> Opened:
        with ExitStack() as stack:
            each = [stack.enter_context(closing(source.open(world, scratch))) for source in self._sources]
            with together(world, "joining the sources"):
                merged = self._merged(each)
            stack.pop_all()
        return merged

    def _merged(self, each: Sequence[Opened]) -> Opened:
        given: list[tuple[str, bytes, Items]] = []
        told: list[dict[str, Any]] = []
        parts: dict[str, bytes] = {}
        files = own_names([os.path.basename(os.path.abspath(source.path)) for source in self._sources])
        for number, (source, opened) in enumerate(zip(self._sources, each, strict=True)):
            filled = [(name, items) for name, items in opened.databases if items.n or name is not None]
            if any(name is not None or items.flags for name, items in filled):
                raise OptionError(
                    "an LMDB with named databases, duplicates or keys of an order of their own cannot be one of "
                    "several sources",
                    path=source.path,
                    hint="Pack it by itself.",
                )
            if source.kind == "lmdb" and "source" in opened.more:
                raise OptionError(
                    f"packed from {opened.more['source']}, of which it keeps more than keys and values, it cannot be "
                    "one of several sources",
                    path=source.path,
                    hint="Pack it by itself, or unpack it first.",
                )
            prefix = os.fsencode(source.name) + b"/" if self._prefix else b""
            given.append((source.path, prefix, opened.databases[0][1]))
            told.append({"source": source.kind, "name": source.name, "prefix": os.fsdecode(prefix)})
            told[-1] |= {"in_folder": source.in_folder, "file": files[number]}
            parts |= {f"{number}.{name}": part for name, part in opened.parts.items()}
        items = Merged(given)
        parts["owners"] = zlib.compress(items.owners.astype("<u4").tobytes(), 6)
        return Opened([(None, items)], {"source": self.kind, "sources": told}, parts)


def describe(
    paths: Sequence[str], *, prefix: bool = True, follow: bool = True, hashed: bool = False, dbs: Sequence[str] = ()
) -> Source:
    """The source that these paths mean. Local. Raises FileError, OptionError.

    follow, hashed : of folders and tars, see `read_tree`; dbs : of LMDBs, see `LmdbSource`
    """
    sources = [_describe(path, follow, hashed, tuple(dict.fromkeys(dbs))) for path in paths]
    if dbs and (other := next((source for source in sources if source.kind != "lmdb"), None)):
        raise OptionError(f"--db names a database of an LMDB, and this is a {other.kind}", path=other.path)
    return sources[0] if len(sources) == 1 else SeveralSources(sources, prefix)


def _describe(path: str, follow: bool, hashed: bool, dbs: Sequence[str]) -> Source:
    path = os.path.expanduser(path)
    try:
        mode = os.stat(path).st_mode
    except OSError as e:
        raise MissingError(f"cannot look at it: {e.strerror}", path=path) from None
    if stat.S_ISDIR(mode):
        if os.path.exists(os.path.join(path, "data.mdb")):
            return LmdbSource(path, dbs)
        return FolderSource(path, read_tree(path, follow=follow, hashed=hashed))
    if not stat.S_ISREG(mode):
        raise FileError("neither a file nor a folder", path=path)
    try:
        with open(path, "rb") as file:
            head = file.read(SNIFF_BYTES)
        if sniff(head) is not None:
            return LmdbSource(path, dbs)
        if is_tar(path):
            return TarSource(path, hashed)
    except OSError as e:
        raise FileError(f"cannot read it: {e.strerror}", path=path) from e
    hint = "SRC is an LMDB (a file, or a folder with data.mdb), a folder, or a tar, compressed or not."
    raise InvalidError("neither an LMDB nor a tar", path=path, hint=hint)


def _refusal(database: Database, snapshot: Snapshot) -> OptionError | None:
    """The error of a database that py-lmdb cannot create; None: it can."""
    integers = database.flags & (MDB_INTEGERKEY | MDB_INTEGERDUP)
    if database.name is None and database.flags and database.records:
        what = "the records of the main database, which has flags of its own"
    elif database.flags & MDB_DUPSORT and database.flags & MDB_REVERSEDUP:
        what = f"database {list_names([database.name or b''])}, whose duplicates are compared from the end"
    elif database.flags & MDB_INTEGERDUP and not database.flags & MDB_DUPFIXED:
        what = f"database {list_names([database.name or b''])}, whose duplicates are integers of several sizes"
    elif integers and snapshot.byteorder != sys.byteorder:
        what = f"database {list_names([database.name or b''])}, whose integers are in the byte order of another machine"
    else:
        return None
    hint = "Copy it into a named database, or one without that flag, first."
    return OptionError(f"{what}, which py-lmdb cannot create", path=database.path, hint=hint)


# -- several sources as one database, and one of them out of it again --------------------------------------------------


def own_names(names: Sequence[str]) -> list[str]:
    """A name for each, no two alike, for files in one folder: one that occurs twice gets numbers before it."""
    times, taken, found = Counter(names), set(names), []
    for number, name in enumerate(names):
        if times[name] > 1:
            while name in taken:
                name = f"{number}-{name}"
            taken.add(name)
        found.append(name)
    return found


class Merged(Items):
    """The records of several sources in the order of their keys, each with its source's prefix before it.

    owners : u32[n], which source each record comes from
    Raises OptionError, which names both, if two have a key in common.
    """

    def __init__(self, parts: Sequence[tuple[str, bytes, Items]]) -> None:
        """parts : (path, prefix, records) of each source."""
        self._parts = [items for _, _, items in parts]
        self._prefixes = [prefix for _, prefix, _ in parts]
        self.n = sum(items.n for items in self._parts)
        prefixes = set(self._prefixes)
        if len(prefixes) == len(parts):  # none is the beginning of another one, since each ends at its only slash
            order = sorted(range(len(parts)), key=self._prefixes.__getitem__)
            self.owners = np.repeat(np.array(order, np.uint32), [parts[k][2].n for k in order])
            self._ids = np.concatenate([np.arange(parts[k][2].n) for k in order]) if order else np.empty(0, np.int64)
        else:
            self._merge(parts)
        self.sizes = np.empty(self.n, np.int64)
        for number, items in enumerate(self._parts):
            mine = self.owners == number
            self.sizes[mine] = items.sizes[self._ids[mine]]

    def _merge(self, parts: Sequence[tuple[str, bytes, Items]]) -> None:
        keyed = sorted(
            (prefix + key, number, record)
            for number, (_, prefix, items) in enumerate(parts)
            for record, key in enumerate(items.keys(0, items.n))
        )
        twice = [(a, b) for a, b in pairwise(keyed) if a[0] == b[0]]
        if twice:
            (key, one, _), (_, other, _) = twice[0]
            a, b = parts[one][0], parts[other][0]
            told = f"{counted(len(twice), 'key is', 'keys are')} in two sources: {key!r} is in {a} and in {b}"
            hint = "Leave --no-prefix out, so that the keys begin with the names of their sources."
            raise OptionError(told, hint=hint)
        self.owners = np.fromiter((number for _, number, _ in keyed), np.uint32, len(keyed))
        self._ids = np.fromiter((record for _, _, record in keyed), np.int64, len(keyed))

    def keys(self, begin: int, stop: int) -> list[bytes]:
        keys = []
        for number, record in zip(self.owners[begin:stop].tolist(), self._ids[begin:stop].tolist(), strict=True):
            keys.append(self._prefixes[number] + self._parts[number].keys(record, record + 1)[0])
        return keys

    def read(self, ids: np.ndarray) -> Records:
        owners = self.owners[ids]
        values: list[bytes] = [b""] * len(ids)
        for number in np.unique(owners).tolist():
            rows = np.flatnonzero(owners == number)
            for row, value in zip(rows.tolist(), self._parts[number].read(self._ids[ids[rows]]), strict=True):
                values[row] = value.tobytes()
        return Records.of(ids, values)

    def close(self) -> None:
        for items in self._parts:
            items.close()


class Subset(Items):
    """Chosen records of a database, their keys without a prefix; `close` is not passed on."""

    def __init__(self, items: Items, ids: np.ndarray, prefix: bytes) -> None:
        self._items = items
        self._ids = ids.astype(np.int64)
        self._prefix = prefix
        self.n = len(ids)
        self.sizes = items.sizes[self._ids]

    def keys(self, begin: int, stop: int) -> list[bytes]:
        found = [self._items.keys(record, record + 1)[0] for record in self._ids[begin:stop].tolist()]
        return [key.removeprefix(self._prefix) for key in found]

    def read(self, ids: np.ndarray) -> Records:
        got = self._items.read(self._ids[ids])
        return Records(ids, got.data, got.starts, got.nbytes)
