"""A tar as records: the key is the member's name without a leading "./", the value its content; of members of one name
the last counts, as for tar itself. All else goes into two parts of the reserved entry, so that the tar can be made
again byte by byte:

    tar       all bytes of the tar that are no record's value, in their order, deflated (headers, padding, the end)
    members   i64[m, 3] little endian, deflated: record, offset in the tar, bytes; in the order of the offsets

A compressed tar is first inflated beside the partial file, since its members are read in the order of their names.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import numpy as np

from pario.codec.library import find_package
from pario.codec.listing import tar_ranges
from pario.errors import CorruptedError, FileError, InvalidError, OptionError, how_to_install
from pario.fetch.file import FileFetcher
from pario.packing.folder import keys_of
from pario.packing.items import Items
from pario.packing.partial import refused
from pario.records import Records

#: This much of zstd's frames is inflated at once, to at most thirty thousand times as much.
_PIECE, _ZSTD_PIECE = 4 << 20, 16 << 10


def _package(name: str, path: str) -> Any:
    found = find_package(name)
    if found is None:
        raise OptionError(f"a tar of this kind needs {name}", path=path, hint=how_to_install("codecs"))
    return found


def _zstd(path: str, mode: str) -> Any:
    return _package("zstandard", path).open(path, mode)


def _lz4(path: str, mode: str) -> Any:
    return _package("lz4", path).open(path, mode)


_OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open,
    b"\x28\xb5\x2f\xfd": _zstd, b"\x04\x22\x4d\x18": _lz4,
}  # fmt: skip
_BY_NAME: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".tbz2": bz2.open, ".xz": lzma.open, ".txz": lzma.open,
    ".zst": _zstd, ".tzst": _zstd, ".lz4": _lz4,
}  # fmt: skip


def is_compressed(path: str) -> Callable[..., Any] | None:
    """What opens the file to read what it inflates to; None if it is not compressed."""
    with open(path, "rb") as file:
        head = file.read(8)
    return next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)


def is_tar(path: str) -> bool:
    """By the first block, inflated if need be."""
    try:
        head = b""
        for piece in _pieces(path):
            head = (head + piece)[: tarfile.BLOCKSIZE]
            if len(head) == tarfile.BLOCKSIZE:
                break
        if head == bytes(tarfile.BLOCKSIZE):
            return os.path.splitext(path)[1] == ".tar"  # an empty one
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except (FileError, tarfile.TarError):
        return False
    return True


def inflate(path: str, into: str) -> None:
    """Raises InvalidError, FileError: of `path`, or of `into` where that cannot be written."""
    try:
        with open(into, "wb") as target:
            for piece in _pieces(path):
                target.write(piece)
    except OSError as e:
        raise refused(e, into) from e


def _pieces(path: str) -> Iterator[bytes]:
    """Of the inflated tar. Raises InvalidError, FileError, OptionError."""
    try:
        opener = is_compressed(path) or open
        if opener is _zstd:
            yield from _frames(path)
            return
        with opener(path, "rb") as source:
            while piece := source.read(_PIECE):
                yield piece
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, RuntimeError) as e:
        raise InvalidError(f"the compressed tar is damaged: {e}", path=path) from e
    except OSError as e:
        raise FileError(f"cannot inflate it: {e.strerror or e}", path=path) from e


def _frames(path: str) -> Iterator[bytes]:
    """What zstd's frames inflate to. Its own reader does not say that the last one is not whole."""
    zstandard = _package("zstandard", path)
    tool = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = tool.decompressobj()
    try:
        with open(path, "rb") as file:
            while piece := file.read(_ZSTD_PIECE):
                while piece:
                    frame = tool.decompressobj() if frame.eof else frame
                    yield frame.decompress(piece)
                    piece = frame.unused_data
    except zstandard.ZstdError as e:
        raise EOFError(str(e)) from None
    if not frame.eof:
        raise EOFError("it ends inside of a frame")


class Members(NamedTuple):
    """The records of a tar, by key. where : (offset, bytes) of each value in the tar, or the whole of a sparse one.

    ranges : i64[m, 3], see above
    """

    keys: list[bytes]
    where: list[tuple[int, int] | bytes]
    ranges: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        return np.array([len(at) if isinstance(at, bytes) else at[1] for at in self.where], np.int64)


