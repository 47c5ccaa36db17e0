"""From staging memory to the first tier: what one rank's thread does for each checkpoint.

    the node's first rank                          every rank of the node
    makes the folder, reserves the file
    says "opened"                                  writes its blocks, and notes their checksums
                                                   says "written"
    writes what HDF5 needs, syncs
    describes the node's file
    fast tier: commits by rename
    says "done": staging memory is free again

The slow tier's folder is one for all nodes. There the description of a node's file says that the node is done, and
draining.py commits the whole.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pario.checkpoint.board import (
    CANCELLED,
    CHOSEN,
    CODED,
    DONE,
    DRAINED,
    LEADERS,
    MOVED,
    OPENED,
    STRAIGHT,
    SUMMED,
    TAKEN,
    WRITTEN,
    Board,
)
from pario.checkpoint.carrying import Folder, Write, carry_over
from pario.checkpoint.layout import PAGE, NodeFile
from pario.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Part,
    arrays_text,
    manifest_text,
    part_name,
    part_text,
    pieces_text,
    sum_of,
)
from pario.checkpoint.store import ATTEMPT, Name, Writer, commit, discard, failed, listed, make_folder, write_small
from pario.checkpoint.varying import Shape, Varying
from pario.errors import CheckpointError, ReadError
from pario.threads import Workers

__all__ = ["Attempt", "FastTier", "Places", "Tier", "Tiers", "WriteThread"]

_log = logging.getLogger("pario")

Tier = Literal["fast", "slow"]

#: Threads of one rank that write: a block is checked while another one is written.
_THREADS = 2
#: Bytes that are asked for at once where a rate is limited.
_GRAIN = 4 << 20


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
            newest = max((step for step, _ in safe), default=-1)
            last = max((name.step for name in own if not (name.copy and self._keeps_copies)), default=-1)
            last_copy = max((name.step for name in own if name.copy), default=-1) if self._keeps_copies else last
            gone = [
                name
                for name in own
                if (name.step, name.id) not in self._under_way
                and ((name.step, name.id) in safe or name.step < newest)
                and (all_of_them or name.step < (last_copy if name.copy else last))
            ]
            for name in gone:
                discard(os.path.join(self.folder, str(name)))
        return bool(gone)


@dataclass(frozen=True)
class Tiers:
    """slow : folder. full : "wait" or "slow", for a full fast tier. limit_s : without a byte moved. keep : of
    the slow tier, None: all. take(bytes) : returns when so many may be written to the slow tier"""

    slow: str
    fast: FastTier | None
    full: str
    limit_s: float
    keep: int | None
    take: Callable[[int], None]


@dataclass
class Attempt:
    """One call of `save`. number : 1, 2, ... on every rank alike"""

    number: int
    manifest: Manifest
    file: NodeFile
    staging: np.ndarray = field(repr=False)
    began: float = field(default_factory=time.monotonic)  # when `save` was called
    written: threading.Event = field(default_factory=threading.Event)  # the staging memory is free
    committed: threading.Event = field(default_factory=threading.Event)  # what this rank has to do for it is done
    drained: threading.Event = field(default_factory=threading.Event)  # and old ones are deleted
    copied: threading.Event = field(default_factory=threading.Event)  # this node's copy of another's part stands, or
    uncopied: bool = False  # there will be none; known on the node's first rank
    error: CheckpointError | None = None
    staged: int = 0  # bytes of the staging memory that hold the tree; -1: it could not be copied
    straight: bool = False  # to the slow tier; known on the node's first rank when it is written
    # When this node's part was durable on the tier that it was written to first; the whole on the slow one, on rank 0.
    durable_at: dict[Tier, float] = field(default_factory=dict)

    def await_staged(self, nbytes: int) -> None:
        """Raises CheckpointError if the copy was given up."""
        while 0 <= self.staged < nbytes:
            time.sleep(1e-3)  # often enough: each look takes the interpreter from the rank that copies
        if self.staged < 0:
            raise CheckpointError(f"the tree of step {self.manifest.step} could not be copied")

    @property
    def name(self) -> Name:
        return Name(self.manifest.step, self.manifest.id)

    def over(self, tier: Tier) -> threading.Event:
        """Set when this rank has nothing left to do for it on that tier."""
        return self.written if tier == "fast" else self.committed

    def fail(self, error: CheckpointError) -> None:
        if self.error is None:
            self.error = error


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


class WriteThread:
    """Writes the attempts of one rank, one after another; `then` takes each that was written, on the node's first rank.

    All waiting is bounded. Nothing here calls MPI.
    """

    def __init__(
        self, places: Places, tiers: Tiers, board: Board, varying: Varying, then: Callable[[Attempt, bool], None]
    ) -> None:
        self._places, self._tiers, self._board, self._varying, self._then = places, tiers, board, varying, then
        self._line = Workers("pario-checkpoint", 1)
        self._writers = Workers("pario-checkpoint-write", _THREADS)
        self._stopped = False
        self._moved = 0
        self._pieces: tuple[NodeFile | None, str, str] = None, "", ""  # the texts of the last structure
        self._lock = threading.Lock()

    def submit(self, attempt: Attempt) -> None:
        self._line.put(lambda: self._run(attempt))

    def end(self, limit_s: float) -> bool:
        """Give up what is under way; returns whether the threads ended in time."""
        self._stopped = True
        return self._line.end(limit_s) and self._writers.end(limit_s)

    def stopped(self) -> bool:
        return self._stopped

    @property
    def limit_s(self) -> float:
        return self._tiers.limit_s

    def _run(self, attempt: Attempt) -> None:
        straight = self._tiers.fast is None
        folder = ""
        try:
            try:
                shape = self._prepared(attempt) if self._varying else None
                if self._places.leads:
                    folder, straight = self._open(attempt, shape)
                else:
                    self._board.wait(OPENED, attempt.number, self, "the first rank of the node to make the file")
                    straight = self._board.get(STRAIGHT) == attempt.number
                    folder = self._attempt_folder(attempt, straight)
                self._write(attempt, folder, straight, shape)
            except CheckpointError as e:
                raise e
            except Exception as e:
                what = f"the checkpoint of step {attempt.manifest.step} was not saved"
                raise failed(e, what, folder or self._tiers.slow) from e
        except CheckpointError as e:
            attempt.fail(e)
            self._board.fail(attempt.number, str(e))
            if self._places.leads and not straight:
                discard(folder or self._attempt_folder(attempt, False))
        if self._places.leads:
            if attempt.error is not None:
                self._board.put(CANCELLED, attempt.number)
            else:
                attempt.durable_at["fast"] = time.monotonic()
            self._board.put(DONE, attempt.number)
            attempt.straight = straight
            attempt.written.set()
            self._then(attempt, straight)
            return
        if attempt.error is None:
            try:
                self._board.wait(DONE, attempt.number, self, "the first rank of the node to finish the file")
            except CheckpointError as e:
                attempt.fail(e)
        attempt.written.set()
        attempt.copied.set()
        attempt.committed.set()
        attempt.drained.set()

    def _prepared(self, attempt: Attempt) -> Shape:
        """Everything before the file can be made (varying.py). What comes back counts on the node's first rank."""
        board, varying, file = self._board, self._varying, attempt.file
        attempt.await_staged(file.staging_bytes)

        def summed(number: int, at: int) -> None:
            varying.sum(number, attempt.staging[at : at + file.blocks[number][1]])
            self._move(file.blocks[number][1])

        def coded(number: int, at: int) -> None:
            nbytes = file.blocks[number][1]
            varying.code(number, attempt.staging[at : at + -(-nbytes // PAGE) * PAGE], nbytes)
            self._move(nbytes)

        _all([self._writers.call(summed, *put) for put in file.puts])
        board.mine(SUMMED, attempt.number)
        shape = Shape()
        if self._places.leads:
            folder = self._attempt_folder(attempt, self._tiers.fast is None)
            make_folder(folder)
            board.wait(LEADERS + SUMMED, attempt.number, self, "the ranks of the node to look for what has changed")
            shape = varying.choose(file, folder)
            board.put(CHOSEN, attempt.number)
        board.wait(CHOSEN, attempt.number, self, "the first rank of the node to look for what has changed")
        _all([self._writers.call(coded, *put) for put in file.puts])
        board.mine(CODED, attempt.number)
        if self._places.leads:
            board.wait(LEADERS + CODED, attempt.number, self, "the ranks of the node to pack their blocks")
            varying.lay_out(file, shape)
        return shape

    def _attempt_folder(self, attempt: Attempt, straight: bool) -> str:
        if straight:
            return os.path.join(self._tiers.slow, f"{ATTEMPT}{attempt.name}")
        assert self._tiers.fast is not None
        name = attempt.name._replace(node=self._places.node, nodes=self._places.nodes)
        return os.path.join(self._tiers.fast.folder, f"{ATTEMPT}{name}")

    def _open(self, attempt: Attempt, shape: Shape | None) -> tuple[str, bool]:
        """Make the folder and the file; (folder, whether it lies on the slow tier)."""
        size = attempt.file.size if shape is None else shape.size
        straight = self._tiers.fast is None
        folder = self._attempt_folder(attempt, straight)
        began = time.monotonic()
        while True:
            try:
                make_folder(folder)
                Writer(self._file(folder), size, direct=False).close()
                break
            except OSError as e:
                with suppress(OSError):
                    os.unlink(self._file(folder))
                if straight or e.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if not self._room_on_fast(attempt, size, began):
                    straight = True
                    before, folder = folder, self._attempt_folder(attempt, True)
                    for other in shape.others if shape is not None else ():
                        make_folder(folder)
                        carry_over(self._places.node, (other.id, other.size), Folder(before), folder, self._write_slow)
                    discard(before)
        if straight:
            self._board.put(STRAIGHT, attempt.number)
        self._board.put(OPENED, attempt.number)
        return folder, straight

    def _room_on_fast(self, attempt: Attempt, size: int, began: float) -> bool:
        """The fast tier is full: True to try again, False to write straight to the slow one. Raises OSError."""
        fast = self._tiers.fast
        assert fast is not None
        if fast.prune(all_of_them=True):
            return True
        said = f"the fast tier {fast.folder} has no room for {size:,} bytes of step {attempt.manifest.step}"
        if self._tiers.full == "slow":
            _log.warning("%s: this node writes straight to %s", said, self._tiers.slow)
            return False
        waiting = self._board.get(DRAINED) < attempt.number - 1
        if not waiting or time.monotonic() - began > self._tiers.limit_s or self._stopped:
            raise OSError(errno.ENOSPC, f"{said}, and nothing there can be deleted")
        if time.monotonic() - began < 0.5:
            _log.warning("%s: it waits for earlier checkpoints to be drained", said)
        time.sleep(0.5)
        return True

    def _file(self, folder: str) -> str:
        return os.path.join(folder, part_name(self._places.node) + ".h5")

    def _write(self, attempt: Attempt, folder: str, straight: bool, shape: Shape | None) -> None:
        file, board = attempt.file, self._board
        writer = Writer(self._file(folder))
        write = self._write_slow if straight else Writer.write
        put = self._put if shape is None else self._put_varying
        try:
            puts = [self._writers.call(put, attempt, writer, each, write) for each in file.puts]
            attempt.await_staged(file.staging_bytes)  # json holds the interpreter: not while `save` copies
            pieces, manifest = self._texts(attempt) if self._places.leads else ("", b"")  # meanwhile
            _all(puts)
            board.mine(WRITTEN, attempt.number)
            if not self._places.leads:
                return
            board.wait(LEADERS + WRITTEN, attempt.number, self, "the ranks of the node to write their parts")
            for offset, data in file.rest if shape is None else shape.rest:
                writer.write(np.frombuffer(data, np.uint8), offset)
            writer.sync()
        finally:
            writer.close()
        part = self._describe(attempt, shape)
        write_small(folder, part_name(part.node) + ".json", part_text(part, pieces), straight)
        final = os.path.join(os.path.dirname(folder), os.path.basename(folder)[len(ATTEMPT) :])
        if shape is not None:
            self._varying.remember(file, part, shape, (folder, final))
        if not straight:
            assert self._tiers.fast is not None
            write_small(folder, MANIFEST, manifest, False)
            self._tiers.fast.begin(attempt.name)
            commit(folder, final)
            self._tiers.fast.prune()

    def _texts(self, attempt: Attempt) -> tuple[str, bytes]:
        """The long ones of what describes the checkpoint."""
        fast = self._tiers.fast is not None
        if self._pieces[0] is not attempt.file:
            arrays = arrays_text(attempt.manifest.specs) if fast else ""
            pieces = self._varying.compact(attempt.file)[0] if self._varying else attempt.file.pieces
            self._pieces = attempt.file, pieces_text(pieces), arrays
        return self._pieces[1], manifest_text(attempt.manifest, self._pieces[2]) if fast else b""

    def _put(self, attempt: Attempt, writer: Writer, put: tuple[int, int], write: Write) -> None:
        number, at = put
        offset, nbytes = attempt.file.blocks[number]
        data = attempt.staging[at : at + nbytes]
        attempt.await_staged(at + nbytes)
        self._board.sums[number] = sum_of(data)
        write(writer, data, offset)
        self._move(nbytes)

    def _put_varying(self, attempt: Attempt, writer: Writer, put: tuple[int, int], write: Write) -> None:
        (number, at), target = put, int(self._board.places[put[0]])
        nbytes = attempt.file.blocks[number][1]
        slot = attempt.staging[at : at + -(-nbytes // PAGE) * PAGE]
        if target != TAKEN:
            write(writer, slot[: self._varying.stored_bytes(number, nbytes)], target)
            self._varying.clean(number, attempt.file, slot)
        self._move(nbytes)

    def _write_slow(self, writer: Writer, data: np.ndarray, offset: int) -> None:
        write_limited(writer, data, offset, self._tiers.take, self.stopped)

    def _move(self, nbytes: int) -> None:
        """The others see that this rank goes on."""
        with self._lock:
            self._moved += nbytes
            self._board.mine(MOVED, self._moved)

    def _describe(self, attempt: Attempt, shape: Shape | None) -> Part:
        file, manifest = attempt.file, attempt.manifest
        if shape is not None:
            return self._varying.described(manifest.step, manifest.id, file, shape)
        blocks = [(*block, int(total)) for block, total in zip(file.blocks, self._board.sums, strict=False)]
        blocks += [(offset, len(data), sum_of(data)) for offset, data in _cut(file.rest)]
        blocks.sort()
        return Part(
            manifest.step, manifest.id, self._places.node, file.size, file.pieces,
            [(offset, nbytes) for offset, nbytes, _ in blocks], [total for _, _, total in blocks],
        )  # fmt: skip


def _cut(rest: list[tuple[int, bytes]], most: int = 32 << 20) -> list[tuple[int, bytes]]:
    """An index of many rows may be longer than a block."""
    return [(at + k, data[k : k + most]) for at, data in rest for k in range(0, len(data), most)]


def _all(calls: list[Future[Any]]) -> None:
    """Wait for all; raises the first error."""
    errors = [call.exception() for call in calls]
    for error in errors:
        if error is not None:
            raise error
