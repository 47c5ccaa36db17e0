"""The tiers of a Checkpointer: its options, checked; its folders, named, made, and swept of what killed jobs have left;
and the files of a node's part on their way to another tier or to another node. The files of older checkpoints that the
part uses are linked where they are there already, and copied where they are not."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pario.checkpoint.manifest import Part, part_name, sum_of, taken_name
from pario.checkpoint.store import ATTEMPT, TRASH, Name, Reader, Writer, discard, listed, make_folder, order_of
from pario.codec.base import Codec
from pario.codec.registry import parse
from pario.comm.base import AnyWorld, together
from pario.comm.memory import private_bytes
from pario.errors import CheckpointError, ChecksumError, OptionError, ReadError

__all__ = [
    "FastTier", "Folder", "Places", "Source", "Tiers", "Write", "carry_over", "check_apart", "check_options",
    "copy_blocks", "newest", "open_folders", "run_of", "step_error", "sweep", "write_limited",
]  # fmt: skip

#: Bytes that are copied, or asked for where a rate is limited, at once.
_GRAIN = 4 << 20

#: Writes this many bytes at an offset, as fast as is allowed.
Write = Callable[[Writer, np.ndarray, int], None]


# -- options -----------------------------------------------------------------------------------------------------------


def check_options(
    keep: Any, rate: Any, full: Any, pending: Any, compress: Any, differing: Any, timeout_s: Any, alone: bool
) -> Codec | None:
    """The codec. alone : partner copies without a fast tier. Raises OptionError, also where a codec's package is
    missing."""
    if keep is not None and (type(keep) is not int or keep < 1):
        raise OptionError(f"keep must be a whole number from 1 on, or None, got {keep!r}")
    if rate is not None and not (isinstance(rate, int | float) and rate > 0):
        raise OptionError(f"rate must be bytes per second above 0, or None, got {rate!r}")
    if full not in ("wait", "slow"):
        raise OptionError(f'full must be "wait" or "slow", got {full!r}')
    if type(pending) is not int or pending < 1:
        raise OptionError(f"pending must be a whole number from 1 on, got {pending!r}")
    if differing not in ("rank0", "raise"):
        raise OptionError(f'differing must be "rank0" or "raise", got {differing!r}')
    if not (isinstance(timeout_s, int | float) and timeout_s > 0):
        raise OptionError(f"timeout_s must be seconds above 0, got {timeout_s!r}")
    if alone:
        raise OptionError("partner=True copies what is on the nodes' fast tiers, and there are none", hint="Give fast=")
    if compress is not None and not isinstance(compress, str):
        raise OptionError(f"compress must be a codec and its level, as in 'zstd:3', or None, got {compress!r}")
    return None if compress is None else parse(compress)


def step_error(step: Any) -> OptionError | None:
    """What is wrong with it."""
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or not 0 <= step < 10**12:
        return OptionError(f"step must be a whole number from 0 to 10^12 - 1, got {step!r}")
    return None


# -- folders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Where this node stands: node of nodes, rank `seat` of `ranks` on it; first : rank 0 of the job."""

    node: int
    nodes: int
    seat: int
    ranks: int
    first: bool

    @property
    def leads(self) -> bool:
        return self.seat == 0


@dataclass(frozen=True)
class Tiers:
    """slow : folder. full : "wait" or "slow", for a full fast tier. limit_s : without a byte moved. keep : of
    the slow tier, None: all. take(bytes) : returns when this many may be written to the slow tier"""

    slow: str
    fast: FastTier | None
    full: str
    limit_s: float
    keep: int | None
    take: Callable[[int], None]


class FastTier:
    """The node's fast folder, and what of it may not be deleted: what this job still has to drain. keeps_copies : this
    job makes copies of another node's parts there"""

    def __init__(self, folder: str, slow: str, keeps_copies: bool = False) -> None:
        self.folder, self._slow, self._keeps_copies = folder, slow, keeps_copies
        self._lock = threading.Lock()
        self._under_way: set[tuple[int, str]] = set()

    def begin(self, name: Name) -> None:
        with self._lock:
            self._under_way.add((name.step, name.id))

    def end(self, name: Name) -> None:
        """It is drained, or given up."""
        with self._lock:
            self._under_way.discard((name.step, name.id))
        self.prune()

    def prune(self, all_of_them: bool = False) -> bool:
        """Delete what the slow tier has, or has a newer one than. The newest stays, for a fast restart, and the newest
        copy, from which the next one may take files over, unless `all_of_them`. Returns whether anything was deleted.
        Best effort."""
        with self._lock:
            try:
                own = listed(self.folder)
                safe = {(name.step, name.id) for name in listed(self._slow) if not name.nodes}
            except ReadError:
                return False
            oldest = (-1, -1)
            newest = max((order_of(*each) for each in safe), default=oldest)
            last = max((name.order for name in own if not (name.copy and self._keeps_copies)), default=oldest)
            last_copy = max((name.order for name in own if name.copy), default=oldest) if self._keeps_copies else last
            gone = [
                name
                for name in own
                if (name.step, name.id) not in self._under_way
                and ((name.step, name.id) in safe or name.order < newest)
                and (all_of_them or name.order < (last_copy if name.copy else last))
            ]
            for name in gone:
                discard(os.path.join(self.folder, str(name)))
        return bool(gone)

    def give_up(self, ids: Sequence[str]) -> bool:
        """Delete these, which jobs have left that were killed before their drain. Returns whether there were any."""
        with self._lock, suppress(ReadError):
            found = [name for name in listed(self.folder) if name.id in ids]
            for name in (gone := [each for each in found if (each.step, each.id) not in self._under_way]):
                discard(os.path.join(self.folder, str(name)))
            return bool(gone)
        return False


