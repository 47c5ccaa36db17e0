"""The records of one or several LMDBs as a tree of folders and files, read-only. docs/files.md says what users see.

    Tree      names a folder per LMDB; or one LMDB is the root
      Database    one of its databases: keys cut at / make folders, a named database is one itself
        Keys          the B+-tree: one descent finds a record, and one skips a folder
        Listed        of a packed folder or tar: its own names, with links, empty folders, modes and times

Of other LMDBs nothing is kept per record: a look-up searches the tree of the LMDB, and a listing walks over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from errno import ENOTDIR
from os import PathLike, fspath, strerror
from stat import S_ISDIR, S_ISREG
from typing import Any, NamedTuple

import xxhash

from pario.codec.listing import UNKNOWN_TIME
from pario.errors import ClosedError, CorruptedError, DatabaseError, OptionError
from pario.fetch.posix import PosixFetcher
from pario.fetch.resolve import open_dataset
from pario.fetch.snapshot import read_snapshot
from pario.files.database import Database, as_bytes, served_copy
from pario.files.folders import Namer, has_prefix, is_folder, parts_of
from pario.files.keys import Leaf
from pario.files.listed import Listed
from pario.files.names import DATABASE_MARK, EXTENSIONS, LONGEST, RECORD_MARK, is_plain, name_of
from pario.format.layout import F_BIGDATA, F_SUBDATA

FILE, FOLDER, LINK = "file", "folder", "link"

_ROOT = 1


class _Folder(NamedTuple):
    """Records whose keys begin with `prefix`.

    db : None for the root above several LMDBs, and for a named database that is `refused`, whose key is `prefix`
    """

    db: Database | None
    prefix: bytes = b""
    refused: DatabaseError | None = None


class _File(NamedTuple):
    """Item `item` of leaf page `pgno`."""

    db: Database
    pgno: int
    item: int


class _Name(NamedTuple):
    """Of a packed folder: a file or a link, by its number in `db.listed`."""

    db: Database
    i: int


class Node(NamedTuple):
    """A file or a folder; of a packed folder or tar, a symbolic link, too.

    kind : "file", "folder" or "link"
    number : the same whenever this Tree is asked; an inode number, which names of one file have in common
    size : bytes; 0 of folders
    mtime_ns : since 1970, of the LMDB, or as a packed folder says
    where : the tree's own; of a file it tells which record it is
    mode : permissions; None: nobody has said any
    links : names of this file
    target : of a link, its text
    """

    kind: str
    number: int
    size: int
    mtime_ns: int
    where: Any = None
    mode: int | None = None
    links: int = 1
    target: bytes = b""


class Tree:
    """Records as files. Paths are relative to the root, "" is the root itself; any thread.

    Parameters
    ----------
    sources : name of a folder in the root -> LMDB, its folder or its data file. With a single source the name may be
        "": its records lie in the root itself
    extensions : names get the extension that programs expect of their data (names.py). A listing then reads the
        beginning of each record

    Everything is of the state that each LMDB had when it was opened. All methods raise SnapshotError once a writer
    may have changed that, CorruptedError for damage, ReadError where the storage refuses, ClosedError after `close`.
    """

    def __init__(self, sources: Mapping[str, str | PathLike[str]], *, extensions: bool = False) -> None:
        _check_names(list(sources))
        self._namer = Namer(extensions)
        self._below: dict[tuple[int, bytes], Node] = {}
        self._roots: dict[str, Node] | None = {}
        for name, path in sorted(sources.items()):
            self._roots[name] = _root_of(name, fspath(path))

    def close(self) -> None:
        """Idempotent. Reads of other threads end as they would have."""
        self._roots = None

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- looking up ----------------------------------------------------------------------------------------------------

    def find(self, path: str) -> Node:
        """What has this path, relative to the root. Raises FileNotFoundError, NotADirectoryError."""
        root, rest = self._root(path)
        if not rest:
            return root
        names = rest.split("/")
        found = self._plain(root.where, rest) or self._look(root.where, names)
        if found is not None:
            return found
        for i in range(1, len(names)):
            above = self._look(root.where, names[:i])
            if above is None:
                break
            if above.kind != FOLDER:
                raise NotADirectoryError(ENOTDIR, strerror(ENOTDIR), path)
        raise FileNotFoundError(2, strerror(2), path)

    def followed(self, path: str, last: bool = True, at: str = "") -> str:
        """The same path without symbolic links, be the rest of it there or not. What leads out of the tree is not
        followed, since anybody may have written it: FileNotFoundError. Raises OSError (ELOOP).

        last : a link at the end of the path is followed, too
        at : the absolute path by which links of the tree may name its root
        """
        root = self._open_roots().get("")
        listed = None if root is None else _opened(root.where).listed
        return path if listed is None or not listed.targets else listed.followed(path, last, at)

    def names(self, path: str | Node, start: Node | None = None) -> Iterator[tuple[str, Node]]:
        """Names in a folder and what they are of, in the order of the keys, from `start` on, which one of them is of.
        They come one after the other: a folder of a million names costs no memory. Raises FileNotFoundError,
        NotADirectoryError."""
        node = self.find(path) if isinstance(path, str) else path
        if node.kind != FOLDER:
            raise NotADirectoryError(ENOTDIR, strerror(ENOTDIR), path if isinstance(path, str) else "")
        folder: _Folder = node.where
        if folder == _Folder(None):
            every = list(self._open_roots().items())
            at = [each.number for _, each in every].index(start.number) if start is not None else 0
            return iter(every[at:])
        return self._list(_opened(folder), folder.prefix, start)

    def key(self, path: str | Node) -> bytes:
        """The key of a file's record."""
        file = self._file(path)
        return file.db.keys.at(file.pgno).key(file.item)

    def is_packed(self, path: str | Node) -> bool:
        """Whether a file is one compressed record, of which every read unpacks the whole."""
        return self._file(path).db.packed is not None

    # -- reading -------------------------------------------------------------------------------------------------------

    def read_into(self, path: str | Node, out: Any) -> None:
        """Fill `out`, a writable buffer of the file's size. Raises IsADirectoryError, ValueError for another size."""
        node = self.find(path) if isinstance(path, str) else path
        file = self._file(node)
        file.db.read(file.db.keys.at(file.pgno).node(file.item), as_bytes(out, node.size))

    def send(self, path: str | Node, fd: int) -> bool:
        """Let the kernel copy a file into `fd`, which is empty. False, and nothing is written: it cannot, so read it.
        Raises IsADirectoryError, OSError."""
        file = self._file(path)
        return file.db.send(file.db.keys.at(file.pgno).node(file.item), fd)

    def read(self, path: str | Node, offset: int = 0, nbytes: int = -1) -> bytes:
        """Bytes [offset, offset + nbytes) of a file, or up to its end. Raises IsADirectoryError."""
        node = self.find(path) if isinstance(path, str) else path
        file = self._file(node)
        most = max(0, node.size - offset)
        nbytes = most if nbytes < 0 else min(nbytes, most)
        return file.db.read_part(file.db.keys.at(file.pgno).node(file.item), offset, nbytes) if nbytes else b""

    def _file(self, path: str | Node) -> _File:
        self._open_roots()
        node = self.find(path) if isinstance(path, str) else path
        if node.kind != FILE:
            raise IsADirectoryError(21, strerror(21), path if isinstance(path, str) else "")
        if not isinstance(node.where, _Name):
            file: _File = node.where
            return file
        db, i = node.where
        assert db.listed is not None
        key = db.listed.key(db.listed.firsts.get(i, i))
        found = db.keys.find(key)
        if found and not found[0].node(found[1]).flags & ~F_BIGDATA:
            return _File(db, found[0].pgno, found[1])
        raise CorruptedError("the names of the folder do not fit the keys", path=db.path, key=key)

    # -- paths to keys -------------------------------------------------------------------------------------------------

    def _open_roots(self) -> dict[str, Node]:
        if self._roots is None:
            raise ClosedError("the tree of files is already closed")
        return self._roots

    def _root(self, path: str) -> tuple[Node, str]:
        """The folder of an LMDB, and the path below; or the root above them."""
        roots = self._open_roots()
        if "" in roots:
            return roots[""], path
        if not path:
            mtime = max(node.mtime_ns for node in roots.values())
            return Node(FOLDER, _ROOT, 0, mtime, _Folder(None)), ""
        name, _, rest = path.partition("/")
        if name not in roots or path.endswith("/"):
            raise FileNotFoundError(2, strerror(2), path)
        return roots[name], rest

    def _plain(self, folder: _Folder, path: str) -> Node | None:
        """The quick way to nearly all files: the path is the key, and nothing in it needs an escape."""
        db = _opened(folder)
        if db.listed is not None:
            i = db.listed.at(path.encode("utf-8", "surrogateescape"))
            return _listed_node(db, i) if i >= 0 else None
        if db.flat or self._namer.extensions or not is_plain(path, self._namer.longest):
            return None
        key = path.encode()
        found = db.keys.find(key)
        if found is None or found[0].node(found[1]).flags & ~F_BIGDATA or is_folder(db, key, *found):
            return None
        return _record_node(db, *found)

    def _look(self, folder: _Folder, names: list[str]) -> Node | None:
        db = _opened(folder)
        if db.listed is not None:
            return self._plain(folder, "/".join(names))
        if db.flat:
            return _record(self._namer, db, b"", names[0]) if len(names) == 1 else None
        prefix = b""
        for name in names[:-1]:
            part = self._namer.component(db, prefix, name)
            if part is None:
                break
            prefix += part + b"/"
        else:
            found = _record(self._namer, db, prefix, names[-1]) or _folder(self._namer, db, prefix, names[-1])
            if found is not None:
                return found
        return self._in_named(db, names) if db.name is None else None

    def _in_named(self, db: Database, names: list[str]) -> Node | None:
        """As `_look`, where the names begin with that of a named database."""
        prefix = b""
        for i, name in enumerate(names):
            bare = name.removesuffix(DATABASE_MARK)
            part = self._namer.component(db, prefix, bare)
            if part is None:
                return None
            at = db.named(prefix + part)
            if at is not None and (bare != name) == has_prefix(db, prefix + part + b"/"):
                found = self._named(db, *at)
                return self._look(found.where, names[i + 1 :]) if names[i + 1 :] else found
            if bare != name:
                return None
            prefix += part + b"/"
        return None

    # -- keys to names -------------------------------------------------------------------------------------------------

    def _list(self, db: Database, prefix: bytes, start: Node | None = None) -> Iterator[tuple[str, Node]]:
        if db.listed is not None:
            first = 0 if start is None else _number_in(db, start)
            for part, i in db.listed.below(prefix, first):
                yield part.decode("utf-8", "surrogateescape"), _listed_node(db, i)
            return
        for leaf, i, above, part in parts_of(db, prefix, b"" if start is None else _key_of(start)[len(prefix) :]):
            if above:
                name = name_of(part, longest=self._namer.longest)
                node = _folder_node(db, prefix + part + b"/")
            elif leaf.node(i).flags == F_SUBDATA:
                mark = DATABASE_MARK if has_prefix(db, prefix + part + b"/") else ""
                name = name_of(part, longest=self._namer.longest) + mark
                node = self._named(db, leaf, i)
            else:
                name = self._namer.record_name(db, prefix, part, leaf, i)
                node = _record_node(db, leaf, i)
            if "%~" in name:
                self._namer.remember(db, prefix, part)
            yield name, node

    def _named(self, db: Database, leaf: Leaf, i: int) -> Node:
        """The folder of a named database."""
        key = leaf.key(i)
        found = self._below.get((id(db), key))
        if found is None:
            number = _number(key, db.number)
            try:
                made = db.below(leaf, i)
                made.number = number
                found = _folder_node(made, b"")
            except DatabaseError as e:
                found = Node(FOLDER, number, 0, db.mtime_ns, _Folder(None, key, e))
            found = self._below.setdefault((id(db), key), found)
        return found


