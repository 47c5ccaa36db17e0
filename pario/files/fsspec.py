"""`pario://` for fsspec: what pandas, zarr, dask and others that take URLs read an LMDB's records by. Read-only.

    pario:///data/train.lmdb/images/0001.png     the LMDB is the first part of the path that is one
    pario://images/0001.png::/data/train.lmdb    the same, chained; and filesystem("pario", fo="/data/train.lmdb")
"""

from __future__ import annotations

import io
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from errno import EROFS
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem, make_instance

from pario.errors import OptionError
from pario.files.tree import FILE, FOLDER, LINK, Node, Tree, reached
from pario.machine import absolute

__all__ = ["RecordFile", "RecordFileSystem"]

#: Files up to this size are read when they are opened, larger ones piece by piece.
_WHOLE_BYTES = 16 << 20
_DATA = "data.mdb"


class _Folder:
    """The class attribute that says where relative names begin now."""

    def __get__(self, fs: RecordFileSystem | None, cls: type) -> str:
        return absolute("")


class RecordFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Records of LMDBs as files.

    Parameters
    ----------
    fo : an LMDB, whose records have the paths then; None: paths begin with the path of an LMDB
    extensions : names get the extension of their data, see `pario.files.tree.Tree`

    Writing raises OSError (EROFS). Instances can be pickled, and used after a fork and by several threads.
    """

    protocol = "pario"
    root_marker = ""
    #: for all users of a process, in one folder: a name may be relative
    cachable = True
    folder = _Folder()
    _extra_tokenize_attributes = ("folder",)

    def __init__(
        self,
        fo: str | os.PathLike[str] | None = None,
        *,
        extensions: bool = False,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        if target_protocol not in (None, "file", "local"):
            raise OptionError(
                f"pario reads LMDBs of a file system of this machine, not by {target_protocol}://",
                path=None if fo is None else os.fspath(fo),
                hint="Copy the LMDB here, or mount its store.",
            )
        self.fo = None if fo is None else absolute(os.fspath(fo).removeprefix("file://"))
        self.extensions = extensions
        self._trees: dict[str, Tree] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return make_instance, (type(self), (), {**self.storage_options, "fo": self.fo, "extensions": self.extensions})

    # -- from paths to LMDBs -------------------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        path = os.fspath(path)
        for prefix in ("pario://", "pario::"):
            path = path.removeprefix(prefix)
        return path.rstrip("/") or cls.root_marker

    def _name(self, path: str) -> str:
        """As paths are written in what is returned."""
        path = self._strip_protocol(path)
        return path if self.fo is None else path.lstrip("/")

    def _tree(self, path: str) -> tuple[Tree, str]:
        """(its LMDB, the path below). Raises FileNotFoundError."""
        if self.fo is not None:
            return self._opened(self.fo), path
        path = absolute(path)
        for known in list(self._trees):
            if path == known or path.startswith(known + "/"):
                return self._opened(known), path[len(known) + 1 :]
        for end in (*(at for at, each in enumerate(path) if at and each == "/"), len(path)):
            above = path[:end]
            mode = os.stat(above).st_mode  # raises FileNotFoundError
            if stat.S_ISREG(mode) or os.path.isfile(os.path.join(above, _DATA)):
                return self._opened(above), path[end + 1 :]
        raise FileNotFoundError(2, "there is no LMDB in this path, and no data.mdb", path)

    def _opened(self, path: str) -> Tree:
        found = self._trees.get(path)
        if found is None:
            with self._lock:
                found = self._trees.get(path)
                if found is None:
                    found = self._trees[path] = Tree({"": path}, extensions=self.extensions)
        return found

    def invalidate_cache(self, path: Any = None) -> None:
        """Open the files anew at the next call, in the state that they have then."""
        with self._lock:
            self._trees.clear()
        super().invalidate_cache(path)

    def _find(self, path: str, last: bool = True) -> tuple[Tree, Node]:
        """Raises FileNotFoundError."""
        tree, below = self._tree(self._name(path))
        try:
            return tree, tree.find(tree.followed(below, last))
        except NotADirectoryError:
            raise FileNotFoundError(2, os.strerror(2), path) from None

    # -- looking -------------------------------------------------------------------------------------------------------

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """name, size (of folders 0), type, mtime, ino; of files key, the bytes of the record's key. Symbolic links of a
        packed folder are followed below it: islink, destination; type "other" where one leads nowhere."""
        path = self._name(path)
        tree, node = self._find(path, last=False)
        return _info(path, tree, node)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._name(path)
        tree, node = self._find(path)
        if node.kind == FILE:
            return [_info(path, tree, node)] if detail else [path]
        above = path + "/" if path else ""
        if not detail:
            return [above + name for name, _ in tree.names(node)]
        return [_info(above + name, tree, below) for name, below in tree.names(node)]

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **more: Any
    ) -> Any:
        """All files below a path; more : prefix, what the name of a file in this folder must begin with."""
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        path, prefix = self._name(path), more.get("prefix") or ""
        try:
            tree, node = self._find(path)
        except FileNotFoundError:
            return {} if detail else []
        if node.kind == FILE:
            found = [(path, node)]
        else:
            found = list(_below(tree, node, path + "/" if path else "", maxdepth, withdirs, prefix))
            if withdirs and path and not prefix:
                found.append((path, node))
        found.sort(key=lambda each: each[0])
        return {name: _info(name, tree, each) for name, each in found} if detail else [name for name, _ in found]

    def created(self, path: str) -> datetime:
        return self.modified(path)

    def modified(self, path: str) -> datetime:
        # in whole microseconds: as a float the last one would depend on how the sum was rounded
        return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=self._find(path)[1].mtime_ns // 1000)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> Any:
        if mode != "rb":
            raise _read_only(path)
        tree, node = self._find(path)
        if node.kind != FILE:
            raise IsADirectoryError(21, os.strerror(21), path)
        if node.size <= _WHOLE_BYTES:
            return io.BytesIO(tree.read(node))
        known = {name: options[name] for name in ("cache_type", "cache_options") if name in options}
        path = path if self.fo is not None else absolute(path)
        return RecordFile(self, path, mode, block_size or "default", size=node.size, **known)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        tree, node = self._find(path)
        first, stop, _step = slice(start, end).indices(node.size)
        return tree.read(node, first, max(0, stop - first))

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """Bytes [starts[i], ends[i]) of paths[i]; each may be one number for all. Neighbours of one path are read
        together, with at most max_gap bytes (default: 4,096) between them."""
        n = len(paths)
        firsts = list(starts) if isinstance(starts, (list, tuple)) else [starts] * n
        lasts = list(ends) if isinstance(ends, (list, tuple)) else [ends] * n
        if not n == len(firsts) == len(lasts):
            raise ValueError(f"{n} paths, {len(firsts)} starts and {len(lasts)} ends")
        wanted: dict[str, list[int]] = {}
        for i, path in enumerate(paths):
            wanted.setdefault(path, []).append(i)
        out: list[Any] = [b""] * n
        for path, mine in wanted.items():
            try:
                tree, node = self._find(path)
                spans = {i: slice(firsts[i], lasts[i]).indices(node.size)[:2] for i in mine}
                for i, data in _ranges(tree, node, spans, _GAP if max_gap is None else max_gap):
                    out[i] = data
            except Exception as e:
                if on_error != "return":
                    raise
                for i in mine:
                    out[i] = e
        return out

    # -- writing -------------------------------------------------------------------------------------------------------

    def _refuse(self, path: Any = "", *_: Any, **__: Any) -> Any:
        raise _read_only(path)

    mkdir = makedirs = rmdir = rm = _rm = rm_file = cp_file = mv = touch = pipe_file = put_file = _refuse


class RecordFile(AbstractBufferedFile):  # type: ignore[misc]
    """A large record, read piece by piece."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start, end)
        return data


