"""What the instruments read: the files of a folder, or the records of an LMDB, one read per file or record.

The reading is a plain program's: `pread` in Python threads. pario's own way is measured beside it, by a Loader.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

import numpy as np

from benchmarks.cache import Unavailable, cached_bytes, drop_file
from pario.codec.packing import Packing
from pario.dataset.reader import Reader
from pario.decode.base import Decoder, Draw
from pario.errors import DecodeError, EmptyError, FileError, ReadError
from pario.fetch.resolve import resolve
from pario.machine import closing_fd
from pario.records import Records
from pario.text import counted, decimal_bytes

#: of single records that are decoded
_DRAW = Draw()
_ID, _START = np.zeros(1, np.int64), np.zeros(1, np.int64)
#: The most items that one run draws from: their numbers are held in memory.
_MOST = 1 << 20
#: The most files of a sample.
_SAMPLES = 64
#: The most bytes of one file that are read.
_LONGEST = 64 << 20


class Items(ABC):
    """Things to read, each with one request. Any thread, after the construction.

    path : as the user gave it
    kind : "files" or "records"
    nbytes : i64[n], bytes of each
    packing : how values are packed; None: they are not
    sample : files of the store, for the device's own ceiling
    """

    path: str
    kind: str
    nbytes: np.ndarray
    sample: list[str]
    packing: Packing | None = None

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def mean_bytes(self) -> float:
        return float(self.nbytes.mean())

    def words(self) -> str:
        """ "512 files of 112 KB on average"."""
        return f"{counted(len(self), self.kind.removesuffix('s'))} of {decimal_bytes(self.mean_bytes)} on average"

    def draw(self, shuffled: bool, seed: int) -> np.ndarray:
        """i64[m]: which items one run reads, in this order; of a large dataset a stretch, or a sample."""
        rng = np.random.default_rng(seed)
        n = len(self)
        if not shuffled:
            begin = 0 if n <= _MOST else int(rng.integers(0, n - _MOST))
            return np.arange(begin, min(n, begin + _MOST))
        return rng.permutation(np.arange(n) if n <= _MOST else np.unique(rng.integers(0, n, _MOST)))

    @abstractmethod
    def read(self, item: int, buffer: memoryview) -> int:
        """Read one item into `buffer`, which has room for the largest; returns its bytes. Raises ReadError."""

    @abstractmethod
    def tell_order(self, shuffled: bool) -> None:
        """Tell the kernel whether reading ahead is of use."""

    @abstractmethod
    def drop(self) -> None:
        """Ask the kernel to drop what this node's page cache has of them."""

    def cached(self) -> float | None:
        """The fraction of their bytes, sampled, that this node's page cache has; None if the kernel does not tell."""
        found = [(cached_bytes(path), os.path.getsize(path)) for path in self.sample]
        if not found or any(there is None for there, _ in found):
            return None
        page = os.sysconf("SC_PAGESIZE")
        return sum(there or 0 for there, _ in found) / sum(-(-size // page) * page for _, size in found)

    def close(self) -> None:
        return


class FileItems(Items):
    """The files of a folder and of the folders in it, by path: opened, read (64 MiB at most) and closed, one by one."""

    kind = "files"

    def __init__(self, path: str) -> None:
        self.path = path
        self._written = False
        found: list[tuple[str, int]] = []
        for folder, folders, names in os.walk(path):
            folders.sort()
            for file in (os.path.join(folder, name) for name in sorted(names)):
                with suppress(OSError):  # it is gone, or leads nowhere
                    status = os.stat(file)
                    if S_ISREG(status.st_mode) and status.st_size:
                        found.append((file, min(status.st_size, _LONGEST)))
            if len(found) >= _MOST:
                break
        if not found:
            raise EmptyError("the folder holds no file that has any bytes", path=path)
        self.paths = [file for file, _ in found]
        self.nbytes = np.array([size for _, size in found], np.int64)
        self.sample = self.paths[:: max(1, -(-len(found) // _SAMPLES))]

    def read(self, item: int, buffer: memoryview) -> int:
        path, nbytes = self.paths[item], int(self.nbytes[item])
        try:
            with closing_fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
                return _fill(fd, buffer[:nbytes], 0, path)
        except ReadError:
            raise
        except OSError as e:
            raise ReadError(f"reading failed: {e.strerror}", path=path, hint="Is anybody changing the folder?") from e

    def tell_order(self, shuffled: bool) -> None:
        return

    def drop(self) -> None:
        for path in self.paths:
            with suppress(OSError), closing_fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
                if not self._written:
                    os.fsync(fd)  # pages that wait to be written cannot be dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._written = True


class RecordItems(Items):
    """The values of an LMDB's records, in key order: one `pread` each, from one open file."""

    kind = "records"

    def __init__(self, path: str, db: str | None, progress: Callable[[int, int], None] | None) -> None:
        self.path = path
        with Reader(path, comm="self", db=db, progress=progress) as reader:
            if not len(reader):
                raise EmptyError("the database holds no record", path=path)
            extents = reader.index.extents
            self._begins = np.array(extents["offset"])
            self.nbytes = np.array(extents["nbytes"])
            self.packing = reader.packing
        self._file = resolve(path)
        self.sample = [self._file]
        try:
            self._fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise FileError(f"cannot open it: {e.strerror}", path=self._file) from e

    def read(self, item: int, buffer: memoryview) -> int:
        begin = int(self._begins[item])
        try:
            return _fill(self._fd, buffer[: int(self.nbytes[item])], begin, self._file)
        except ReadError:
            raise
        except OSError as e:
            raise ReadError(f"reading failed: {e.strerror}", path=self._file, offset=begin) from e

    def tell_order(self, shuffled: bool) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM if shuffled else os.POSIX_FADV_SEQUENTIAL)

    def drop(self) -> None:
        with suppress(OSError, Unavailable):  # what stays is reported: `cached`
            drop_file(self._file)

    def close(self) -> None:
        os.close(self._fd)


def open_items(path: str, *, db: str | None = None, progress: Callable[[int, int], None] | None = None) -> Items:
    """The records of an LMDB, or the files of a folder that is none. Raises what Reader raises."""
    folder = Path(os.path.expanduser(path))
    if folder.is_dir() and not (folder / "data.mdb").exists():
        return FileItems(str(folder))
    return RecordItems(str(folder), db, progress)


def _fill(fd: int, buffer: memoryview, offset: int, path: str) -> int:
    """All of `buffer`, with one call if the store gives all at once."""
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done:]], offset + done)
        if not got:
            raise ReadError(
                f"the file ended early: {done:,} of {len(buffer):,} bytes", path=path, offset=offset + done
            )
        done += got
    return done



class Decoding:
    """One decoder that several threads use, each for the record that it has read, as `map` of an input pipeline does.
    Call it with a value's bytes; returns the decoder's arrays, of one row.

    items : whose first one the decoder learns from
    Raises DecodeError.
    """

    def __init__(self, decoder: Decoder, items: Items) -> None:
        self._packing = items.packing
        self._decoder = copy.copy(decoder)
        first = memoryview(bytearray(int(items.nbytes[0])))
        items.read(0, first)
        value = self._raw(first)
        self._decoder.learn_from(Records(_ID, value, _START, np.array([len(value)])), _DRAW)

    def __repr__(self) -> str:
        return repr(self._decoder)

    def __call__(self, stored: memoryview) -> dict[str, np.ndarray]:
        value = self._raw(stored)
        records = Records(_ID, value, _START, np.array([len(value)]))
        out = {name: np.empty(shape, dtype) for name, (shape, dtype) in self._decoder.shapes(records).items()}
        failures = self._decoder.decode(records, out, _DRAW)
        if failures:
            raise DecodeError(f"{self._decoder!r} cannot decode a record: {failures[0][1]}")
        return self._decoder.finish(out)

    def _raw(self, stored: memoryview) -> np.ndarray:
        return np.frombuffer(stored if self._packing is None else self._packing.unpack_one(stored), np.uint8)
