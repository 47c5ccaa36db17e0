"""A tree out of a checkpoint, on any number of ranks: which checkpoint, what is wanted of it, and its bytes.

Each block is read once in the job, checked, and handed to the ranks that need a part of it. `Move` says what this rank
takes from a block: a run of bytes, or boxes where it needs another part of an array than was written as a whole. What
no other rank needs, a rank reads straight into its arrays where it can. What several ranks need they read in turns
into memory that the ranks of a node share; what several nodes need, one reads and sends to the others.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pario.checkpoint.finding import DAMAGE, Finder, Found, Opened, PartReader, open_found
from pario.checkpoint.flat import unflatten
from pario.checkpoint.manifest import Manifest, Part
from pario.checkpoint.store import empty_bytes, whole_pages
from pario.checkpoint.tree import Box, Leaves, PerRank, Shard, Spec, dtype_of, meet, reaches_out, runs, slices
from pario.comm.base import AnyWorld, together
from pario.comm.memory import private_bytes, refusal, shared_parts
from pario.comm.world import bcast_to_nodes, same_ranks
from pario.errors import CorruptedError, MissingError, OptionError, PeerError, ReadError, StateError
from pario.threads import Workers

_log = logging.getLogger("pario")

#: Threads of a rank; bytes that the ranks of a node read together, while they take the same out of those before.
_THREADS = 3
_WINDOW = 32 << 20
T = TypeVar("T")


# -- the tree ----------------------------------------------------------------------------------------------------------


def restored(
    world: AnyWorld, finder: Finder, step: int | None, like: Any, leaves: Leaves, take: Callable[[int], None] | None
) -> tuple[Any, list[str]]:
    """The tree, or what `like` asks for of it, of the newest checkpoint that is not damaged; and its id, followed by
    those of its parents. Collective.

    step : the newest of this step; take(nbytes) : returns when these may be read from the slow tier
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
        raise world.raised_by_all(MissingError(what, path=finder.slow, hint=hint))
    while True:
        each, error, tree = found[0], None, None
        try:
            tree = _tree(world, each, finder, like, leaves, take)
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
    world: AnyWorld, found: Found, finder: Finder, like: Any, leaves: Leaves, take: Callable[[int], None] | None
) -> tuple[Any, Manifest]:
    """Collective; raises on all ranks."""
    opened = open_found(world, found, finder)
    manifest = opened.manifest
    asked: list[tuple[int, Box, int]] = []

    def wish(leaf: Any, number: int, path: str) -> None:
        spec = manifest.specs[number]
        box = _wanted(leaf, spec, leaves, path)
        asked.append((number, box, prod(box[1]) * spec.item))

    def built(leaf: Any, number: int, path: str = "") -> Any:
        spec, got = manifest.specs[number], next(results)
        like = leaf.array if isinstance(leaf, Shard) else leaf
        array = leaves.build(got.memory, spec.dtype, got.box[1], like)
        return array[()] if spec.kind == "scalar" else array

    def tree(array: Callable[[Any, int, str], Any]) -> Any:
        specs = len(manifest.specs)
        return _picked(like, manifest.description, array, leaves, specs, world.rank, array is built)

    with together(world, "comparing `like` with the checkpoint"):
        tree(wish)
    everyones = world.allgather((world.node, sum(nbytes for _, _, nbytes in asked)))
    with together(world, "making room for what is restored"):
        refused = refusal(sum(nbytes for node, nbytes in everyones if node == world.node))
        if refused is not None:
            raise ReadError(f"it does not fit here: {refused.what}", hint="Ask by `like` for Shards or fewer arrays")
        wishes = [Wish(number, box, empty_bytes(nbytes)) for number, box, nbytes in asked]
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
    twin.close()
    results = iter(wishes)
    return tree(built), manifest


def _kind_of(error: Exception | None) -> str:
    """ "damage" of the checkpoint; "like", which does not fit; "peer"; "other"; "" without an error."""
    if error is None or isinstance(error, PeerError):
        return "" if error is None else "peer"
    return "damage" if isinstance(error, DAMAGE) else "like" if isinstance(error, StateError) else "other"


