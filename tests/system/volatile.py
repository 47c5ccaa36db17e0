"""A store that loses power: the latency store, but what was not synced is gone when its power fails.

POSIX promises little: `fsync` of a file makes its bytes durable, `fsync` of a folder the names in it, and nothing else
does anything. File systems keep more than that, each in its own way. This one keeps exactly that, or in addition a
random part of the rest:

    with latency_store("/data/empty", read_s=0, metadata_s=0, writable=True, daemon=DAEMON) as store:
        store.lose_power(after=37)      # the 38th change fails, and all that follows
        save_something(store.folder)    # raises OSError (EIO) somewhere
        store.lose_power()              # for the case that it made fewer changes
        look_at("/data/empty")          # what a machine finds when it starts again
        store.power_on()

Each file and each folder has what is durable, and the changes since the last sync: writes, sizes, names. A rename is
one change, which is kept as a whole or not at all; between two folders there is none (EXDEV). Modes and times do not
count. What is durable is held in memory, so that this is a store for small tests. Changes are made one at a time.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where benchmarks/ is, also for the daemon's process

from benchmarks.stores.latency import Operations, serve

__all__ = ["DAEMON", "VolatileOperations"]

#: what `latency_store` starts
DAEMON = (__file__,)


class _File:
    def __init__(self, durable: bytes = b"") -> None:
        self.durable = durable
        self.pending: list[tuple[int, bytes | None]] = []  # bytes at an offset; None: the file's size

    def after(self, rng: random.Random | None) -> bytes:
        """What a loss of power leaves."""
        data = bytearray(self.durable)
        for offset, written in _kept(self.pending, rng):
            end = offset if written is None else offset + len(written)
            data.extend(bytes(max(0, end - len(data))))
            if written is None:
                del data[offset:]
            else:
                data[offset:end] = written
        return bytes(data)

    def sync(self) -> None:
        self.durable = self.after(_ALL)
        self.pending.clear()


class _Folder:
    def __init__(self) -> None:
        self.names: dict[str, _File | _Folder] = {}
        self.durable: dict[str, _File | _Folder] = {}
        self.pending: list[dict[str, _File | _Folder | None]] = []  # None: the name is gone

    def change(self, names: dict[str, _File | _Folder | None]) -> None:
        self.pending.append(names)
        self.names = _changed(self.names, [names])

    def name(self, path: str, node: _File | _Folder | None) -> None:
        self.folder(os.path.dirname(path)).change({os.path.basename(path): node})

    def after(self, rng: random.Random | None) -> dict[str, _File | _Folder]:
        """What a loss of power leaves."""
        return _changed(self.durable, _kept(self.pending, rng))

    def folder(self, path: str) -> _Folder:
        at = self
        for name in filter(None, path.split("/")):
            node = at.names[name]
            assert isinstance(node, _Folder)
            at = node
        return at

    def file(self, path: str) -> _File:
        node = self.folder(os.path.dirname(path)).names[os.path.basename(path)]
        assert isinstance(node, _File)
        return node

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.pending.clear()


class _All(random.Random):
    def random(self) -> float:
        return 0.0


_ALL = _All()


def _kept(changes: list[Any], rng: random.Random | None) -> list[Any]:
    return [] if rng is None else [change for change in changes if rng.random() < 0.5]


def _changed(
    names: dict[str, _File | _Folder], changes: list[dict[str, _File | _Folder | None]]
) -> dict[str, _File | _Folder]:
    found: dict[str, _File | _Folder | None] = dict(names)
    for change in changes:
        found.update(change)
    return {name: node for name, node in found.items() if node is not None}


class VolatileOperations(Operations):
    """What lies in the source folder at the start is durable."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self._root = _scanned(Path(self._source), {})
        self._opened: dict[int, _File] = {}
        self._lost = False
        self._left: int | None = None  # changes until power is lost
        self._seed: int | None = None

    def command(self, what: dict[str, Any]) -> Any:
        if what["do"] not in ("lose_power", "power_on"):
            return super().command(what)
        with self._lock:
            if what["do"] == "power_on":
                self._root, self._opened = _scanned(Path(self._source), {}), {}
                self._lost, self._left = False, None
            elif not self._lost:
                self._left, self._seed = what["after"], what["seed"]
                if not self._left:
                    self._lose()
        return {}

    def _lose(self) -> None:
        """Make the source folder what is left."""
        self._lost = True
        for entry in os.scandir(self._source):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        _built(self._root, Path(self._source), None if self._seed is None else random.Random(self._seed), {})

    def _spend(self, path: str, operation: str, seconds: float) -> str:
        there = super()._spend(path, operation, seconds)
        self._living()
        return there

    def _living(self) -> None:
        if self._lost:
            raise OSError(errno.EIO, "power is lost")

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._lock:
            self._living()
            if self._left == 0:
                self._lose()
                self._living()
            if self._left is not None:
                self._left -= 1
            yield

    # what it is asked

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        there = self._metadata(path, "create")
        with self._change():
            fd = os.open(there, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
            self._opened[fd] = _File()
            self._root.name(path, self._opened[fd])
        return fd

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_TRUNC:
            self.truncate(path, 0)
        there = self._metadata(path, "open")
        with self._lock:
            fd = os.open(there, flags & ~(os.O_DIRECT | os.O_TRUNC))
            self._opened[fd] = self._root.file(path)
        return fd

    def release(self, path: str, fh: int) -> int:
        with self._lock:
            self._opened.pop(fh, None)
            return super().release(path, fh)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._spend(path, "write", self._read_s)
        with self._change():
            done = os.pwrite(fh, data, offset)
            self._handle(fh).pending.append((offset, bytes(data[:done])))
        return done

    def _handle(self, fh: int) -> _File:
        if fh not in self._opened:
            raise OSError(errno.EIO, "opened before power was lost")
        return self._opened[fh]

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        there = self._metadata(path, "other")
        with self._change():
            os.truncate(there, length)
            self._root.file(path).pending.append((length, None))
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._metadata(path, "other")
        with self._change():
            self._handle(fh).sync()
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._metadata(path, "other")
        with self._change():
            self._root.folder(path).sync()
        return 0

    def link(self, target: str, source: str) -> int:
        """`target` is the new name."""
        there = self._metadata(target, "other")
        with self._change():
            os.link(self._source + source, there)
            self._root.name(target, self._root.file(source))
        return 0

    def unlink(self, path: str) -> int:
        return self._remove(path, "unlink", os.unlink)

    def rmdir(self, path: str) -> int:
        return self._remove(path, "other", os.rmdir)

    def _remove(self, path: str, operation: str, call: Any) -> int:
        there = self._metadata(path, operation)
        with self._change():
            call(there)
            self._root.name(path, None)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        there = self._metadata(path, "mkdir")
        with self._change():
            os.mkdir(there, mode)
            self._root.name(path, _Folder())
        return 0

    def rename(self, old: str, new: str) -> int:
        if os.path.dirname(old) != os.path.dirname(new):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        there = self._metadata(old, "rename")
        with self._change():
            os.rename(there, self._source + new)
            folder, name = self._root.folder(os.path.dirname(old)), os.path.basename(old)
            folder.change({name: None, os.path.basename(new): folder.names[name]})
        return 0


def _scanned(folder: Path, known: dict[int, _File]) -> _Folder:
    """known : inode -> file, for those with several names"""
    found = _Folder()
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            found.names[entry.name] = _scanned(Path(entry.path), known)
        elif entry.is_file(follow_symlinks=False):
            if entry.inode() not in known:
                known[entry.inode()] = _File(Path(entry.path).read_bytes())
            found.names[entry.name] = known[entry.inode()]
    found.sync()
    return found


def _built(folder: _Folder, path: Path, rng: random.Random | None, made: dict[_File, Path]) -> None:
    for name, node in folder.after(rng).items():
        if isinstance(node, _Folder):
            (path / name).mkdir()
            _built(node, path / name, rng, made)
        elif node in made:
            os.link(made[node], path / name)
        else:
            (path / name).write_bytes(node.after(rng))
            made[node] = path / name


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    serve(given, VolatileOperations(given))
