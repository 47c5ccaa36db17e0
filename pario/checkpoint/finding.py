"""Checkpoints that are complete: which there are, what they say of themselves, and their blocks: read, checked, and
copied to another tier or to another node.

Rank 0 looks at the slow store, each node's first rank at its fast tier, and rank 0's answer counts for all. (On a
parallel file system two ranks that look at the same moment may see different things.)
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, NamedTuple, Protocol

import numpy as np

from pario.checkpoint.manifest import Manifest, Part, check_parts, manifest_in, part_in, part_name, taken_name
from pario.checkpoint.store import Name, Reader, Writer, listed, next_id, order_of, sum_of, whole_pages
from pario.codec.registry import make
from pario.comm.base import AnyWorld, together
from pario.comm.memory import private_bytes
from pario.errors import CheckpointError, ChecksumError, CorruptedError, DecodeError, FileError, ReadError

_log = logging.getLogger("pario")

#: Of a checkpoint: more than may have failed or been deleted one after another.
_MOST_PARENTS = 32
#: What counts as damage, wherever a checkpoint is read: an older one is tried. No memory for what it claims to be is
#: among that; no codec's package, and a `like` that does not fit, are not.
DAMAGE = (FileError, MemoryError)


class Found(NamedTuple):
    """A complete checkpoint, by its names alone. fast : on the fast tiers of the nodes; nodes : that have written it;
    copies : nodes of which a partner's copy is taken"""

    step: int
    fast: bool
    id: str
    nodes: int
    copies: tuple[int, ...] = ()

    @property
    def which(self) -> tuple[Any, ...]:
        return self.id, self.fast, self.copies

    @property
    def order(self) -> tuple[int, int]:
        """Of commits."""
        return order_of(self.step, self.id)

    @property
    def words(self) -> str:
        more = f" with partner copies of {_nodes(self.copies)}" if self.copies else ""
        return f"step {self.step} on the {'fast' if self.fast else 'slow'} tier{more}"


class Opened(NamedTuple):
    """where : per node of the world, part -> the folder in which that node finds it"""

    manifest: Manifest
    parts: list[Part]
    where: list[dict[int, str]]


class Finder:
    """Looks for checkpoints, and warns once of a newer one whose parts are not all there; knows which one the next
    goes on from."""

    def __init__(self, world: AnyWorld, slow: str, fast: str | None) -> None:
        self._world, self.slow, self.fast = world, slow, fast
        self._told = False
        self._parents: list[str] | None = None  # the one that was restored or saved last, and its parents
        self._number = 0  # of the last commit
        self._sure = False  # nothing was restored since the last one was saved

    def restored(self, parents: list[str]) -> None:
        """What is saved now goes on from the first of them."""
        self._parents, self._sure = parents, False

    def next(self, step: int, random: str) -> tuple[str, list[str]]:
        """(id, parents) of a checkpoint that is saved now. Collective. random : 8 hex digits

        Where nothing was restored or saved before, a higher step than the newest goes on from that, and another one
        begins a new run.
        """
        if not self._sure:
            found = self.find()
            self._number = max([self._number, *(each.order[0] for each in found)])
            if self._parents is None:
                self._parents = [found[0].id] if found and found[0].step < step else []
            self._tell_of_abandoned(found, step, self._parents)
            self._sure = True
        parents = self._parents or []
        self._number += 1
        made = next_id(self._number, random)
        self._parents = [made, *parents][:_MOST_PARENTS]
        return made, parents

    def _tell_of_abandoned(self, found: list[Found], step: int, parents: list[str]) -> None:
        base = next((each for each in found if each.id in parents[:1]), None)
        left = sorted({each.step for each in found if base is None or each.order > base.order})
        if left and self._world.rank == 0:
            begins = "begins a new run" if base is None else f"goes on from step {base.step}"
            named = ", ".join(map(str, left[:20])) + (f" and {len(left) - 20} more" if left[20:] else "")
            _log.warning(
                "step %d %s and abandons what was saved after that: step%s %s. From now on restore() takes the new "
                "branch; python -m pario checkpoint prune %s --after %d deletes the other", step, begins,
                "s" if left[1:] else "", named, self.slow, 0 if base is None else base.step,
            )  # fmt: skip

    def find(self) -> list[Found]:
        """All complete checkpoints, the one that was committed last first, and the fast tier first. Where some parts
        are there twice, the one with fewer partner copies comes before the one that is made of all of them. Collective.
        Raises ReadError on all ranks."""
        world, slow, fast = self._world, self.slow, self.fast
        tell, self._told = not self._told, True
        own: list[Name] = []
        with together(world, "looking for checkpoints"):
            if fast is not None and world.is_leader:
                own = [name for name in listed(fast) if name.nodes]
        everyones = world.allgather(own) if fast is not None else [own]
        found: list[Found] = []
        with together(world, "looking for checkpoints"):
            if world.rank == 0:
                parts: dict[tuple[int, str, int], tuple[set[int], set[int]]] = {}  # own ones, copies
                for name in (name for names in everyones for name in names):
                    parts.setdefault((name.step, name.id, name.nodes), (set(), set()))[name.copy].add(name.node)
                found = [Found(name.step, False, name.id, 0) for name in listed(slow) if not name.nodes]
                for (step, id_, nodes), (whole, copies) in parts.items():
                    if whole | copies == set(range(nodes)):
                        for taken in {tuple(sorted(copies - whole)), tuple(sorted(copies))}:
                            found.append(Found(step, True, id_, nodes, taken))
                found.sort(key=lambda each: (each.order, each.fast, each.id, -len(each.copies)), reverse=True)
                if tell:
                    _tell_of_lost({key: whole | copies for key, (whole, copies) in parts.items()}, found)
        return world.bcast(found)  # type: ignore[no-any-return]