def _picked(
    like: Any, description: Any, array: Callable[[Any, int, str], Any], leaves: Leaves, arrays: int, rank: int,
    closes: bool,
) -> Any:  # fmt: skip
    """What `like` asks for: its tree, with what was saved as leaves. array(leaf of like, number, path) makes an array;
    closes : and nodes of a framework's own are made of what stands for them.

    What `like` leaves out is left out; None asks for whatever is there, and a plain value for any plain value. Raises
    StateError where `like` and the saved tree differ.
    """

    def pick(like: Any, saved: Any, path: str = "") -> Any:
        if isinstance(like, PerRank):
            like = like.value
        kind = next(iter(saved)) if isinstance(saved, dict) and len(saved) == 1 else ""
        if kind == "ranks":
            everyones = saved["ranks"]
            return pick(like, everyones[rank], path) if rank < len(everyones) else None
        below, here = path + "/" if path else "", path or "the root"
        if like is not None and (opened := _asked(leaves.opened, like, here)) is not None:
            found = pick(opened[0], saved, path)
            return opened[1](found) if closes else None
        if isinstance(like, dict):
            if kind != "dict":
                raise _misfit("a dict", here, saved, kind)
            children = {key: child for key, child in saved["dict"]}
            missing = [key for key in like if key not in children]
            if missing:
                raise StateError(f"the checkpoint has no {missing[0]!r} in {here!r}; it has {list(children)[:20]}")
            return {key: pick(value, children[key], f"{below}{key}") for key, value in like.items()}
        if isinstance(like, list | tuple):
            if kind not in ("list", "tuple") or len(saved[kind]) != len(like):
                raise _misfit(f"{len(like)} items", here, saved, kind)
            pairs = enumerate(zip(like, saved[kind], strict=True))
            found = [pick(value, child, f"{below}[{k}]") for k, (value, child) in pairs]
            if hasattr(like, "_fields"):
                return type(like)(*found)
            return found if isinstance(like, list) else tuple(found)
        if kind == "array":
            return array(like, saved["array"], here)
        if like is not None:
            if isinstance(like, Shard) or _asked(leaves.wanted, like, here) is not None:
                raise _misfit("an array", here, saved, kind)
            if kind in ("dict", "list", "tuple"):
                raise _misfit(type(like).__name__, here, saved, kind)
        return unflatten(saved, lambda number: array(None, number, ""), arrays, rank)

    return pick(like, description)


def _misfit(wanted: str, path: str, saved: Any, kind: str) -> StateError:
    there = {"array": "an array", "dict": "a dict"}.get(kind, "a plain value")
    if kind in ("list", "tuple"):
        there = f"a {kind} of {len(saved[kind])} items"
    return StateError(f"like has {wanted} at {path!r}, and the checkpoint {there}")


def _asked(ask: Callable[[Any], T | None], leaf: Any, path: str) -> T | None:
    """What a method of `Leaves` says of a node of `like`."""
    try:
        return ask(leaf)
    except OptionError as e:
        raise StateError(f"like has {type(leaf).__name__} at {path!r}: {e}") from None


def _wanted(leaf: Any, spec: Spec, leaves: Leaves, path: str) -> Box:
    """The box of an array that a leaf of `like` asks for. Raises StateError if it does not fit."""
    whole: Box = ((0,) * len(spec.shape), spec.shape)
    if leaf is None:
        return whole
    shard = leaf if isinstance(leaf, Shard) else None
    described = _asked(leaves.wanted, leaf.array if shard is not None else leaf, path)
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


def read_all(world: AnyWorld, opened: Opened, wishes: list[Wish], take: Callable[[int], None] | None = None) -> None:
    """Fill the memory of all wishes. Collective over `world`.

    take(nbytes) : returns when this many may be read; None: at once
    Raises ChecksumError, CorruptedError, ReadError on the rank where it happens, PeerError on the others.
    """
    manifest, parts, where = opened
    with Ahead(opened, take, world.node) as ahead:
        if world.size == 1:
            ahead.start(wishes)()
        else:
            with together(world, "preparing to restore"):
                mine = {block[:2]: block for block in _blocks(manifest, parts, wishes)}
                every = [(p, n, nbytes) for p, part in enumerate(parts) for n, (_, nbytes) in enumerate(part.blocks)]
                blocks = [mine.get(each[:2]) or Block(*each, []) for each in every]
            _Together(world, manifest, wishes, blocks, [list(folders) for folders in where]).read(ahead)


