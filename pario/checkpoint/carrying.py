"""The files of older checkpoints that a newer one uses, on their way to another tier: linked where that tier has them
already, copied where it has not."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from pario.checkpoint.manifest import Part, part_name, sum_of, taken_name
from pario.checkpoint.store import Name, Reader, Writer, listed
from pario.comm.memory import private_bytes
from pario.errors import ChecksumError, ReadError

__all__ = ["Write", "carry_over", "copy_blocks"]

_GRAIN = 4 << 20

#: Writes so many bytes at an offset, as fast as is allowed.
Write = Callable[[Writer, np.ndarray, int], None]


def copy_blocks(part: Part, source: str, target: str, write: Write) -> None:
    """The node's own file from one folder to another, each block checked on its way. Raises OSError, ParioError."""
    blocks = [each for each in map(part.where, range(len(part.blocks))) if each.file == 0]
    memory = private_bytes(max((each.nbytes for each in blocks), default=0))
    writer = _made(os.path.join(target, part.file), part.size)
    try:
        with Reader(os.path.join(source, part.file), part.size) as reader:
            for each in blocks:
                block = memory[: each.nbytes]
                reader.read(block, each.offset)
                if sum_of(block) != each.sum:
                    raise ChecksumError(f"the block at {each.offset} of the fast tier's file is damaged", path=source)
                write(writer, block, each.offset)
        writer.sync()
    finally:
        writer.close()


def carry_over(node: int, file: tuple[str, int], source: str, target: str, write: Write) -> None:
    """An older checkpoint's file, in the folder `source`, to the folder `target` of the slow tier.

    file : (checkpoint that wrote it, size)
    Raises OSError, ParioError.
    """
    id_, size = file
    name = taken_name(node, id_)
    path = os.path.join(target, name)
    with suppress(FileNotFoundError):
        os.unlink(path)  # of a drain that was interrupted
    for there in _candidates(node, id_, os.path.dirname(target)):
        with suppress(OSError):
            status = os.lstat(there)
            if stat.S_ISREG(status.st_mode) and status.st_size == size and status.st_uid in (os.geteuid(), 0):
                os.link(there, path, follow_symlinks=False)
                return
    _copied(os.path.join(source, name), path, size, write)


def _candidates(node: int, id_: str, slow: str) -> list[str]:
    """Where the slow tier may have a file: in the checkpoint that wrote it, and in those that use it."""
    found: list[Name] = []
    with suppress(ReadError):
        found = listed(slow)[::-1]
    return [
        os.path.join(slow, str(name), f"{part_name(node)}.h5" if name.id == id_ else taken_name(node, id_))
        for name in found
        if not name.nodes
    ]


def _copied(source: str, target: str, size: int, write: Write) -> None:
    """Byte by byte. Raises OSError, ParioError."""
    memory = private_bytes(min(size, _GRAIN))
    writer = _made(target, size)
    try:
        with Reader(source, size) as reader:
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