def _root_of(name: str, path: str) -> Node:
    """The folder of an LMDB, opened."""
    fetcher = open_dataset(path, PosixFetcher)
    snapshot = read_snapshot(fetcher)
    db = Database(fetcher, snapshot, snapshot.main, copy=served_copy(fetcher, snapshot))
    db.number = _number(name.encode("utf-8", "surrogateescape"), _ROOT) if name else _ROOT
    return _folder_node(db, b"")


def _opened(folder: _Folder) -> Database:
    """Raises DatabaseError."""
    if folder.refused is not None:
        raise folder.refused.with_traceback(None)
    assert folder.db is not None
    return folder.db


def _folder_node(db: Database, prefix: bytes) -> Node:
    number = _number(prefix, db.number) if prefix else db.number
    node = Node(FOLDER, number, 0, db.mtime_ns, _Folder(db, prefix))
    listed = db.listed
    i = -1 if listed is None else listed.at(prefix[:-1])
    return node if listed is None or i < 0 else node._replace(**_told(db, listed, i))


def _listed_node(db: Database, i: int) -> Node:
    """Of a name of a packed folder."""
    listed = db.listed
    assert listed is not None
    mode = int(listed.modes[i])
    if S_ISDIR(mode):
        return _folder_node(db, listed.paths[i] + b"/" if listed.paths[i] else b"")
    first = listed.firsts.get(i, i)
    number, target = _number(listed.paths[first] + b"/.", db.number), listed.targets.get(i, b"")
    kind, size = (FILE, int(listed.sizes[first])) if S_ISREG(mode) else (LINK, len(target))
    node = Node(kind, number, size, 0, _Name(db, i), links=listed.links.get(first, 1), target=target)
    return node._replace(**_told(db, listed, i))