def _blocks(manifest: Manifest, parts: Sequence[Part], wishes: list[Wish]) -> Iterator[Block]:
    """Those that this rank takes something from, in order."""
    wanted: dict[int, list[int]] = {}
    for k, wish in enumerate(wishes):
        wanted.setdefault(wish.array, []).append(k)
    for number, part in enumerate(parts):
        starts = [offset for offset, _ in part.blocks]
        moves: dict[int, list[Move]] = {}  # block -> of which pieces may follow
        for array, box, begin in sorted((each for each in part.pieces if each[0] in wanted), key=lambda each: each[2]):
            item = manifest.specs[array].item
            end = begin + prod(box[1]) * item
            block = bisect_right(starts, begin) - 1
            for full in [each for each in moves if each < block]:
                yield Block(number, full, part.blocks[full][1], moves.pop(full))
            while begin < end and block < len(starts) and starts[block] < end:  # a forged one may be empty
                offset, nbytes = part.blocks[block]
                first, last = max(begin, offset), min(end, offset + nbytes)
                if (first - begin) % item or (last - begin) % item:
                    raise CorruptedError(f"a block at {offset} cuts an element of {manifest.specs[array].path!r}")
                span = (first - begin) // item, (last - begin) // item
                for number_of_wish in wanted[array]:
                    if made := _move(wishes, number_of_wish, box, span, first - offset, item):
                        moves.setdefault(block, []).extend(made)
                block += 1
        for full in moves:
            yield Block(number, full, part.blocks[full][1], moves[full])


def _move(wishes: list[Wish], wish: int, box: Box, span: tuple[int, int], at: int, item: int) -> list[Move]:
    start, stop = span
    wanted = wishes[wish].box
    both = box if box == wanted else meet(box, wanted)
    if both is None:
        return []
    if both[1][1:] == box[1][1:] == wanted[1][1:]:  # whole rows of both: one run
        row, begin = prod(box[1][1:]), 0
        if box[0]:
            start = max(start, (both[0][0] - box[0][0]) * row)
            stop = min(stop, (both[0][0] - box[0][0] + both[1][0]) * row)
            begin = (box[0][0] - wanted[0][0]) * row
        straight = wishes[wish].memory[(begin + start) * item : (begin + stop) * item]
        whole = Move(at + (start - span[0]) * item, (stop - start) * item, straight, wish, box, start, stop)
        return [whole] if start < stop else []
    if not any(meet(run, wanted) for run in _runs(box, start, stop)):
        return []
    return [Move(at, (stop - start) * item, None, wish, box, start, stop)]