def read_members(path: str, hashed: bool = False) -> Members:
    """Raises InvalidError, OptionError. hashed : a name that is too long for a key is none, see `key_of`"""
    found: dict[bytes, tuple[int, int] | bytes] = {}
    names: dict[bytes, bytes] = {}
    try:
        with tarfile.open(path, "r:", encoding="utf-8", errors="surrogateescape") as tar:
            for member in tar:
                key = member.name.encode("utf-8", "surrogateescape")
                names[key] = key = key.removeprefix(b"./")
                if member.islnk():  # a further name of an earlier member
                    link = member.linkname.encode("utf-8", "surrogateescape").removeprefix(b"./")
                    if link in found:
                        found[key] = found[link]
                elif member.issparse():
                    extracted = tar.extractfile(member)
                    assert extracted is not None  # it is a regular file
                    found[key] = extracted.read()
                elif member.isreg():
                    found[key] = (member.offset_data, member.size)
            tar.fileobj.seek(tar.offset)  # type: ignore[union-attr]
            block = tar.fileobj.read(tarfile.BLOCKSIZE)  # type: ignore[union-attr]
            if block.strip(b"\0") or 0 < len(block) < tarfile.BLOCKSIZE:  # at which tarfile stops without a word
                raise tarfile.ReadError(f"at byte {tar.offset:,} there is neither a header nor the end")
    except (tarfile.TarError, EOFError, ValueError) as e:
        behind = f" behind the member {next(reversed(names.values()))!r}" if names else ""
        raise InvalidError(f"not a tar, or a damaged one{behind}: {e}", path=path) from e
    names_of = keys_of(found, path, hashed, "Use --keys hash, or shorten the names.")
    found = {key: found[name] for key, name in names_of.items()}
    keys = sorted(found)
    taken: dict[int, tuple[int, int, int]] = {}  # by offset: two names may have one content
    for record, key in enumerate(keys):
        at = found[key]
        if not isinstance(at, bytes) and at[1]:
            taken.setdefault(at[0], (record, *at))
    ranges = np.array(sorted(taken.values(), key=lambda one: one[1]), np.int64).reshape(-1, 3)
    return Members(keys, [found[key] for key in keys], ranges)


class MemberItems(Items):
    """The regular files of a tar that is not compressed."""

    def __init__(self, path: str, members: Members) -> None:
        self._tar = FileFetcher(path)
        self._members = members
        self.n = len(members.keys)
        self.sizes = members.sizes

    def keys(self, begin: int, stop: int) -> list[bytes]:
        return self._members.keys[begin:stop]

    def read(self, ids: np.ndarray) -> Records:
        return Records.of(ids, [self._value(record) for record in ids.tolist()])

    def _value(self, record: int) -> bytes:
        at = self._members.where[record]
        try:
            return at if isinstance(at, bytes) else self._bytes(*at)
        except FileError as e:
            raise e.at(key=self._members.keys[record]) from None

    def _bytes(self, offset: int, nbytes: int) -> bytes:
        found = self._tar.pread(offset, nbytes)
        if len(found) < nbytes:
            raise InvalidError("the tar ends inside a member", path=self._tar.path, offset=offset + len(found))
        return found

    def parts(self) -> dict[str, bytes]:
        """What is kept in the reserved entry."""
        squeeze, out, at = zlib.compressobj(6), [], 0
        ends = [(int(offset), int(offset + size)) for _, offset, size in self._members.ranges]
        for begin, end in [*ends, (self._tar.nbytes, 0)]:
            while at < begin:
                piece = self._bytes(at, min(_PIECE, begin - at))
                out.append(squeeze.compress(piece))
                at += len(piece)
            at = end
        ranges = zlib.compress(self._members.ranges.astype("<i8").tobytes(), 6)
        return {"tar": b"".join([*out, squeeze.flush()]), "members": ranges}

    def close(self) -> None:
        self._tar.close()


def opener_for(path: str) -> Callable[..., Any]:
    """How a new tar of this name is written: its ending says whether it is compressed."""
    return _BY_NAME.get(os.path.splitext(path)[1].lower(), open)


class TarRestorer:
    """Writes the tar again. Raises CorruptedError."""

    def __init__(self, parts: dict[str, bytes], items: Items, dataset: str) -> None:
        self._items = items
        try:
            self._rest = parts["tar"]
            self.ranges = tar_ranges(parts["members"], items.sizes)
        except (KeyError, ValueError) as e:
            raise CorruptedError(f"the parts that make the tar again are damaged: {e}", path=dataset) from e

    def write(self, file: IO[bytes]) -> None:
        inflate = zlib.decompressobj()
        rest, at, ready = self._rest, 0, b""
        for record, offset, nbytes in [*self.ranges.tolist(), (-1, -1, 0)]:
            while offset < 0 or at < offset:
                if not ready:
                    ready = inflate.decompress(rest, _PIECE)
                    rest = inflate.unconsumed_tail
                    if not ready:
                        break
                piece = ready if offset < 0 else ready[: offset - at]
                ready = ready[len(piece) :]
                file.write(piece)
                at += len(piece)
            if record >= 0:
                file.write(self._items.read(np.array([record]))[0])
                at += nbytes
