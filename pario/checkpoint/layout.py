"""Which rank writes which bytes of which node's file: arithmetic, the same on every rank.

An array that all ranks hold alike is written once, by one node, and its ranks divide it; a shard is written by its
owner. A node's file consists of blocks, each written by one rank and checked by one checksum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple

from pario.checkpoint.boxes import Box, cover, volume
from pario.checkpoint.hdf5 import Row, Skeleton
from pario.checkpoint.tree import Spec, item_bytes
from pario.errors import OptionError

__all__ = ["MOST_BLOCK", "PAGE", "Arranged", "Copy", "NodeFile", "Piece", "arrange", "finish", "share_out"]

PAGE = 4096
#: Blocks have up to so many bytes, and are not made smaller than the second number for the sake of balance.
MOST_BLOCK, LEAST_BLOCK = 32 << 20, 2 << 20
#: From here on a piece is a dataset of its own.
LARGE = 1 << 20
#: Small pieces begin at multiples of this: any element can be read where it lies.
_SMALL_ALIGN = 64


class Piece(NamedTuple):
    """A part of one array that lies in one node's file. writer : rank of the node that writes it; None: any"""

    array: int
    box: Box
    nbytes: int
    writer: int | None


class Copy(NamedTuple):
    """Elements [start, stop) of a piece, in C order, that a rank writes: at `staging` of its staging memory."""

    array: int
    box: Box
    start: int
    stop: int
    staging: int
    nbytes: int


@dataclass
class Arranged:
    """A node's pieces, in the order in which they lie in its file.

    large : datasets of their own; packed : (piece, offset in /packed), and `groups`: (writer, offset, bytes) of what
    becomes a block there; packed_bytes : of /packed
    """

    large: list[Piece] = field(default_factory=list)
    packed: list[tuple[Piece, int]] = field(default_factory=list)
    groups: list[tuple[int, int, int]] = field(default_factory=list)
    packed_bytes: int = 0

    def rows(self, specs: Sequence[Spec]) -> list[Row]:
        return [Row(specs[piece.array], piece.box, offset, piece.nbytes) for piece, offset in self.packed]


@dataclass
class NodeFile:
    """A node's file, and what one rank does for it.

    pieces : (array, box, offset in the file) of everything that it holds
    blocks : (offset, bytes) of the data, in order; rest : (offset, bytes) of what HDF5 wrote in between
    copies, puts : of this rank: what it copies into its staging memory; (block, offset in the staging memory)
    groups : what is written anew as a whole or taken over from an older checkpoint: each large piece, and /packed
    """

    size: int = 0
    pieces: list[tuple[int, Box, int]] = field(default_factory=list)
    blocks: list[tuple[int, int]] = field(default_factory=list)
    rest: list[tuple[int, bytes]] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    puts: list[tuple[int, int]] = field(default_factory=list)
    staging_bytes: int = 0
    arranged: Arranged = field(default_factory=Arranged)
    specs: Sequence[Spec] = ()
    groups: list[range] = field(default_factory=list)  # blocks


def share_out(
    specs: Sequence[Spec], shards: Sequence[dict[int, Box]], nodes: Sequence[Sequence[int]]
) -> list[list[Piece]]:
    """The pieces of every node.

    shards : per rank, the box of each divided array; nodes : the ranks of every node, whose positions are `writer`
    Raises OptionError if the shards of an array do not make it up.
    """
    seats = {rank: (node, seat) for node, ranks in enumerate(nodes) for seat, rank in enumerate(ranks)}
    pieces: list[list[Piece]] = [[] for _ in nodes]
    load = [0] * len(nodes)
    alike = []
    for number, spec in enumerate(specs):
        item = item_bytes(spec.dtype)
        if spec.kind != "shard":
            alike.append((volume(spec.shape) * item, number))
            continue
        owners: dict[Box, int] = {}
        for rank, boxes in enumerate(shards):
            owners.setdefault(boxes[number], rank)
        wrong = cover(spec.shape, list(owners))
        if wrong:
            raise OptionError(f"the shards of {spec.path!r} do not make up the array: {wrong}")
        for box, rank in owners.items():
            node, seat = seats[rank]
            nbytes = volume(box[1]) * item
            pieces[node].append(Piece(number, box, nbytes, seat))
            load[node] += nbytes
    for nbytes, number in sorted(alike, key=lambda each: (-each[0], each[1])):
        node = min(range(len(nodes)), key=load.__getitem__) if len(nodes) > 1 else 0
        shape = specs[number].shape
        pieces[node].append(Piece(number, ((0,) * len(shape), shape), nbytes, None))
        load[node] += nbytes
    return [sorted((each for each in own if each.nbytes), key=lambda each: (each.array, each.box)) for own in pieces]


