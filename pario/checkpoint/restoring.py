"""A tree out of a checkpoint, on any number of ranks: which checkpoint, what is wanted of it, and its bytes.

Each block is read once in the job, checked, and handed to the ranks that need a part of it. `Move` says what this rank
takes from a block: a run of bytes, or boxes where it needs another part of an array than was written as a whole. What
no other rank needs, a rank reads straight into its arrays where it can. What several ranks need they read in rounds
into memory that the ranks of a node share; what several nodes need, one reads and sends to the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pario.checkpoint.finding import Finder, Found, Opened, PartReader, open_found
from pario.checkpoint.manifest import Manifest, Part
from pario.checkpoint.store import PAGE, whole_pages
from pario.checkpoint.tree import Box, Leaves, PerRank, Shard, Spec, dtype_of, item_bytes, reaches_out, unflatten
from pario.comm.base import AnyWorld, together
from pario.comm.memory import private_bytes, shared_parts
from pario.comm.world import bcast_to_nodes, same_ranks
from pario.errors import CorruptedError, MissingError, OptionError, PeerError, ReadError, StateError
from pario.threads import Workers

__all__ = ["Wish", "empty_bytes", "meet", "read_all", "restored", "runs", "slices"]

_log = logging.getLogger("pario")

#: What makes `restored` try an older checkpoint.
_DAMAGE = (CorruptedError, MissingError, ReadError)
#: Threads of a rank alone; blocks in flight of a node with several ranks.
_THREADS = 3
_SLOTS = 6
#: part -> its files
Read = Callable[[int], PartReader]


# -- the tree ----------------------------------------------------------------------------------------------------------


def restored(
    world: AnyWorld,
    finder: Finder,
    step: int | None,
    tiers: tuple[str, str | None],
    like: Any,
    leaves: Leaves,
    take: Callable[[int], None] | None = None,
) -> tuple[Any, list[str]]:
    """The tree, or what `like` asks for of it, of the newest checkpoint that is not damaged; and its id, followed by
    those of its parents. Collective.

    step : the newest of this step; tiers : the slow folder and the fast one; take(nbytes) : returns when so many may be
    read from the slow one
    Raises on all ranks: MissingError if there is none, StateError if `like` does not fit, and the error of the newest
    if all are damaged.
    """
    first: Exception | None = None
    tried: set[tuple[Any, ...]] = set()
    everything = finder.find()
    found = [each for each in everything if step in (None, each.step)]
    if not found:
        what = "no complete checkpoint" + ("" if step is None else f" of step {step}")
        hint = f"The newest one is step {everything[0].step}" if everything else "Ask latest() first: None says so"
        raise world.raised_by_all(MissingError(what, path=tiers[0], hint=hint))
    while True:
        each, error, tree = found[0], None, None
        try:
            tree = _tree(world, each, tiers, like, leaves, take)
        except Exception as e:  # all ranks raise together
            error = e
        kinds = world.allgather(_kind_of(error))
        if not any(kinds):
            if first is not None:
                _log.warning("restored %s instead", each.words)
            assert tree is not None
            return tree[0], [each.id, *(tree[1].parents or ())]
        if error is None:
            error = PeerError("another rank could not restore its part")
        if "like" in kinds and not isinstance(error, StateError):
            raise world.raised_by_all(StateError(str(error)))
        if "like" in kinds or "other" in kinds:
            raise error
        tried.add(each.which)
        # A job that saves beside this one may have deleted what was listed: then it is not damaged.
        there = [one for one in finder.find() if step in (None, one.step)]
        if any(one.which == each.which for one in there):
            first = first or error
            _log.warning("the checkpoint of %s is damaged: %s", each.words, error)
        found = [one for one in there if one.which not in tried]
        if not found:
            raise first or error


def _tree(
    world: AnyWorld,
    found: Found,
    tiers: tuple[str, str | None],
    like: Any,
    leaves: Leaves,
    take: Callable[[int], None] | None,
) -> tuple[Any, Manifest]:
    """Collective; raises on all ranks."""
    opened = open_found(world, found, *tiers)
    manifest = opened.manifest
    wishes: list[Wish] = []

    def wish(leaf: Any, number: int, path: str) -> None:
        spec = manifest.specs[number]
        box = _wanted(leaf, spec, leaves, path)
        wishes.append(Wish(number, box, empty_bytes(prod(box[1]) * item_bytes(spec.dtype))))

    def built(leaf: Any, number: int, path: str = "") -> Any:
        spec, got = manifest.specs[number], next(results)
        like = leaf.array if isinstance(leaf, Shard) else leaf
        array = leaves.build(got.memory, spec.dtype, got.box[1], like)
        return array[()] if spec.kind == "scalar" else array

    def tree(array: Callable[[Any, int, str], Any]) -> Any:
        return _Picker(array, leaves, len(manifest.specs), world.rank).pick(like, manifest.description)

    with together(world, "comparing `like` with the checkpoint"):
        tree(wish)
    if world.rank == 0 and manifest.ranks != world.size and manifest.per_rank:
        _log.warning(
            "%s was saved by %d ranks and is restored on %d: a rank gets the PerRank values of the rank of its number, "
            "and None if there was none", found.words, manifest.ranks, world.size,
        )  # fmt: skip
    # A world of its own: the memory that its ranks share goes back when it ends.
    twin = same_ranks(world)
    try:
        read_all(twin, opened, wishes, None if found.fast else take)
    except BaseException as e:
        twin.abandon(e)
        raise
    twin.free()
    results = iter(wishes)
    return tree(built), manifest


def _kind_of(error: Exception | None) -> str:
    """ "damage" of the checkpoint; "like", which does not fit; "peer"; "other"; "" without an error."""
    if error is None or isinstance(error, PeerError):
        return "" if error is None else "peer"
    return "damage" if isinstance(error, _DAMAGE) else "like" if isinstance(error, StateError) else "other"


class _Picker:
    """What `like` asks for: its tree, with what was saved as leaves. array(leaf of like, number, path) makes an array.

    What `like` leaves out is left out; None asks for whatever is there, and a plain value for any plain value.
    """

    def __init__(self, array: Callable[[Any, int, str], Any], leaves: Leaves, arrays: int, rank: int) -> None:
        self._array, self._leaves, self._arrays, self._rank = array, leaves, arrays, rank

    def pick(self, like: Any, saved: Any, path: str = "") -> Any:
        """saved : the description. Raises StateError where `like` and the saved tree differ."""
        if isinstance(like, PerRank):
            like = like.value
        kind = next(iter(saved)) if isinstance(saved, dict) and len(saved) == 1 else ""
        if kind == "ranks":
            everyones = saved["ranks"]
            return self.pick(like, everyones[self._rank], path) if self._rank < len(everyones) else None
        below, here = path + "/" if path else "", path or "the root"
        if isinstance(like, dict):
            if kind != "dict":
                raise _misfit("a dict", here, saved, kind)
            children = {key: child for key, child in saved["dict"]}
            missing = [key for key in like if key not in children]
            if missing:
                raise StateError(f"the checkpoint has no {missing[0]!r} in {here!r}; it has {list(children)[:20]}")
            return {key: self.pick(value, children[key], f"{below}{key}") for key, value in like.items()}
        if isinstance(like, list | tuple):
            if kind not in ("list", "tuple") or len(saved[kind]) != len(like):
                raise _misfit(f"{len(like)} items", here, saved, kind)
            pairs = enumerate(zip(like, saved[kind], strict=True))
            found = [self.pick(value, child, f"{below}[{k}]") for k, (value, child) in pairs]
            if hasattr(like, "_fields"):
                return type(like)(*found)
            return found if isinstance(like, list) else tuple(found)
        if kind == "array":
            return self._array(like, saved["array"], here)
        if like is not None:
            if isinstance(like, Shard) or _described(like, self._leaves, here) is not None:
                raise _misfit("an array", here, saved, kind)
            if kind in ("dict", "list", "tuple"):
                raise _misfit(type(like).__name__, here, saved, kind)
        return unflatten(saved, lambda number: self._array(None, number, ""), self._arrays, self._rank)


def _misfit(wanted: str, path: str, saved: Any, kind: str) -> StateError:
    there = {"array": "an array", "dict": "a dict"}.get(kind, "a plain value")
    if kind in ("list", "tuple"):
        there = f"a {kind} of {len(saved[kind])} items"
    return StateError(f"like has {wanted} at {path!r}, and the checkpoint {there}")


def _described(leaf: Any, leaves: Leaves, path: str) -> tuple[str, tuple[int, ...]] | None:
    try:
        return leaves.describe(leaf)
    except OptionError as e:
        raise StateError(f"like has {type(leaf).__name__} at {path!r}: {e}") from None


def _wanted(leaf: Any, spec: Spec, leaves: Leaves, path: str) -> Box:
    """The box of an array that a leaf of `like` asks for. Raises StateError if it does not fit."""
    whole: Box = ((0,) * len(spec.shape), spec.shape)
    if leaf is None:
        return whole
    shard = leaf if isinstance(leaf, Shard) else None
    described = _described(leaf.array if shard is not None else leaf, leaves, path)
    if described is None:
        raise StateError(f"like has {type(leaf).__name__} at {path!r}, and the checkpoint an array")
    dtype, shape = described
    expected = shard.global_shape if shard is not None else shape
    if dtype != spec.dtype or expected != spec.shape:
        raise StateError(
            f"like has {dtype}{list(expected)} at {path!r}, and the checkpoint {spec.dtype}{list(spec.shape)}"
        )
    if shard is None:
        return whole
    if not len(shard.offset) == len(shape) == len(spec.shape) or reaches_out((shard.offset, shape), spec.shape):
        raise StateError(f"{shard} with an array of shape {shape} does not lie in the whole array, at {path!r}")
    return shard.offset, shape


# -- its bytes ---------------------------------------------------------------------------------------------------------


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
    raw = np.empty(nbytes + PAGE, np.uint8)
    start = -raw.__array_interface__["data"][0] % PAGE  # `ctypes.data` took a tenth of restoring small arrays
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
                end = begin + prod(box[1]) * item
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
        row = prod(box[1][1:])
        begin = ((box[0][0] - wanted[0][0]) * row if box[0] else 0) + start
        return [Move(at, nbytes, wishes[wish].memory[begin * item : begin * item + nbytes], wish, box, start, stop)]
    return [Move(at, nbytes, None, wish, box, start, stop)]


def meet(a: Box, b: Box) -> Box | None:
    """The part that both have; None if that is empty."""
    first = tuple(map(max, a[0], b[0]))
    shape = tuple(min(p + m, q + n) - f for p, m, q, n, f in zip(a[0], a[1], b[0], b[1], first, strict=True))
    return None if any(n <= 0 for n in shape) else (first, shape)


def slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of `box` in an array whose first element lies at `origin`."""
    return tuple(slice(p - o, p - o + n) for p, n, o in zip(box[0], box[1], origin, strict=True))


def runs(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of an array in C order, as at most 2 * ndim - 1 boxes, each one piece of the order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # both ends in one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for offset, inner in runs(shape[1:], start, stop):
        yield (row, *offset), (1, *inner)


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
            count = prod(shape)
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
            held = private_bytes(whole_pages(block.nbytes))
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
        self._slot_bytes = whole_pages(max((block.nbytes for block in blocks), default=1))
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
