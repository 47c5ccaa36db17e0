"""The files of the nodes: which rank writes which bytes of which one, how h5py lays them out, and the staging memory
that they are copied to first.

An array that all ranks hold alike is written once, by one node, and its ranks divide it; a shard, and an array that
differs between ranks, is written by its owner. A node's file consists of blocks, each written by one rank and checked
by one checksum. This is arithmetic, the same on every rank.

h5py makes the file once per structure of the tree, as a sparse file in memory: contiguous datasets, allocated early, at
aligned offsets. What HDF5 itself writes, the bytes between the data, is kept; each checkpoint is then written by plain
`pwrite` of these bytes and of the data, by several threads and processes, without HDF5's lock. h5py and h5dump read the
result:

    /arrays/PATH           a piece of 1 MiB or more: a dataset of the array's type and the piece's shape
    /packed                u8: all smaller pieces, one after another
    /packed_index          a row per smaller piece: path, dtype, shape (JSON), offset in /packed, nbytes, part_of (JSON)

What an incremental checkpoint takes over from an older one is an external link to its file, which lies in the same
folder. A compressed checkpoint has its blocks, packed by a codec, in /blocks instead: only pario reads them.

PATH has the keys of the tree; a piece of a divided array ends with "@" and its offset, and says in the attributes
`global_shape` and `offset` what it is a part of. An array of a type that HDF5 does not know (bfloat16, text, dates) is
held as integers or bytes, and the attribute `dtype` names its type.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import lcm, prod
from types import MappingProxyType
from typing import Any, NamedTuple

import h5py
import numpy as np

from pario.checkpoint.flat import Flat
from pario.checkpoint.manifest import arrays_text, cover, pieces_text
from pario.checkpoint.store import PAGE, whole_pages
from pario.checkpoint.tree import FOREIGN, Box, Leaves, Spec, dtype_of
from pario.comm.base import AnyWorld, together
from pario.comm.memory import private_bytes
from pario.errors import OptionError

#: Blocks have up to this many bytes, which are one request, and are not made smaller than the second number for the
#: sake of balance. Ranks that want parts of one block wait for each other: larger ones made that frequent.
MOST_BLOCK, LEAST_BLOCK = 4 << 20, 2 << 20
#: Of an element, which no block cuts.
_MOST_ITEM = 32 << 20
#: From here on a piece is a dataset of its own.
LARGE = 1 << 20
#: Small pieces begin at multiples of this: any element can be read where it lies.
_SMALL_ALIGN = 64
#: Kinds of NumPy dtypes that HDF5 has types for, bit by bit the same.
_NATIVE = "biufc"


# -- who writes what ---------------------------------------------------------------------------------------------------


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

    @cached_property
    def compact(self) -> tuple[list[tuple[int, Box, int]], list[tuple[int, int]]]:
        """(pieces, blocks) with offsets as if the blocks lay one after another."""
        offsets = [offset for offset, _ in self.blocks]
        begins = list(accumulate((nbytes for _, nbytes in self.blocks), initial=0))
        pieces = []
        for array, box, offset in self.pieces:
            block = bisect_right(offsets, offset) - 1
            pieces.append((array, box, begins[block] + offset - offsets[block]))
        return pieces, [(begin, nbytes) for begin, (_, nbytes) in zip(begins, self.blocks, strict=False)]

    @cached_property
    def pieces_text(self) -> str:
        return pieces_text(self.compact[0])

    @cached_property
    def arrays_text(self) -> str:
        return arrays_text(self.specs)


def share_out(
    specs: Sequence[Spec],
    shards: Sequence[dict[int, Box]],
    nodes: Sequence[Sequence[int]],
    owners: Mapping[int, int] = MappingProxyType({}),
) -> list[list[Piece]]:
    """The pieces of every node.

    shards : per rank, the box of each divided array; nodes : the ranks of every node, whose positions are `writer`;
    owners : the rank that writes a whole array, where one does
    Raises OptionError if the shards of an array do not make it up.
    """
    seats = {rank: (node, seat) for node, ranks in enumerate(nodes) for seat, rank in enumerate(ranks)}
    pieces: list[list[Piece]] = [[] for _ in nodes]
    load = [0] * len(nodes)
    alike = []
    for number, spec in enumerate(specs):
        held: dict[Box, int] = {}
        if spec.kind == "shard":
            for rank, boxes in enumerate(shards):
                held.setdefault(boxes[number], rank)
            wrong = cover(spec.shape, list(held))
            if wrong:
                raise OptionError(f"the shards of {spec.path!r} do not make up the array: {wrong}")
        elif number in owners:
            held[(0,) * len(spec.shape), spec.shape] = owners[number]
        else:
            alike.append((spec.nbytes, number))
        for box, rank in held.items():
            node, seat = seats[rank]
            nbytes = prod(box[1]) * spec.item
            pieces[node].append(Piece(number, box, nbytes, seat))
            load[node] += nbytes
    for nbytes, number in sorted(alike, key=lambda each: (-each[0], each[1])):
        node = min(range(len(nodes)), key=load.__getitem__) if len(nodes) > 1 else 0
        shape = specs[number].shape
        pieces[node].append(Piece(number, ((0,) * len(shape), shape), nbytes, None))
        load[node] += nbytes
    return [sorted((each for each in own if each.nbytes), key=lambda each: (each.array, each.box)) for own in pieces]


def arrange(pieces: Sequence[Piece], ranks: int) -> Arranged:
    """The pieces of a node of this many ranks, in order; small ones by the rank that writes them."""
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
    end = whole_pages(at)
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
        item = specs[piece.array].item
        unit = lcm(item, PAGE) if lcm(item, PAGE) <= MOST_BLOCK else item
        if item > _MOST_ITEM:
            raise OptionError(f"an element of {specs[piece.array].path!r} has {item:,} bytes: at most {_MOST_ITEM:,}")
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
                _add(file, whole, start, nbytes, specs[whole.array].item)
        else:
            while following is not None and made.packed + following[1] < offset + nbytes:
                one, at = following
                if writer == seat:
                    staging = file.staging_bytes + made.packed + at - offset
                    file.copies.append(Copy(one.array, one.box, 0, prod(one.box[1]), staging, one.nbytes))
                following = next(small, None)
        if writer == seat:
            file.staging_bytes += whole_pages(nbytes)
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


# -- as HDF5 has it ----------------------------------------------------------------------------------------------------


class Skeleton(NamedTuple):
    """size : of the file in bytes; offsets : of the large pieces' bytes; packed : offset of /packed; rest : (offset,
    bytes) of everything else, in order"""

    size: int
    offsets: list[int]
    packed: int
    rest: list[tuple[int, bytes]]


def skeleton(
    arranged: Arranged, specs: Sequence[Spec], links: Sequence[tuple[str, str]] = (), codec: str = ""
) -> Skeleton:
    """Lays out a file. links : (name, file in the same folder that has it under this name); codec : of blocks that it
    has packed, which are all that `arranged` has"""
    packed = arranged.packed_bytes
    with os.fdopen(os.memfd_create("pario-checkpoint", os.MFD_CLOEXEC), "r+b", buffering=0) as memory:
        # Datasets of a page or more begin at one: O_DIRECT can write them.
        with h5py.File(memory, "w", alignment_threshold=PAGE, alignment_interval=PAGE) as file:
            file.attrs["format"] = "pario checkpoint"
            offsets = [_dataset(file, specs[piece.array], piece.box) for piece in arranged.large]
            name = "blocks" if codec else "packed"
            begin = _contiguous(file, name, (packed,), np.dtype(np.uint8)).id.get_offset() if packed else 0
            if codec:
                file.attrs["codec"] = codec
                file.attrs["read with"] = "pario.Checkpointer, or python -m pario checkpoint restore-to-npz"
            if arranged.packed:
                file["packed_index"] = _index(arranged, specs)
            for name, other in links:
                file[name] = h5py.ExternalLink(other, name)
        data = [(offset, piece.nbytes) for offset, piece in zip(offsets, arranged.large, strict=True)]
        size, rest = _between(memory, [*data, *([(begin, packed)] if packed else [])])
    return Skeleton(size, offsets, begin, rest)


def _between(memory: Any, data: list[tuple[int, int]]) -> tuple[int, list[tuple[int, bytes]]]:
    """(size of the file, what HDF5 has written between the data). data : (offset, bytes)"""
    size = memory.seek(0, os.SEEK_END)
    rest, at = [], 0
    for offset, count in [*sorted(data), (size, 0)]:
        if offset > at:
            rest.append((at, os.pread(memory.fileno(), offset - at, at)))
        at = offset + count
    return size, rest


def cut_up(rest: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """`Skeleton.rest` in parts as long as blocks may be: an index of many rows is longer."""
    return [(at + k, data[k : k + MOST_BLOCK]) for at, data in rest for k in range(0, len(data), MOST_BLOCK)]


def dataset_name(spec: Spec, box: Box) -> str:
    """Of a large piece."""
    name = f"arrays/{spec.path or 'root'}"
    return name + "@" + ",".join(map(str, box[0])) if spec.kind == "shard" else name


def _dataset(file: Any, spec: Spec, box: Box) -> int:
    dtype = dtype_of(spec.dtype)
    shape = box[1]
    if spec.dtype not in FOREIGN and (dtype.kind not in _NATIVE or dtype.itemsize > 16 or dtype == np.longdouble):
        shape, dtype = (*shape, dtype.itemsize), np.dtype(np.uint8)
    made = _contiguous(file, dataset_name(spec, box), shape, dtype)
    made.attrs["dtype"] = spec.dtype
    if spec.kind == "shard":
        made.attrs["global_shape"] = spec.shape
        made.attrs["offset"] = box[0]
    return int(made.id.get_offset())


def _contiguous(file: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A dataset whose bytes have their offset now, and which HDF5 does not fill."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return file.create_dataset(name, shape, dtype, dcpl=properties)


def _index(arranged: Arranged, specs: Sequence[Spec]) -> np.ndarray:
    table: list[tuple[Any, ...]] = []
    for piece, at in arranged.packed:
        spec, (offset, shape) = specs[piece.array], piece.box
        part_of = json.dumps({"global_shape": spec.shape, "offset": offset}) if spec.kind == "shard" else ""
        texts = spec.path, spec.dtype, json.dumps(shape)
        table.append((*map(str.encode, texts), at, piece.nbytes, part_of.encode()))
    names = ("path", "dtype", "shape", "offset", "nbytes", "part_of")
    kinds = [
        "i8" if isinstance(column[0], int) else f"S{max(1, *map(len, column))}" for column in zip(*table, strict=True)
    ]
    return np.array(table, list(zip(names, kinds, strict=True)))


# -- staging memory ----------------------------------------------------------------------------------------------------


class Staging:
    """Of one rank. file : the node's file, and what this rank writes of it; memory : u8[bytes that this rank writes]"""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self.file = NodeFile()
        self.memory = np.empty(0, np.uint8)
        self._copies: list[tuple[int, Any, slice | None]] = []  # array, target in the memory, its elements or all

    def copy(self, flat: Flat) -> None:
        """A tree of the structure that was laid out."""
        values, copyto, copy = flat.values, np.copyto, self._leaves.copy
        for number, target, run in self._copies:
            value = values[number]
            if run is None and type(value) is np.ndarray and value.dtype == target.dtype:
                copyto(target, value)
            else:
                copy(value, target, run)

    def lay_out(self, world: AnyWorld, flat: Flat, owners: Mapping[int, int]) -> None:
        """A new structure, the same on all ranks: which rank writes what, and where. owners : of `share_out`.
        Collective."""
        self._copies, self.memory = [], np.empty(0, np.uint8)
        shards = {n: box for n, box in enumerate(flat.boxes) if flat.specs[n].kind == "shard"}
        everyones = world.allgather((world.node, shards))
        arranged = Arranged()
        made = None
        with together(world, "laying out a checkpoint"):
            nodes = [[rank for rank, each in enumerate(everyones) if each[0] == node] for node in range(world.nodes)]
            pieces = share_out(flat.specs, [each[1] for each in everyones], nodes, owners)[world.node]
            arranged = arrange(pieces, world.node_size)
            if world.is_leader:
                made = skeleton(arranged, flat.specs)
        made = world.node_bcast(made)
        with together(world, "laying out a checkpoint"):
            self.file = finish(arranged, flat.specs, made, world.node_rank, world.node_size)
            self.memory = private_bytes(self.file.staging_bytes)
            self._copies = list(self._targets(flat))

    def _targets(self, flat: Flat) -> Iterator[tuple[int, np.ndarray, slice | None]]:
        for array, box, start, stop, at, nbytes in self.file.copies:
            whole = stop - start == prod(box[1])
            memory = self.memory[at : at + nbytes].view(dtype_of(flat.specs[array].dtype))
            yield array, memory.reshape(box[1] if whole else -1), None if whole else slice(start, stop)