def arrange(pieces: Sequence[Piece], ranks: int) -> Arranged:
    """The pieces of a node of so many ranks, in order; small ones by the rank that writes them."""
    made = Arranged([piece for piece in pieces if piece.nbytes >= LARGE])
    small = [piece for piece in pieces if piece.nbytes < LARGE]
    block = _block_bytes(pieces, ranks)
    own: list[list[Piece]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for piece in small:
        if piece.writer is not None:
            own[piece.writer].append(piece)
            load[piece.writer] += piece.nbytes
    fair = -(-sum(piece.nbytes for piece in small) // ranks)
    writer = 0
    for piece in small:
        if piece.writer is None:
            while writer < ranks - 1 and load[writer] >= fair:
                writer += 1
            own[writer].append(piece)
            load[writer] += piece.nbytes
    at = 0
    for writer, mine in enumerate(own):
        begin = at
        for piece in mine:
            if at > begin and at - begin + piece.nbytes > block:
                begin = at = _end_group(made, writer, begin, at)
            made.packed.append((piece, at))
            at = -(-(at + piece.nbytes) // _SMALL_ALIGN) * _SMALL_ALIGN
        if at > begin:
            at = _end_group(made, writer, begin, at)
    made.packed_bytes = made.groups[-1][1] + made.groups[-1][2] if made.groups else 0
    return made


def _end_group(made: Arranged, writer: int, begin: int, at: int) -> int:
    """Where the next one begins: at a page. The bytes in between belong to this one."""
    end = -(-at // PAGE) * PAGE
    made.groups.append((writer, begin, end - begin))
    return end


def _block_bytes(pieces: Sequence[Piece], ranks: int) -> int:
    """About eight blocks per rank, within bounds."""
    fair = sum(piece.nbytes for piece in pieces) // (8 * ranks)
    return max(LEAST_BLOCK, min(MOST_BLOCK, fair // PAGE * PAGE))


def finish(arranged: Arranged, specs: Sequence[Spec], made: Skeleton, seat: int, ranks: int) -> NodeFile:
    """The node's file as HDF5 has laid it out; `copies` and `puts` of the rank at `seat`."""
    file = NodeFile(made.size, rest=made.rest, arranged=arranged, specs=specs)
    block = _block_bytes([*arranged.large, *(piece for piece, _ in arranged.packed)], ranks)
    load = [0] * ranks
    for piece in arranged.large:
        load[piece.writer or 0] += piece.nbytes if piece.writer is not None else 0
    for writer, _, nbytes in arranged.groups:
        load[writer] += nbytes
    todo: list[tuple[int, int, int, Piece | None, int]] = []  # offset, bytes, writer, piece, its first element
    for piece, offset in zip(arranged.large, made.offsets, strict=True):
        file.pieces.append((piece.array, piece.box, offset))
        item = item_bytes(specs[piece.array].dtype)
        unit = lcm(item, PAGE) if lcm(item, PAGE) <= MOST_BLOCK else item
        if unit > MOST_BLOCK:
            raise OptionError(f"an element of {specs[piece.array].path!r} has {item:,} bytes: at most {MOST_BLOCK:,}")
        step = max(block // unit, 1) * unit
        for begin in range(0, piece.nbytes, step):
            nbytes = min(step, piece.nbytes - begin)
            owner = piece.writer
            if owner is None:
                owner = min(range(ranks), key=load.__getitem__)
                load[owner] += nbytes
            todo.append((offset + begin, nbytes, owner, piece, begin // item))
    todo += [(made.packed + begin, nbytes, writer, None, 0) for writer, begin, nbytes in arranged.groups]
    file.pieces += [(piece.array, piece.box, made.packed + offset) for piece, offset in arranged.packed]
    todo.sort(key=lambda each: each[0])
    small = iter(arranged.packed)
    following = next(small, None)
    for number, (offset, nbytes, writer, whole, start) in enumerate(todo):
        file.blocks.append((offset, nbytes))
        if writer == seat:
            file.puts.append((number, file.staging_bytes))
        if whole is not None:
            if writer == seat:
                _add(file, whole, start, nbytes, item_bytes(specs[whole.array].dtype))
        else:
            while following is not None and made.packed + following[1] < offset + nbytes:
                one, at = following
                if writer == seat:
                    staging = file.staging_bytes + made.packed + at - offset
                    file.copies.append(Copy(one.array, one.box, 0, volume(one.box[1]), staging, one.nbytes))
                following = next(small, None)
        if writer == seat:
            file.staging_bytes += -(-nbytes // PAGE) * PAGE
    begins = [*made.offsets, *([made.packed] if arranged.groups else [])]
    starts = [offset for offset, _ in file.blocks]
    ends = [piece.nbytes for piece in arranged.large] + [arranged.packed_bytes]
    for begin, nbytes in zip(begins, ends, strict=False):
        file.groups.append(range(bisect_left(starts, begin), bisect_left(starts, begin + nbytes)))
    return file


def _add(file: NodeFile, piece: Piece, start: int, nbytes: int, item: int) -> None:
    """A block of a large piece; one that continues the one before is copied together with it."""
    stop = start + nbytes // item
    last = file.copies[-1] if file.copies else None
    goes_on = last is not None and (last.array, last.box, last.stop) == (piece.array, piece.box, start)
    if last is not None and goes_on and last.staging + last.nbytes == file.staging_bytes:
        file.copies[-1] = last._replace(stop=stop, nbytes=last.nbytes + nbytes)
        return
    file.copies.append(Copy(piece.array, piece.box, start, stop, file.staging_bytes, nbytes))