def _told(db: Database, listed: Listed, i: int) -> dict[str, Any]:
    """Mode and time. No file gets the rights of another user by what a packed file says."""
    mtime, mode = int(listed.times[i]), int(listed.modes[i]) & 0o1777
    return {"mtime_ns": db.mtime_ns if mtime == UNKNOWN_TIME else mtime, "mode": 0o777 if i in listed.targets else mode}


def _number_in(db: Database, node: Node) -> int:
    """Among the names of a packed folder."""
    assert db.listed is not None
    if isinstance(node.where, _Name):
        return node.where.i
    folder: _Folder = node.where
    return db.listed.at(folder.prefix[:-1])


def _folder(namer: Namer, db: Database, prefix: bytes, name: str) -> Node | None:
    part = namer.component(db, prefix, name)
    if part is None or not has_prefix(db, prefix + part + b"/"):
        return None
    return _folder_node(db, prefix + part + b"/")


def _record(namer: Namer, db: Database, prefix: bytes, name: str) -> Node | None:
    """The record in this folder whose name is exactly this."""
    dot = name.rfind(".") if namer.extensions else -1
    wanted = [name, name[:dot]] if dot > 0 and name[dot:] in EXTENSIONS else [name]
    for bare in wanted:
        mark = RECORD_MARK if bare.endswith(RECORD_MARK) and bare != RECORD_MARK and not db.integers else ""
        part = namer.component(db, prefix, bare, mark)
        if part is None:
            continue
        key = prefix + part
        found = db.keys.find(db.keys.order(key))
        if found is None or found[0].node(found[1]).flags & ~F_BIGDATA or db.is_hidden(key):
            continue
        if namer.record_name(db, prefix, part, *found) == name:
            return _record_node(db, *found)
    return None


