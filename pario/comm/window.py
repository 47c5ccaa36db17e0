"""Ring: the memory that the ranks of one node share, and the words by which they wait for each other.

    control   ready[slot], done[node rank], failed        int32 words, each on a cache line of its own
              ready_steps[slot]; left[node rank]; one error note per rank
    tables    ids, starts, nbytes      i64[table_steps, table_rows]; step s is row s % table_steps
    data      u8[slots, slot_bytes]    page-aligned, so that O_DIRECT reads go straight into it

Groups of steps go round: group g fills slot g % slots.

    feeding rank                                         every rank of the node
    wait_done(steps that free the slot)                  wait_group(g) -> steps ready so far
    fill data[slot], write its rows of the tables        read its rows and the records' bytes
    publish(g, ready_steps)                              finish(done_steps)

No rank waits for all others: a feeder waits for the slowest rank only when the ring is full, a rank waits for the
feeder only when the ring is empty. All waiting is on a futex with a time limit (`alive_seconds`), after which the
waiting rank looks whether an error was posted and whether its neighbours still live. No lock between processes exists,
so a rank that is killed leaves nothing locked behind.

Every word has one writer (a slot's `ready` the process whose turn the slot is, a rank's `done` that rank) and only
grows within an epoch, so a store needs no atomic update and a waiter that saw an old value loses nothing.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from pario.comm import agree, futex
from pario.comm.world import PAGE, AnyWorld
from pario.errors import ClosedError, DeadRankError, OptionError, ParioError

__all__ = ["LEFT", "Ring"]

#: Done steps of a rank that takes nothing more from this epoch.
LEFT = 0x7FFFFFFF

#: int32 words per cache line: ranks that store their own word do not slow each other down.
LINE = 16

#: Bytes of an error note.
NOTE_BYTES = 4096


class Flag(Protocol):
    """What wait_done wants of a threading.Event."""

    def is_set(self) -> bool: ...


class Ring:
    """The ring of one node. Collective over `world`; an error is raised on all ranks.

    Parameters
    ----------
    world : World or Solo
    slots : slots in the ring
    slot_bytes : bytes per slot; rounded up to whole pages
    table_steps, table_rows : shape of the tables; a table row holds one step of the whole node
    alive_seconds : how often a waiting rank looks around
    provide : False: without tables and data, until `provide` is called

    Attributes
    ----------
    data : u8[slots, slot_bytes]
    ids, starts, nbytes : i64[table_steps, table_rows]; `starts` are byte offsets into `data.reshape(-1)`
    """

    def __init__(
        self,
        world: AnyWorld,
        slots: int,
        slot_bytes: int,
        table_steps: int,
        table_rows: int,
        *,
        alive_seconds: float = 1.0,
        provide: bool = True,
    ) -> None:
        for name, value in (("slots", slots), ("slot_bytes", slot_bytes), ("table_steps", table_steps)):
            if value < 1:
                raise OptionError(f"{name} must be at least 1, got {value!r}")
        self._world = world
        self._alive_seconds = alive_seconds
        self.slots = slots
        self.slot_bytes = slot_bytes = -(-slot_bytes // PAGE) * PAGE

        ranks = world.node_size
        words = LINE * (slots + ranks + 1)  # ready, done, failed
        longs = slots + ranks  # ready_steps; left per rank
        notes = ranks * (16 + NOTE_BYTES)
        parts = self._allocate([4 * words, 8 * longs, notes])

        word = parts[0].view(np.int32)
        base = word.ctypes.data
        self._words = memoryview(word)  # a tenth of the cost of numpy's scalar access
        self._ready_at = 0
        self._done_at = LINE * slots
        self._failed_at = LINE * (slots + ranks)
        self._ready_address = [base + 4 * LINE * slot for slot in range(slots)]
        self._done_address = [base + 4 * (self._done_at + LINE * rank) for rank in range(ranks)]

        long = parts[1].view(np.int64)
        self._ready_steps = memoryview(long[:slots])
        self._left = memoryview(long[slots:])
        self._note_heads = memoryview(parts[2].view(np.int64)[: 2 * ranks])  # (nanoseconds, bytes) per rank
        self._note_texts: np.ndarray = parts[2][16 * ranks :].reshape(ranks, NOTE_BYTES)
        self._shape = table_steps, table_rows
        self.data: np.ndarray = np.empty((0, 0), np.uint8)
        self.ids: np.ndarray = np.empty((0, 0), np.int64)
        self.starts = self.nbytes = self.ids
        if provide:
            self.provide()

        self._closed = False
        self._fail_lock = threading.Lock()
        self._me = world.node_rank
        self._pid = os.getpid()
        self._looked = time.monotonic()

    def _allocate(self, sizes: list[int]) -> list[np.ndarray]:
        """Zeroed memory shared by the node, in pieces that begin with a page. Collective over `world`."""
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // PAGE) * PAGE)
        memory: np.ndarray | None = None
        error: BaseException | None = None
        try:
            memory = self._world.shared_bytes(starts[-1])
        except ParioError as failure:
            error = failure
        self._world.agree(error, "allocating the ring")
        assert memory is not None
        return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def provide(self) -> None:
        """Allocate the memory for records, if that was not done yet. Collective over `world`; raises on all ranks."""
        if len(self.data):
            return
        steps, rows = self._shape
        table, data = self._allocate([3 * 8 * steps * rows, self.slots * self.slot_bytes])
        self.ids, self.starts, self.nbytes = table.view(np.int64).reshape(3, steps, rows)
        self.data = data.reshape(self.slots, self.slot_bytes)

    # -- feeding ranks ---------------------------------------------------------------------------------------------

    def publish(self, group: int, ready_steps: int) -> None:
        """Slot `group % slots` and the tables of all steps below `ready_steps` are complete; wake who waits for them.

        Called by the process that filled the slot, in any thread.
        """
        slot = group % self.slots
        self._ready_steps[slot] = ready_steps
        futex.fence()
        self._words[LINE * slot] = group + 1
        futex.wake_all(self._ready_address[slot])

    def wait_done(self, at_least_steps: int, check: Callable[[], None] | None = None, stop: Flag | None = None) -> bool:
        """Wait until every rank of the node has finished `at_least_steps` steps. False: `stop` was set.

        Raises what `check` raises, PeerError when another rank of the node posted an error, DeadRankError when one
        died. `check` must not call MPI when this runs in a background thread.
        """
        words, first = self._words, self._done_at
        for rank, address in enumerate(self._done_address):
            at = first + LINE * rank
            while (now := words[at]) < at_least_steps:
                if stop is not None and stop.is_set():
                    return False
                self._look(check)
                futex.wait(address, now, self._alive_seconds)
        futex.fence()
        return stop is None or not stop.is_set()

    def is_done(self, at_least_steps: int) -> bool:
        """Has every rank of the node finished so many steps? `wait_done` without waiting."""
        first = self._done_at
        done = all(self._words[first + LINE * rank] >= at_least_steps for rank in range(len(self._done_address)))
        futex.fence()
        return done

    def deserted(self) -> bool:
        """Every rank of the node has left this epoch: what is read now is for nobody."""
        return all(self.has_left(rank) for rank in range(len(self._done_address)))

    def has_left(self, node_rank: int) -> bool:
        """This rank of the node takes nothing more from this epoch."""
        return bool(self._words[self._done_at + LINE * node_rank] == LEFT)

    def stop_feeder(self, stop: threading.Event, thread: threading.Thread, limit_s: float = math.inf) -> bool:
        """Set `stop` and wait until `thread`, which may be inside wait_done, has ended; whether it has in `limit_s`."""
        stop.set()
        pause, end = 1e-3, time.monotonic() + limit_s
        while thread.is_alive() and time.monotonic() < end:
            # Again and again: the thread may have looked at `stop` just before and fall asleep just after a wake.
            self.wake()
            thread.join(pause)
            pause = min(2 * pause, 0.05)
        return not thread.is_alive()

    # -- every rank ------------------------------------------------------------------------------------------------

    def wait_group(self, group: int, check: Callable[[], None] | None = None, timeout: float | None = None) -> int:
        """Wait until `group` is published; the number of steps that are ready then.

        While it waits it looks at least every `alive_seconds` for errors and dead neighbours and calls `check`.
        Raises PeerError, DeadRankError, what `check` raises, and TimeoutError after `timeout` seconds.
        """
        slot = group % self.slots
        if self._words[LINE * slot] != group + 1:
            self._wait_ready(slot, group + 1, check, timeout)
        futex.fence()
        return self._ready_steps[slot]

    def full_slots(self, group: int) -> int:
        """How many groups, from `group` on and without a gap, are published and not yet overwritten. At once."""
        for k in range(self.slots):
            if self._words[LINE * ((group + k) % self.slots)] != group + k + 1:
                return k
        return self.slots

    def _wait_ready(self, slot: int, wanted: int, check: Callable[[], None] | None, timeout: float | None) -> None:
        words, at, address = self._words, LINE * slot, self._ready_address[slot]
        end = None if timeout is None else time.monotonic() + timeout
        while (now := words[at]) != wanted:
            if now > wanted:
                raise ParioError(f"group {wanted - 1} was overwritten by group {now - 1} before this rank took it")
            self._look(check)
            left = self._alive_seconds
            if end is not None:
                left = min(left, end - time.monotonic())
                if left <= 0:
                    raise TimeoutError(f"group {wanted - 1} was not published within {timeout} s")
            futex.wait(address, now, left)

    def finish(self, node_rank: int, done_steps: int) -> None:
        """This rank (`node_rank`) needs no records of steps below `done_steps` any more; wakes waiting feeders.

        LEFT as `done_steps`: it takes nothing more from this epoch.
        """
        futex.fence()
        self._words[self._done_at + LINE * node_rank] = done_steps
        futex.wake_all(self._done_address[node_rank])

    def reset(self, done_steps: int = 0) -> None:
        """A new run, from step `done_steps` on: nothing published, nothing posted.

        Called by one rank of the node between two node barriers, when all feeder threads have stopped.
        """
        for slot in range(self.slots):
            self._words[LINE * slot] = 0
            self._ready_steps[slot] = 0
        for rank in range(len(self._done_address)):
            self._words[self._done_at + LINE * rank] = done_steps
            self._note_heads[2 * rank] = 0
        self._words[self._failed_at] = 0

    def fail(self, rank: int, text: str) -> None:
        """Post an error for the other ranks of the node (the first one counts) and wake them all. Any thread.

        rank : the failing rank, mostly this one
        text : kind of the error and its message, cut to 4 KiB of UTF-8
        """
        with self._fail_lock:  # the feeder thread and the main thread of one process share a note
            me = self._me
            if self._closed or self._note_heads[2 * me]:
                return
            note = f"{rank} {text}".encode(errors="replace")[:NOTE_BYTES]
            self._note_texts[me, : len(note)] = np.frombuffer(note, dtype=np.uint8)
            self._note_heads[2 * me + 1] = len(note)
            futex.fence()
            self._note_heads[2 * me] = time.monotonic_ns()  # one clock per node
            futex.fence()
            self._words[self._failed_at] = 1
        self.wake()

    def wake(self) -> None:
        """Wake everybody on this node who waits for anything; they look around and go on waiting."""
        if not self._closed:
            for address in self._ready_address + self._done_address:
                futex.wake_all(address)

    def check(self) -> None:
        """Raise PeerError if another rank of the node posted an error, DeadRankError if one is gone.

        Cheap: dead neighbours are looked for at most once per `alive_seconds`.
        """
        self._look(None)

    def close(self) -> None:
        """This rank leaves: it is not missed from now on, and its views are dropped. Local, idempotent.

        The memory itself belongs to the World, which frees it.
        """
        if (
            self._closed or os.getpid() != self._pid
        ):  # a forked child has a copy of this object, but no part in the ring
            return
        self.finish(self._me, LEFT)
        self._left[self._me] = 1
        self.wake()
        with self._fail_lock:
            self._closed = True
        self._words = self._ready_steps = self._note_heads = self._left = memoryview(b"")
        self.data = self.ids = self.starts = self.nbytes = self._note_texts = np.empty(0, np.uint8)

    # -- looking around --------------------------------------------------------------------------------------------

    def _look(self, check: Callable[[], None] | None) -> None:
        if self._closed:
            raise ClosedError("the ring was closed", rank=self._world.rank)
        if self._words[self._failed_at]:
            self._raise_posted()
        now = time.monotonic()
        if now - self._looked >= self._alive_seconds:  # before `check`: an MPI library may stumble over a dead rank
            self._looked = now
            self._check_alive()
        if check is not None:
            check()

    def _raise_posted(self) -> None:
        futex.fence()
        heads = self._note_heads
        posted = [(heads[2 * r], r) for r in range(len(self._done_address)) if heads[2 * r] and r != self._me]
        if not posted:
            return  # our own error: raised by whoever posted it
        first = min(posted)[1]
        note = bytes(self._note_texts[first, : heads[2 * first + 1]]).decode(errors="replace")
        rank, _, text = note.partition(" ")
        raise agree.spread(self._world, agree.peer_error(int(rank), text))

    def _check_alive(self) -> None:
        try:
            self._world.check_alive(self._is_closed)
        except DeadRankError as error:
            raise agree.spread(self._world, error) from None

    def _is_closed(self, node_rank: int) -> bool:
        return bool(self._left[node_rank])
