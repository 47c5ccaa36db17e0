"""Where each block lies, which is decided anew for each checkpoint: in the node's file, or, where an array has not
changed, in that of an older checkpoint; as it is, or packed by a codec. If either may be, ranks look at their blocks
before the file is made.

    every rank of the node                         the node's first rank
    computes the checksums of its blocks
    says "summed"                                  links the older files whose arrays are unchanged
                                                   says "chosen"
    packs what is not taken over
    says "coded"                                   lays out the file
                                                   says "opened"
    writes its blocks, as always (writing.py)

A file that is taken over is a hard link in the new checkpoint's folder: the older checkpoint may be deleted, by anybody
and in any way, and the data stays as long as one checkpoint uses it. A file of which less than half is still in use is
not taken over, so the files of a checkpoint have at most twice its bytes; what was unchanged in it is written again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pario.checkpoint.attempts import TAKEN, Board
from pario.checkpoint.layout import Arranged, NodeFile, Skeleton, cut_up, dataset_name, skeleton
from pario.checkpoint.manifest import Part, Stored, taken_name
from pario.checkpoint.store import sum_of, whole_pages
from pario.codec.base import Codec

#: What a codec makes of a block must be smaller by at least one part in this many: otherwise it is written as it is.
_PAYS = 32


class _Source(NamedTuple):
    """A file that may be taken over. data : bytes of blocks in it; paths : where it is, or was: it moves when its
    checkpoint is committed"""

    id: str
    size: int
    data: int
    paths: list[str]


@dataclass
class _Last:
    """The last checkpoint of this node that was written. sums : u64 per block; stored : where they lie in `files`"""

    file: NodeFile
    sums: np.ndarray
    stored: list[Stored]
    files: list[_Source]


@dataclass
class Shape:
    """The node's file of one checkpoint. others : of the older ones, in the order of their numbers from 1 on; taken :
    group -> number"""

    size: int = 0
    rest: list[tuple[int, bytes]] = field(default_factory=list)
    others: list[_Source] = field(default_factory=list)
    taken: dict[int, int] = field(default_factory=dict)


class Varying:
    """Of one rank, for its write thread. incremental : take over what is unchanged; codec : pack, or None"""

    def __init__(self, node: int, board: Board, incremental: bool, codec: Codec | None) -> None:
        self._node, self._board, self._incremental, self._codec = node, board, incremental, codec
        self._last: _Last | None = None
        self._skeleton: tuple[NodeFile, Any, Skeleton] | None = None  # the last one, and what it was made for

    def __bool__(self) -> bool:
        return self._incremental or self._codec is not None

    # -- every rank ----------------------------------------------------------------------------------------------------

    def sum(self, number: int, data: np.ndarray) -> None:
        """data : the block, u8[its bytes]"""
        self._board.sums[number] = sum_of(data)
        self._board.coded[number] = 0

    def code(self, number: int, slot: np.ndarray, nbytes: int) -> None:
        """Pack a block in its place, unless it is taken over. slot : u8[whole pages], whose first `nbytes` it is"""
        board = self._board
        if self._codec is None:
            board.stored[number] = board.sums[number]
            return
        if board.places[number] != TAKEN:
            if nbytes <= self._codec.most:
                packed = np.frombuffer(self._codec.encode(slot[:nbytes]), np.uint8)
                if packed.size <= nbytes - nbytes // _PAYS and packed.size < nbytes:
                    slot[: packed.size] = packed
                    slot[packed.size : whole_pages(packed.size)] = 0
                    board.coded[number] = packed.size
            board.stored[number] = sum_of(slot[: self.stored_bytes(number, nbytes)])

    def clean(self, number: int, file: NodeFile, slot: np.ndarray) -> None:
        """After a block was written: what lies between small arrays must be zero when others are copied there."""
        if self._board.coded[number] and number in file.groups[-1]:
            slot[:] = 0

    def stored_bytes(self, number: int, nbytes: int) -> int:
        """This many bytes are written of a block of `nbytes`: whole pages where blocks lie one after another."""
        return nbytes if self._codec is None else whole_pages(int(self._board.coded[number]) or nbytes)

    # -- the node's first rank -----------------------------------------------------------------------------------------

    def choose(self, file: NodeFile, folder: str) -> Shape:
        """What is taken over from the last checkpoint: links the files into `folder`, and notes it for all ranks."""
        shape, last = Shape(), self._last
        self._board.places[: len(file.blocks)] = 0
        if not self._incremental or last is None or last.file is not file:
            return shape
        unchanged: dict[int, list[int]] = {}  # number of the file in `last` -> groups
        for number, group in enumerate(file.groups):
            mine = slice(group.start, group.stop)
            if len(group) and np.array_equal(self._board.sums[mine], last.sums[mine]):
                unchanged.setdefault(last.stored[group.start].file, []).append(number)
        for number_of_file, groups in unchanged.items():
            source = last.files[number_of_file]
            used = sum(last.stored[block].nbytes for number in groups for block in file.groups[number])
            if 2 * used >= source.data and _link(source, self._name_of(source), folder):
                shape.others.append(source)
                shape.taken |= dict.fromkeys(groups, len(shape.others))
                for number in groups:
                    self._board.places[file.groups[number].start : file.groups[number].stop] = TAKEN
        return shape

    def _name_of(self, source: _Source) -> str:
        return taken_name(self._node, source.id)

    def lay_out(self, file: NodeFile, shape: Shape) -> None:
        """Where everything else lies: in `shape`, and on the board for all ranks."""
        places, arranged = self._board.places, file.arranged
        if self._codec is None and not shape.taken:
            places[: len(file.blocks)] = [offset for offset, _ in file.blocks]
            shape.size, shape.rest = file.size, file.rest
            return
        if self._codec is not None:
            new = np.flatnonzero(places[: len(file.blocks)] != TAKEN)
            sizes = [self.stored_bytes(block, file.blocks[block][1]) for block in new.tolist()]
            made = skeleton(Arranged(packed_bytes=sum(sizes)), (), codec=str(self._codec))
            places[new] = made.packed + np.cumsum([0, *sizes[:-1]]) if sizes else 0
        else:
            large = [k for k in range(len(arranged.large)) if k not in shape.taken]
            packs = bool(arranged.groups) and len(arranged.large) not in shape.taken
            made = self._cached(file, shape, large, packs)
            begins = dict(zip(large, made.offsets, strict=True)) | ({len(arranged.large): made.packed} if packs else {})
            for number, begin in begins.items():
                group = file.groups[number]
                for block in group:
                    places[block] = begin + file.blocks[block][0] - file.blocks[group.start][0]
        shape.size, shape.rest = made.size, made.rest

    def _cached(self, file: NodeFile, shape: Shape, large: list[int], packs: bool) -> Skeleton:
        arranged, specs = file.arranged, file.specs
        names = [dataset_name(specs[piece.array], piece.box) for piece in arranged.large]
        links = []
        for number, source in shape.taken.items():
            of_group = [names[number]] if number < len(names) else ["packed", "packed_index"]
            links += [(name, self._name_of(shape.others[source - 1])) for name in of_group]
        key = large, packs, links
        if self._skeleton is None or self._skeleton[0] is not file or self._skeleton[1] != key:
            packed = (arranged.packed, arranged.groups, arranged.packed_bytes) if packs else ()
            anew = Arranged([arranged.large[k] for k in large], *packed)
            self._skeleton = file, key, skeleton(anew, specs, links)
        return self._skeleton[2]

    def described(self, step: int, id_: str, file: NodeFile, shape: Shape) -> Part:
        """What was written, and what was taken over."""
        board, last = self._board, self._last
        pieces, blocks = file.compact[0], list(file.compact[1])
        sums = board.sums[: len(blocks)].tolist()
        stored = [
            Stored(0, int(board.places[block]), self.stored_bytes(block, nbytes), int(board.coded[block]), int(total))
            for block, ((_, nbytes), total) in enumerate(zip(file.blocks, board.stored, strict=False))
        ]
        for number, source in shape.taken.items():
            assert last is not None
            for block in file.groups[number]:
                stored[block] = last.stored[block]._replace(file=source)
        others = [(source.id, source.size) for source in shape.others]
        codec = "" if self._codec is None else self._codec.name
        part = Part(step, id_, self._node, shape.size, pieces, blocks, sums, stored, others, codec)
        add_rest(part, shape.rest)
        return part

    def remember(self, file: NodeFile, part: Part, shape: Shape, folders: Sequence[str]) -> None:
        """That this checkpoint was written, into the first of the folders; the others are where it will be."""
        if self._incremental:
            count = len(file.blocks)
            paths = [os.path.join(folder, part.file) for folder in folders]
            others = []
            for source in shape.others:
                there = [os.path.join(folder, self._name_of(source)) for folder in folders]
                others.append(source._replace(paths=there))
            stored = part.stored[:count]
            data = sum(each.nbytes for each in stored if each.file == 0)
            files = [_Source(part.id, part.size, data, paths), *others]
            self._last = _Last(file, self._board.sums[:count].copy(), stored, files)


def add_rest(part: Part, rest: list[tuple[int, bytes]]) -> None:
    """To what was written by ranks, what HDF5 has written. rest : of `Skeleton`"""
    at = sum(part.blocks[-1]) if part.blocks else 0
    for offset, data in cut_up(rest):
        part.blocks.append((at, len(data)))
        part.sums.append(sum_of(data))
        part.stored.append(Stored(0, offset, len(data), 0, part.sums[-1]))
        at += len(data)


def _link(source: _Source, name: str, folder: str) -> bool:
    """Whether the file could be linked into `folder`: a store without hard links, or another one than that of the last
    checkpoint, has it written again."""
    for path in source.paths * 2:  # it may move from the first to the second in between
        with suppress(OSError):
            os.link(path, os.path.join(folder, name), follow_symlinks=False)
            return True
    return False
