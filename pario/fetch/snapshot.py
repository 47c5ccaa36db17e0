"""Which state of the file we read, and whether its pages may still be trusted after a read.

LMDB's readers claim a slot in the lock file, so that no writer reuses their pages. A reader on many nodes cannot.
Instead: a writer reuses pages that were freed two transactions before, so a page of snapshot S is overwritten at the
earliest by transaction S + 3, which begins after S + 2 is committed. Whatever was read is good if afterwards no meta
page says more than S + 1.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from pario.errors import CorruptedError, FileError, ParioError, SnapshotError
from pario.fetch.base import Fetcher
from pario.format.meta import EXPLAIN_BYTES, Snapshot, explain, newest, page_size, sniff
from pario.format.tar import BLOCK, TarSnapshot, is_header
from pario.kernels.nodes import FILE
from pario.threads import AnyWorkers

#: What the first read brings: both meta pages, at the usual page size.
_HEAD_BYTES = 8192
#: Meta pages are read until two reads agree. A commit takes microseconds to write its meta page.
_TRIES = 20
_PAUSE_S = 0.002
#: called with a number of reads, and their bytes
Counter = Callable[[int, int], None]

#: No kernel's clock for files ticks less often. File systems that keep whole seconds, as Lustre does, tick once in one.
_TICK_S, _WHOLE_S = 0.02, 1.02


def read_snapshot(
    fetcher: Fetcher, believe: Callable[[Snapshot], bool] | None = None, *, tars: bool = False
) -> Snapshot:
    """The newest committed state of the file. Reads the two meta pages, twice: a writer may be at work on them.

    believe : one read is enough if this is true of what it brought: it is known already from elsewhere
    tars : a tar will do

    Raises InvalidError (EncryptedError, VersionMismatchError among them), CorruptedError, SnapshotError; all with path.
    """
    try:
        return _read_snapshot(fetcher, believe, tars)
    except ParioError as e:
        e.at(path=fetcher.path)
        raise


def _read_snapshot(fetcher: Fetcher, believe: Callable[[Snapshot], bool] | None, tars: bool) -> Snapshot:
    head = fetcher.pread(0, _HEAD_BYTES)
    layout = sniff(head)
    if layout is None and tars and is_header(head[:BLOCK]):
        return _tar_snapshot(fetcher, believe)
    if layout is None:
        raise explain(fetcher.pread(0, EXPLAIN_BYTES), fetcher.nbytes, fetcher.path)
    both = 2 * page_size(head, layout)
    before = head[:both] if both <= len(head) else fetcher.pread(0, both)
    if believe is not None:
        try:
            once = newest(before, layout, fetcher.nbytes)
        except ParioError:
            pass  # perhaps because only half of it was written: read again
        else:
            if (once.last_pgno + 1) * once.page_size <= fetcher.nbytes and believe(once):
                return once
    for _ in range(_TRIES):
        again = fetcher.pread(0, both)
        if again == before:
            break
        before = again
        time.sleep(_PAUSE_S)
    else:
        raise SnapshotError(
            f"the meta pages changed during each of {_TRIES} reads", hint="A writer commits without pause; wait for it"
        )
    damage: CorruptedError | None = None
    try:
        snapshot = newest(before, layout, fetcher.nbytes)
        if (snapshot.last_pgno + 1) * snapshot.page_size <= fetcher.nbytes:
            return snapshot
    except CorruptedError as e:
        damage = e
    # What a writer appended between the opening of the file and now lies behind the end that we know.
    if os.fstat(fetcher.files[0].fileno()).st_size > fetcher.nbytes:
        raise SnapshotError("the file grew while it was opened", hint="A writer is at work; open it again") from damage
    if damage is not None:
        raise damage
    return snapshot


def _tar_snapshot(fetcher: Fetcher, believe: Callable[[Snapshot], bool] | None) -> Snapshot:
    """The state that the file had when it was opened: what changes it from now on changes the time of its last change.
    That may be as coarse as a tick of the clock for files, so one that was written just now, or by a clock ahead of
    ours, must become older."""
    status = fetcher.files[0].status()
    snapshot = TarSnapshot.of(status.st_size, status.st_mtime_ns)
    tick_s = _TICK_S if status.st_mtime_ns % 10**9 else _WHOLE_S
    time.sleep(min(max(0.0, tick_s - (time.time() - status.st_mtime)), tick_s))
    check_snapshot(fetcher, snapshot)
    if believe is not None:
        believe(snapshot)
    return snapshot


def _check_tar(fetcher: Fetcher, snapshot: Snapshot) -> None:
    try:
        now = os.fstat(fetcher.files[0].fileno())
    except OSError as e:
        raise FileError(f"cannot look at it: {e.strerror}", path=fetcher.path) from e
    if (now.st_size, now.st_mtime_ns) != (snapshot.file_bytes, snapshot.txnid):
        raise SnapshotError(
            f"the tar was changed while it was read: we read {snapshot.said}, "
            f"and now it has {TarSnapshot.of(now.st_size, now.st_mtime_ns).said}",
            path=fetcher.path,
            hint="Read a file that nobody writes: write a new one and rename it; or open it again and repeat",
        )


def check_snapshot(fetcher: Fetcher, snapshot: Snapshot) -> None:
    """Call it after reading pages of `snapshot` and before trusting them; one pread of a page's size.

    Raises SnapshotError if a writer may have overwritten some of them, or if the file is another one by now. (One that
    was written over with a file of the same shape, to the last page and record, and of the same transaction number
    looks the same; no other does.)
    """
    if not snapshot.has_pages:
        return _check_tar(fetcher, snapshot)
    size, stamp = snapshot.page_size, snapshot.stamp
    both = fetcher.pread(0, size + len(stamp))
    if len(both) < size + len(stamp):
        raise SnapshotError(
            "the file was cut off while it was read", path=fetcher.path, hint="Somebody replaces it; open it again"
        )
    # The next transaction writes the other meta page, the one after it this one, and only that one takes our pages.
    if both.startswith(stamp, snapshot.meta * size):
        return
    unpack = snapshot.layout.unpack_word
    txnids = [int(unpack(both, at)[0]) for at in snapshot.txnid_words]
    if max(txnids) < snapshot.txnid:
        what = "the file was replaced while it was read"
    elif max(txnids) > snapshot.txnid + 1:
        what = "writers committed while the file was read, and pages of our snapshot may be overwritten"
    else:
        what = f"another file was written over this one while it was read: meta page {snapshot.meta} is no longer ours"
    raise SnapshotError(
        f"{what}: we read transaction {snapshot.txnid}, the meta pages now say {txnids[0]} and {txnids[1]}",
        path=fetcher.path,
        hint="Read a file that nobody writes, or a copy of it (mdb_copy); or open it again and repeat",
    )


def identity_of(store: Fetcher, snapshots: Sequence[Snapshot]) -> bytes:
    """bytes[32] that tell this state of the files from all others. (Device numbers differ between mounts.)"""
    found = hashlib.sha256()
    for part, snapshot in zip(store.files, snapshots, strict=True):
        status = part.status()
        found.update(f"pario 1 {status.st_ino} {status.st_size} {status.st_mtime_ns} ".encode())
        found.update(part.pread(0, 2 * snapshot.page_size))
    return found.digest()


class SharedLook:
    """`check_snapshot` for several reads, of which nobody waits for it: one look serves all that had ended when it
    began, and the next one begins when it has ended. (197 KB records, 4 ranks on 2 nodes, 20 ms and 200 MB/s, with
    threads that wait for the looks: 0.84 of the store's rate in "global" order, 0.89 in key order.)

    workers : look, and call back
    count(reads, bytes) : called for each look
    """

    def __init__(self, fetcher: Fetcher, snapshot: Snapshot, workers: AnyWorkers, count: Counter) -> None:
        self._fetcher, self._snapshot, self._workers, self._count = fetcher, snapshot, workers, count
        self._lock = threading.Lock()  # guards the two below
        self._waiting: list[Callable[[BaseException | None], object]] = []
        self._looks = False

    def after(self, done: Callable[[BaseException | None], object]) -> None:
        """Call `done` when a look that begins from now on has ended, with what it raised. `done` raises nothing."""
        with self._lock:
            self._waiting.append(done)
            first, self._looks = not self._looks, True
        if first:
            self._workers.run(self._look)

    def check_alone(self) -> None:
        """A look at once, in this thread, for one that follows many reads. Raises what `check_snapshot` raises."""
        self._count(1, self._snapshot.page_size + len(self._snapshot.stamp))
        check_snapshot(self._fetcher, self._snapshot)

    def _look(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        error: BaseException | None = None
        try:
            self.check_alone()
        except BaseException as e:
            error = e
        while waiting:  # the error may live long, and refers to this list
            self._workers.run(partial(waiting.pop(), error))
        with self._lock:
            again = self._looks = bool(self._waiting)
        if again:  # behind what was read: it waits for a thread, too
            self._workers.run(self._look)


def file_words(snapshot: Snapshot) -> list[int]:
    """What compiled functions know of a file: the words that `kernels.nodes.FILE` names, in its order."""
    values = {
        "page_size": snapshot.page_size,
        "header": snapshot.header,
        "base": snapshot.base,
        "limit": snapshot.limit,
        "version": snapshot.version,
        "word": snapshot.word,
        "big": snapshot.byteorder == "big",
        "sum_size": snapshot.sum_size,
        "last_pgno": snapshot.last_pgno,
        "txnid": snapshot.txnid,
        "file_bytes": snapshot.file_bytes,
    }
    return [int(values[name]) for name in FILE]