#: Bytes between two ranges that are read rather than asked for twice.
_GAP = 4096


def _ranges(tree: Tree, node: Node, spans: dict[int, tuple[int, int]], gap: int) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of the ranges of one file. spans : number -> (first, stop)"""
    groups: list[tuple[int, list[int]]] = []
    end = -1 - gap
    for i in sorted(spans, key=spans.__getitem__):
        first, stop = spans[i]
        if first > end + gap:
            groups.append((end := first, []))
        groups[-1][1].append(i)
        end = max(end, stop)
    for begin, group in groups:
        data = tree.read(node, begin, max(begin, *(spans[i][1] for i in group)) - begin)
        for i in group:
            first, stop = spans[i]
            yield i, data[first - begin : max(stop, first) - begin]


def _below(
    tree: Tree, folder: Node, above: str, depth: int | None, folders: bool, prefix: str = ""
) -> Iterator[tuple[str, Node]]:
    left = [(folder, above, depth, prefix)]
    while left:
        folder, above, depth, prefix = left.pop()
        for name, node in tree.names(folder):
            if not name.startswith(prefix):
                continue
            # A link to a folder might lead round and round.
            if folders if node.kind == FOLDER else reached(tree, node).kind != FOLDER:
                yield above + name, node
            if node.kind == FOLDER and depth != 1:
                left.append((node, f"{above}{name}/", depth and depth - 1, ""))


def _info(path: str, tree: Tree, node: Node) -> dict[str, Any]:
    info = {"islink": True, "destination": os.fsdecode(node.target)} if node.kind == LINK else {}
    node = reached(tree, node)
    info |= {"name": path, "size": node.size, "mtime": node.mtime_ns / 1e9, "ino": node.number}
    if node.mode is not None:
        info["mode"] = node.mode
    if node.kind == FILE:
        info["key"] = tree.key(node)
    return {**info, "type": {FILE: "file", FOLDER: "directory"}.get(node.kind, "other")}


def _read_only(path: Any) -> OSError:
    return OSError(EROFS, "records of an LMDB are only read by pario://", str(path))