def run_of(slow: str) -> str:
    """Of the run that saves into this folder: a name on the fast tier."""
    return f"run-{hashlib.sha256(os.path.realpath(slow).encode(errors='surrogateescape')).hexdigest()[:16]}"


def newest(slow: str, fast: str | None) -> str:
    """In words: the folders, and the newest step that this node sees there."""
    tiers = {"slow": slow} | ({} if fast is None else {"fast": fast})
    found: list[tuple[tuple[int, int], str]] = []
    for tier, folder in tiers.items():
        with suppress(ReadError):
            found += [(name.order, f"newest step {name.step} on the {tier} tier") for name in listed(folder)]
    named = [f"{tier}={folder!r}" for tier, folder in tiers.items()]
    return ", ".join([*named, max(found)[1] if found else "no step"])


def open_folders(world: AnyWorld, slow: str, fast: str | None) -> None:
    """Rank 0 makes the slow tier's, each node's first rank its fast one. Raises CheckpointError."""
    if world.rank == 0:
        _make(slow)
    if fast is not None and world.is_leader:
        _make(fast)
        status = os.lstat(fast)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
            raise CheckpointError("this is not a folder of yours", path=fast, hint="Name another fast=")


def check_apart(world: AnyWorld, fast: str) -> None:
    """Whether each node has a fast folder of its own, as partner copies need it. Collective; raises on all ranks."""
    mark = world.bcast(f"{ATTEMPT}step-{secrets.token_hex(8)}-")  # `_sweep_folder` deletes what a kill leaves
    mine = os.path.join(fast, f"{mark}{world.node}")
    try:
        with together(world, "comparing the nodes' fast tiers"):
            if world.is_leader:
                os.mkdir(mine)
        with together(world, "comparing the nodes' fast tiers"):
            seen = sum(name.startswith(mark) for name in os.listdir(fast)) if world.is_leader else 1
            if seen > 1:
                raise OptionError(
                    f"partner=True needs a fast tier of each node's own, and {seen} nodes have this one in common",
                    path=fast,
                    hint="Name a folder on the nodes' disks or in their memory, or leave partner out",
                )
    finally:
        if world.is_leader:
            with suppress(OSError):
                os.rmdir(mine)


def sweep(world: AnyWorld, slow: str, fast: str | None) -> None:
    """Delete what killed jobs have left; not before this one saves, since it may only read what another one saves.
    Collective calls come between this and the first new attempt."""
    if world.rank == 0:
        _sweep_folder(slow)
    if fast is not None and world.is_leader:
        _sweep_folder(fast)


def _make(folder: str) -> None:
    try:
        make_folder(folder)
    except OSError as e:
        raise CheckpointError(f"cannot make the folder for checkpoints: {e.strerror}", path=folder) from e


def _sweep_folder(folder: str) -> None:
    """Delete what killed jobs have left. Best effort."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith((f"{ATTEMPT}step-", f"{TRASH}step-")):
                discard(os.path.join(folder, name))


# -- files from one to another -----------------------------------------------------------------------------------------


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
    pieces = [(each.offset, each.nbytes, each.sum) for each in blocks]
    _copy(source, (part.file, part.size), os.path.join(target, part.file), pieces, write)


def _copy(
    source: Source, file: tuple[str, int], path: str, pieces: Sequence[tuple[int, int, int | None]], write: Write
) -> None:
    """file : (name, size); pieces : (offset, bytes, checksum, if one is known)"""
    memory = private_bytes(max((nbytes for _, nbytes, _ in pieces), default=0))
    with suppress(FileNotFoundError):
        os.unlink(path)
    with Writer(path, file[1]) as writer, source.open(*file) as reader:
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