def _tell_of_lost(parts: dict[tuple[int, str, int], set[int]], found: list[Found]) -> None:
    """Of the newest checkpoint, if some nodes' parts are missing."""
    step, id_, nodes = max(parts, key=lambda each: order_of(*each[:2]), default=(0, "0" * 16, 0))
    missing = sorted(set(range(nodes)) - parts.get((step, id_, nodes), set()))
    if missing and (not found or order_of(step, id_) > found[0].order):
        older = f"step {found[0].step} is the newest complete one" if found else "there is no complete one"
        _log.warning(
            "the checkpoint of step %d, written by %d nodes, was not on the slow store yet, and the parts of %s are on "
            "no fast tier of this job's nodes; %s", step, nodes, _nodes(missing), older,
        )  # fmt: skip


def _nodes(numbers: Sequence[int]) -> str:
    return f"node{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def open_found(world: AnyWorld, found: Found, finder: Finder) -> Opened:
    """Read what a checkpoint says of itself. Collective; raises on all ranks: CorruptedError, ChecksumError,
    MissingError, ReadError on the rank that read it, PeerError on the others."""
    slow, fast = finder.slow, finder.fast
    manifest: Manifest | None = None
    mine: dict[int, tuple[str, Part]] = {}
    found_name = found.step, found.id, found.nodes
    with together(world, f"reading the description of {found.words}"):
        if found.fast and world.is_leader and fast is not None:
            for name in listed(fast):
                if (name.step, name.id, name.nodes, name.copy) == (*found_name, name.node in found.copies):
                    folder = os.path.join(fast, str(name))
                    mine[name.node] = folder, part_in(folder, name.node)
                    if name.node == 0:
                        manifest = manifest_in(folder)
        elif not found.fast and world.rank == 0:
            folder = os.path.join(slow, str(Name(found.step, found.id)))
            manifest, whole = _read(folder)
            mine = {part.node: (folder, part) for part in whole}
    everyones = world.allgather((world.node, manifest, mine) if mine else None)
    parts: dict[int, Part] = {}
    where: list[dict[int, str]] = [{} for _ in range(world.nodes)]
    for node, said, held in (each for each in everyones if each):
        manifest = said or manifest
        for number, (folder, part) in held.items():
            parts[number] = part
            for k in range(world.nodes) if not found.fast else [node]:
                where[k][number] = folder
    with together(world, f"reading the description of {found.words}"):
        if manifest is None or (manifest.step, manifest.id) != (found.step, found.id):
            raise CorruptedError(f"the manifest of {found.words} is that of another checkpoint")
        check_parts(manifest, [parts[number] for number in sorted(parts)], found.words)
    assert manifest is not None
    return Opened(manifest, [parts[number] for number in sorted(parts)], where)


def described(folder: str) -> tuple[Manifest, list[Part]]:
    """What a committed checkpoint on the slow tier says of itself. Raises CorruptedError, MissingError, ReadError."""
    manifest, parts = _read(folder)
    check_parts(manifest, parts, folder)
    return manifest, parts


def _read(folder: str) -> tuple[Manifest, list[Part]]:
    """As `described`; the parts are those of the manifest, but not checked against each other."""
    manifest = manifest_in(folder)
    return manifest, [part_in(folder, node, total) for node, total in enumerate(manifest.parts)]