def reached(tree: Tree, node: Node) -> Node:
    """What a link leads to; the link itself where that is nothing, and any other node."""
    if node.kind == LINK:
        with suppress(OSError):
            return tree.find(tree.followed(node.where.db.listed.path(node.where.i)))
    return node


def _key_of(node: Node) -> bytes:
    """What its listing goes on from: the key of a file's record, or what the keys in a folder begin with."""
    if node.kind == FILE:
        file: _File = node.where
        return file.db.keys.at(file.pgno).key(file.item)
    folder: _Folder = node.where
    if folder.db is not None and not folder.prefix:
        return folder.db.name or b""
    return folder.prefix


def _record_node(db: Database, leaf: Leaf, i: int) -> Node:
    number = _number(leaf.key(i) + b"/.", db.number)
    return Node(FILE, number, db.size(leaf.node(i)), db.mtime_ns, _File(db, leaf.pgno, i))


def _number(key: bytes, seed: int) -> int:
    """An inode number, of 63 bits; not 0 and not that of the root. (No record but one has a key that ends in "/.".)"""
    return (xxhash.xxh3_64_intdigest(key, seed) >> 1) | 2


def _check_names(names: list[str]) -> None:
    """Raises OptionError."""
    if not names:
        raise OptionError("no LMDB is given", hint="Name at least one.")
    for name in names:
        if not name and len(names) == 1:
            continue
        try:
            long = len(name.encode("utf-8", "surrogateescape")) > LONGEST
        except UnicodeEncodeError:
            long = True
        if long or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise OptionError(f"{name!r} cannot be the name of a folder", hint="Write NAME=PATH with another name.")

