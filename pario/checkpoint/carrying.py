"""The files of a node's part of a checkpoint, on their way to another tier or to another node. The files of older
checkpoints that it uses are linked where they are there already, and copied where they are not."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Protocol

import numpy as np

from pario.checkpoint.manifest import Part, part_name, sum_of, taken_name
from pario.checkpoint.store import Name, Reader, Writer, listed
from pario.comm.memory import private_bytes
from pario.errors import ChecksumError, ReadError

__all__ = ["Folder", "Source", "Write", "carry_over", "copy_blocks"]

_GRAIN = 4 << 20

#: Writes so many bytes at an offset, as fast as is allowed.
Write = Callable[[Writer, np.ndarray, int], None]


class Readable(Protocol):
    """An open file. path : for errors"""

    path: str

    def read(self, block: np.ndarray, offset: int) -> None:
        """Fill `block`, u8[n]. Raises OSError, ParioError."""


class Source(Protocol):
    """Where the files of a part are read."""

    def open(self, name: str, size: int) -> AbstractContextManager[Readable]:
        """size : that it must have. Raises OSError, ParioError."""


class Folder:
    """A source on a tier of this node."""

    def __init__(self, path: str) -> None:
        self._path = path

    def open(self, name: str, size: int) -> Reader:
        return Reader(os.path.join(self._path, name), size)


def copy_blocks(part: Part, source: Source, target: str, write: Write) -> None:
    """The node's own file to the folder `target`, each block checked on its way. Raises OSError, ParioError."""
    blocks = [each for each in map(part.where, range(len(part.blocks))) if each.file == 0]
    memory = private_bytes(max((each.nbytes for each in blocks), default=0))
    writer = _made(os.path.join(target, part.file), part.size)
    try:
        with source.open(part.file, part.size) as reader:
            for each in blocks:
                block = memory[: each.nbytes]
                reader.read(block, each.offset)
                if sum_of(block) != each.sum:
                    what = f"the block at {each.offset} of the fast tier's file is damaged"
                    raise ChecksumError(what, path=reader.path)
                write(writer, block, each.offset)
        writer.sync()
    finally:
        writer.close()


def carry_over(
    node: int, file: tuple[str, int], source: Source, target: str, write: Write, copies: bool = False
) -> None:
    """An older checkpoint's file to the folder `target` of the slow tier, or with `copies` to that of a partner's copy.

    file : (checkpoint that wrote it, size)
    Raises OSError, ParioError.
    """
    id_, size = file
    name = taken_name(node, id_)
    path = os.path.join(target, name)
    with suppress(FileNotFoundError):
        os.unlink(path)  # of a drain that was interrupted
    for there in _candidates(node, id_, os.path.dirname(target), copies):
        with suppress(OSError):
            status = os.lstat(there)
            if stat.S_ISREG(status.st_mode) and status.st_size == size and status.st_uid in (os.geteuid(), 0):
                os.link(there, path, follow_symlinks=False)
                return
    _copied(source, name, path, size, write)


def _candidates(node: int, id_: str, tier: str, copies: bool) -> list[str]:
    """Where a tier may have a file: in the checkpoint that wrote it, and in those that use it."""
    found: list[Name] = []
    with suppress(ReadError):
        found = listed(tier)[::-1]
    return [
        os.path.join(tier, str(name), f"{part_name(node)}.h5" if name.id == id_ else taken_name(node, id_))
        for name in found
        if (name.copy and name.node == node if copies else not name.nodes)
    ]


def _copied(source: Source, name: str, target: str, size: int, write: Write) -> None:
    """Byte by byte. Raises OSError, ParioError."""
    memory = private_bytes(min(size, _GRAIN))
    writer = _made(target, size)
    try:
        with source.open(name, size) as reader:
            for begin in range(0, size, _GRAIN):
                piece = memory[: min(_GRAIN, size - begin)]
                reader.read(piece, begin)
                write(writer, piece, begin)
        writer.sync()
    finally:
        writer.close()


def _made(path: str, size: int) -> Writer:
    with suppress(FileNotFoundError):
        os.unlink(path)
    return Writer(path, size)