class PartReader(ExitStack):
    """The blocks of one node's part as they were saved: read from its file, or from those of older checkpoints that it
    uses, checked, and unpacked. Any thread may read; files are opened when they are needed."""

    def __init__(self, folder: str, part: Part, take: Callable[[int], None] | None = None) -> None:
        """take : of `store.Reader`. Raises OptionError where the codec's package is missing."""
        super().__init__()
        self._folder, self.part, self._take = folder, part, take
        self._codec = make(part.codec) if part.codec else None
        self._readers: dict[int, Reader] = {}
        self._lock = threading.Lock()

    def open(self, file: int) -> Reader:
        """A file of `Part.files`. Raises MissingError, ReadError, CorruptedError."""
        with self._lock:
            if file not in self._readers:
                name, size = self.part.files[file]
                reader = Reader(os.path.join(self._folder, name), size, take=self._take)
                self._readers[file] = self.enter_context(reader)
            return self._readers[file]

    def read(self, number: int, out: np.ndarray) -> None:
        """A block, checked, into `out`, u8[its bytes]. Raises ChecksumError, CorruptedError, ReadError and the like."""
        where = self.part.stored[number]
        reader = self.open(where.file)
        if where.nbytes == out.size and not where.coded:
            reader.read(out, where.offset)
            self._check(out, self.part.sums[number], reader, where.offset)
            return
        stored = private_bytes(whole_pages(where.nbytes))[: where.nbytes]
        reader.read(stored, where.offset)
        self._check(stored, where.sum, reader, where.offset)
        if not where.coded:
            np.copyto(out, stored[: out.size])
        else:
            assert self._codec is not None
            try:
                self._codec.decode_into(stored[: where.coded], out)
            except DecodeError as e:
                raise CorruptedError(f"a block cannot be unpacked: {e}", path=reader.path, offset=where.offset) from e
        self._check(out, self.part.sums[number], reader, where.offset)

    def _check(self, data: np.ndarray, total: int, reader: Reader, offset: int) -> None:
        found = sum_of(data)
        if found != total:
            raise ChecksumError(
                f"the checksum of {data.size:,} bytes is {found:016x}, the manifest says {total:016x}",
                path=reader.path,
                offset=offset,
            )


def problems(folder: str, progress: Callable[[int], None] = lambda nbytes: None) -> list[str]:
    """What is wrong with a committed checkpoint, one sentence each; none if every byte is as it was written."""
    try:
        _, parts = described(folder)
    except DAMAGE as e:
        return [str(e)]
    found = []
    memory = private_bytes(max((nbytes for part in parts for _, nbytes in part.blocks), default=0))
    for part in parts:
        try:
            with PartReader(folder, part) as reader:
                for file in range(len(part.files)):
                    reader.open(file)
                for number, (_, nbytes) in enumerate(part.blocks):
                    try:
                        reader.read(number, memory[:nbytes])
                    except (ChecksumError, CorruptedError) as e:
                        found.append(str(e))
                    progress(nbytes)
        except DAMAGE as e:
            found.append(str(e))
    return found


# -- on their way to another tier or node ------------------------------------------------------------------------------


#: Writes this many bytes at an offset, as fast as is allowed.
Write = Callable[[Writer, np.ndarray, int], None]
#: Bytes that are copied, or asked for where a rate is limited, at once.
_GRAIN = 4 << 20


def write_limited(
    writer: Writer, data: np.ndarray, offset: int, take: Callable[[int], None], stop: Callable[[], bool]
) -> None:
    """In steps that the rate limit lets through. Raises OSError, CheckpointError if `stop`."""
    for begin in range(0, data.size, _GRAIN):
        if stop():
            raise CheckpointError("given up: the checkpointer was closed before the checkpoint was written")
        piece = data[begin : begin + _GRAIN]
        take(piece.size)
        writer.write(piece, offset + begin)


class Readable(Protocol):
    """An open file. path : for errors"""

    path: str

    def read(self, block: np.ndarray, offset: int) -> None:
        """Fill `block`, u8[n]. Raises OSError, ParioError."""


#: open(name, size that it must have) of a file of a part. Raises OSError, ParioError.
Source = Callable[[str, int], AbstractContextManager[Readable]]


def in_folder(path: str) -> Source:
    """A source on a tier of this node."""
    return lambda name, size: Reader(os.path.join(path, name), size)


def copy_blocks(part: Part, source: Source, target: str, write: Write) -> None:
    """The node's own file to the folder `target`, each block checked on its way. Raises OSError, ParioError."""
    pieces = [(each.offset, each.nbytes, each.sum) for each in part.stored if each.file == 0]
    _copy(source, (part.file, part.size), os.path.join(target, part.file), pieces, write)


def _copy(
    source: Source, file: tuple[str, int], path: str, pieces: Sequence[tuple[int, int, int | None]], write: Write
) -> None:
    """file : (name, size); pieces : (offset, bytes, checksum, if one is known)"""
    memory = private_bytes(max((nbytes for _, nbytes, _ in pieces), default=0))
    with suppress(FileNotFoundError):
        os.unlink(path)
    with Writer(path, file[1]) as writer, source(*file) as reader:
        for offset, nbytes, total in pieces:
            block = memory[:nbytes]
            reader.read(block, offset)
            if total is not None and sum_of(block) != total:
                raise ChecksumError(f"the block at {offset} of the fast tier's file is damaged", path=reader.path)
            write(writer, block, offset)
        writer.sync()


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
    pieces = [(begin, min(_GRAIN, size - begin), None) for begin in range(0, size, _GRAIN)]
    _copy(source, (name, size), path, pieces, write)


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