def _runs(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of the piece, as `runs`, where they lie in the array."""
    for offset, shape in runs(box[1], start, stop):
        yield tuple(o + p for o, p in zip(offset, box[0], strict=True)), shape


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
        for run in _runs(move.box, move.start, move.stop):
            count = prod(run[1])
            both = meet(run, wish.box)
            if both is not None:
                piece = elements[done : done + count].reshape(run[1])
                target[slices(both, wish.box[0])] = piece[slices(both, run[0])]
            done += count


class Ahead(ExitStack):
    """Blocks that no other rank needs, read by threads while the caller does something else."""

    def __init__(self, opened: Opened, take: Callable[[int], None] | None = None, node: int = 0) -> None:
        """take : as for `read_all`; node : of this rank"""
        super().__init__()
        self._manifest, self._parts, self._folders, self._take = *opened[:2], opened.where[node], take
        self._open = self.enter_context(ExitStack())
        self._workers = Workers("pario-restore", _THREADS)
        self.callback(self._workers.close, cancel=True)  # before what they read is closed
        self._readers: dict[int, PartReader] = {}
        self._memory: list[np.ndarray] = []

    def _reader(self, part: int) -> PartReader:
        if part not in self._readers:
            reader = PartReader(self._folders[part], self._parts[part], self._take)
            self._readers[part] = self._open.enter_context(reader)
        return self._readers[part]

    def start(self, wishes: list[Wish], blocks: Iterable[Block] | None = None) -> Callable[[], None]:
        """Begin to fill the memory of all wishes, of these blocks or of all; returns what waits for the end, and raises
        what went wrong."""
        found = _blocks(self._manifest, self._parts, wishes) if blocks is None else blocks  # it reads while it plans
        calls = [self._workers.call(self._read, self._reader(block.part), block, wishes) for block in found]

        def wait() -> None:
            for call in calls:
                call.result()

        return wait

    def aside(self, work: Callable[[], None]) -> None:
        """Let one of the threads do this, too; it must not raise."""
        self._workers.call(work)

    def _read(self, reader: PartReader, block: Block, wishes: list[Wish]) -> None:
        only = block.moves[0]
        if len(block.moves) == 1 and only.straight is not None and only.nbytes == block.nbytes:
            reader.read(block.number, only.straight)
            return
        try:
            held = self._memory.pop()
        except IndexError:
            held = empty_bytes(0)
        if held.size < block.nbytes:
            held = private_bytes(whole_pages(block.nbytes))
        data = held[: block.nbytes]
        reader.read(block.number, data)
        _apply(block, data, self._manifest, wishes)
        self._memory.append(held)


class _Together:
    """Several ranks. All of them compute the same turns from what all of them need."""

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
        shared = np.flatnonzero(needs.any(axis=0)).tolist()
        self._slot_bytes = whole_pages(max((blocks[k].nbytes for k in shared), default=1))
        self._slots = 0  # of the turn that has most
        self._turns = self._plan(needs, can)

    def _plan(self, needs: np.ndarray, can: list[list[int]]) -> list[list[tuple[int, int, bool]]]:
        """Turns of (block, node that reads it, whether all nodes get it)."""
        able = [set(parts) for parts in can]
        load = [0] * len(able)
        turns: list[list[tuple[int, int, bool]]] = []
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
            if not turns or any((used[node] + 1) * self._slot_bytes > _WINDOW for node in present if used[node]):
                turns.append([])
                used = [0] * len(able)
            for node in present:
                used[node] += 1
            self._slots = max(self._slots, *used)
            turns[-1].append((k, source, everywhere))
        return turns

    def read(self, ahead: Ahead) -> None:
        """Collective."""
        with together(self._world, "reading a checkpoint"):
            own = ahead.start(self._wishes, self._mine)
        if self._turns:
            self._take_turns(ahead)
        with together(self._world, "reading a checkpoint"):
            own()

    def _take_turns(self, ahead: Ahead) -> None:
        world, half = self._world, self._slots * self._slot_bytes
        (window,) = shared_parts(world, [half * min(2, len(self._turns))], "restoring a checkpoint")
        slots, wait = self._begin(ahead, self._turns[0], window[:half])
        for number, turn in enumerate(self._turns, 1):
            with together(world, "reading a checkpoint"):
                wait()
            now = slots
            if number < len(self._turns):  # all ranks are here: nobody needs what the other half had
                slots, wait = self._begin(ahead, self._turns[number], window[half:] if number % 2 else window[:half])
            for k, source, everywhere in turn:
                if everywhere:
                    bcast_to_nodes(world, now[k], source)
            if world.nodes > 1:
                world.node_barrier()
            for k, data in now.items():
                _apply(self._blocks[k], data, self._manifest, self._wishes)

    def _begin(
        self, ahead: Ahead, turn: list[tuple[int, int, bool]], memory: np.ndarray
    ) -> tuple[dict[int, np.ndarray], Callable[[], None]]:
        """(block -> its memory, of those that come to this node; what waits for those that this rank reads)"""
        world, slots = self._world, dict[int, np.ndarray]()
        for k, source, everywhere in turn:
            if everywhere or source == world.node:
                slots[k] = memory[len(slots) * self._slot_bytes :][: self._blocks[k].nbytes]
        mine = [k for k, source, _ in turn if source == world.node][world.node_rank :: world.node_size]
        whole = [Move(0, slots[k].size, slots[k], 0, ((), ()), 0, 0) for k in mine]
        reads = [self._blocks[k]._replace(moves=[move]) for k, move in zip(mine, whole, strict=True)]
        return slots, ahead.start(self._wishes, reads)
