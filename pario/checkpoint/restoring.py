"""From files to arrays, on any number of ranks: each block is read once in the job, checked, and handed to the ranks
that need a part of it.

`Moves` says what this rank takes from a block: a run of bytes, or boxes where it needs another part of an array than
was written as a whole. What no other rank needs, a rank reads straight into its arrays where it can. What several ranks
need they read in rounds into memory that the ranks of a node share; what several nodes need, one reads and sends to the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from pario.checkpoint.boxes import Box, meet, runs, slices, volume
from pario.checkpoint.finding import Opened
from pario.checkpoint.manifest import Manifest, Part
from pario.checkpoint.parts import PartReader
from pario.checkpoint.tree import dtype_of, item_bytes
from pario.comm.base import AnyWorld, together
from pario.comm.memory import private_bytes, shared_parts
from pario.comm.world import bcast_to_nodes
from pario.errors import CorruptedError
from pario.threads import Workers

__all__ = ["Wish", "empty_bytes", "read_all"]

_PAGE = 4096
#: Threads of a rank alone; blocks in flight of a node with several ranks.
_THREADS = 3
_SLOTS = 6


#: part -> its files
Read = Callable[[int], PartReader]


class Wish(NamedTuple):
    """A part of an array that this rank wants, in `memory`, u8[bytes] in C order."""

    array: int
    box: Box
    memory: np.ndarray


class Move(NamedTuple):
    """Bytes [at, at + nbytes) of a block. straight : u8, where they go as they are; otherwise elements [start, stop) of
    the piece `box` go into `wish`."""

    at: int
    nbytes: int
    straight: np.ndarray | None
    wish: int
    box: Box
    start: int
    stop: int


class Block(NamedTuple):
    """Of one node's file: what this rank takes from it."""

    part: int
    number: int
    nbytes: int
    moves: list[Move]


def empty_bytes(nbytes: int) -> np.ndarray:
    """u8[nbytes], page-aligned where that pays."""
    if nbytes < 1 << 16:
        return np.empty(nbytes, np.uint8)
    raw = np.empty(nbytes + _PAGE, np.uint8)
    start = -raw.__array_interface__["data"][0] % _PAGE  # `ctypes.data` took a tenth of restoring small arrays
    return raw[start : start + nbytes]


def read_all(world: AnyWorld, opened: Opened, wishes: list[Wish], take: Callable[[int], None] | None = None) -> None:
    """Fill the memory of all wishes. Collective over `world`.

    take(nbytes) : returns when so many may be read; None: at once
    Raises ChecksumError, CorruptedError, ReadError on the rank where it happens, PeerError on the others.
    """
    manifest, parts, where = opened
    with ExitStack() as stack:
        readers: dict[int, PartReader] = {}

        def reader(part: int) -> PartReader:
            if part not in readers:
                readers[part] = stack.enter_context(PartReader(where[world.node][part], parts[part], take))
            return readers[part]

        if world.size == 1:  # which reads while it still plans
            _alone((block for block in _blocks(manifest, parts, wishes) if block.moves), reader, manifest, wishes)
        else:
            with together(world, "preparing to restore"):
                blocks = list(_blocks(manifest, parts, wishes))
            _Rounds(world, manifest, wishes, blocks, [list(folders) for folders in where]).read(reader)


def _blocks(manifest: Manifest, parts: Sequence[Part], wishes: list[Wish]) -> Iterator[Block]:
    """All blocks of all parts, also those that this rank takes nothing from."""
    wanted: dict[int, list[int]] = {}
    for k, wish in enumerate(wishes):
        wanted.setdefault(wish.array, []).append(k)
    for number, part in enumerate(parts):
        pieces = sorted(part.pieces, key=lambda each: each[2])
        at = 0  # the first piece that may reach into the block
        for block, (offset, nbytes) in enumerate(part.blocks):
            moves: list[Move] = []
            k = at
            while k < len(pieces) and pieces[k][2] < offset + nbytes:
                array, box, begin = pieces[k]
                item = item_bytes(manifest.specs[array].dtype)
                end = begin + volume(box[1]) * item
                first, last = max(begin, offset), min(end, offset + nbytes)
                if last > first:
                    if item and ((first - begin) % item or (last - begin) % item):
                        raise CorruptedError(f"a block at {offset} cuts an element of {manifest.specs[array].path!r}")
                    span = (first - begin) // item, (last - begin) // item
                    for number_of_wish in wanted.get(array, ()):
                        moves += _move(wishes, number_of_wish, box, span, first - offset, item)
                if end <= offset + nbytes and k == at:
                    at += 1
                k += 1
            yield Block(number, block, nbytes, moves)


def _move(wishes: list[Wish], wish: int, box: Box, span: tuple[int, int], at: int, item: int) -> list[Move]:
    start, stop = span
    nbytes = (stop - start) * item
    wanted = wishes[wish].box
    both = box if box == wanted else meet(box, wanted)
    if both is None:
        return []
    if both == box and box[1][1:] == wanted[1][1:]:  # the piece is a run of the wanted part
        row = volume(box[1][1:])
        begin = ((box[0][0] - wanted[0][0]) * row if box[0] else 0) + start
        return [Move(at, nbytes, wishes[wish].memory[begin * item : begin * item + nbytes], wish, box, start, stop)]
    return [Move(at, nbytes, None, wish, box, start, stop)]


def _apply(block: Block, data: np.ndarray, manifest: Manifest, wishes: list[Wish]) -> None:
    for move in block.moves:
        source = data[move.at : move.at + move.nbytes]
        if move.straight is not None:
            np.copyto(move.straight, source)
            continue
        wish = wishes[move.wish]
        dtype = dtype_of(manifest.specs[wish.array].dtype)
        target = wish.memory.view(dtype).reshape(wish.box[1])
        elements = source.view(dtype)
        done = 0
        for offset, shape in runs(move.box[1], move.start, move.stop):
            count = volume(shape)
            run: Box = (tuple(o + p for o, p in zip(offset, move.box[0], strict=True)), shape)
            both = meet(run, wish.box)
            if both is not None:
                piece = elements[done : done + count].reshape(shape)
                target[slices(both, wish.box[0])] = piece[slices(both, run[0])]
            done += count


def _alone(blocks: Iterable[Block], reader: Read, manifest: Manifest, wishes: list[Wish]) -> None:
    """Blocks that no other rank needs."""
    workers = Workers("pario-restore", _THREADS)
    memory: list[np.ndarray] = []

    def read(reader: PartReader, block: Block) -> None:
        only = block.moves[0]
        if len(block.moves) == 1 and only.straight is not None and only.nbytes == block.nbytes:
            reader.read(block.number, only.straight)
            return
        try:
            held = memory.pop()
        except IndexError:
            held = empty_bytes(0)
        if held.size < block.nbytes:
            held = private_bytes(-(-block.nbytes // _PAGE) * _PAGE)
        data = held[: block.nbytes]
        reader.read(block.number, data)
        _apply(block, data, manifest, wishes)
        memory.append(held)

    calls: list[Future[Any]] = []
    try:
        for block in blocks:
            calls.append(workers.call(read, reader(block.part), block))
        for call in calls:
            call.result()
    finally:
        workers.end(cancel=True)


class _Rounds:
    """Several ranks. All of them compute the same rounds from what all of them need."""

    def __init__(
        self, world: AnyWorld, manifest: Manifest, wishes: list[Wish], blocks: list[Block], can: list[list[int]]
    ) -> None:
        self._world, self._manifest, self._wishes, self._blocks = world, manifest, wishes, blocks
        mine = np.packbits([bool(block.moves) for block in blocks]).tobytes()
        needs = np.zeros((world.nodes, len(blocks)), int)  # ranks of the node
        for node, bits in world.allgather((world.node, mine)):
            needs[node] += np.unpackbits(np.frombuffer(bits, np.uint8), count=len(blocks))
        has = np.array([[block.part in folders for block in blocks] for folders in can], bool).reshape(needs.shape)
        only = (needs.sum(axis=0) == 1) & ((needs > 0) & has).any(axis=0)
        self._mine = [blocks[k] for k in np.flatnonzero(only).tolist() if blocks[k].moves]
        needs[:, only] = 0
        self._slot_bytes = -(-max((block.nbytes for block in blocks), default=1) // _PAGE) * _PAGE
        self._rounds = self._plan(needs, can)

    def _plan(self, needs: np.ndarray, can: list[list[int]]) -> list[list[tuple[int, int, bool]]]:
        """Rounds of (block, node that reads it, whether all nodes get it)."""
        able = [set(parts) for parts in can]
        load = [0] * len(able)
        rounds: list[list[tuple[int, int, bool]]] = []
        used = [0] * len(able)
        for k in np.flatnonzero(needs.any(axis=0)).tolist():
            block = self._blocks[k]
            takers = np.flatnonzero(needs[:, k]).tolist()
            sources = [node for node in range(len(able)) if block.part in able[node]]
            near = [node for node in takers if node in sources] or sources
            source = min(near, key=load.__getitem__)
            load[source] += block.nbytes
            everywhere = takers != [source]
            present = range(len(able)) if everywhere else [source]
            if not rounds or any(used[node] >= _SLOTS for node in present):
                rounds.append([])
                used = [0] * len(able)
            for node in present:
                used[node] += 1
            rounds[-1].append((k, source, everywhere))
        return rounds

    def read(self, reader: Read) -> None:
        """Collective."""
        world = self._world
        with together(world, "reading a checkpoint"):
            _alone(self._mine, reader, self._manifest, self._wishes)
        if not self._rounds:
            return
        (window,) = shared_parts(world, [_SLOTS * self._slot_bytes], "restoring a checkpoint")
        for turn in self._rounds:
            slots: dict[int, np.ndarray] = {}
            mine: list[int] = []
            for k, source, everywhere in turn:
                if everywhere or source == world.node:
                    at = len(slots) * self._slot_bytes
                    slots[k] = window[at : at + self._blocks[k].nbytes]
                    if source == world.node:
                        mine.append(k)
            with together(world, "reading a checkpoint"):
                for k in mine[world.node_rank :: world.node_size]:
                    block = self._blocks[k]
                    reader(block.part).read(block.number, slots[k])
            for k, source, everywhere in turn:
                if everywhere:
                    bcast_to_nodes(world, slots[k], source)
            world.node_barrier()
            for k, data in slots.items():
                _apply(self._blocks[k], data, self._manifest, self._wishes)
            world.node_barrier()
