"""Ring: the words in shared memory on which the ranks of one node wait for each other.

    ready[slot], done[node rank], failed              int32 words, each on a cache line of its own
    ready_steps[slot]; left[node rank]; one error note per rank

Groups of steps reuse the slots (`slots.py`) in turn: group g fills slot g % slots. (An epoch may begin with another
group than 0, so that its first slot is the one behind the last epoch's.)

    reading rank                                         every rank of the node
    wait_done(steps that free the slot)                  wait_group(g) -> steps ready so far
    fill the slot, write its rows of the tables          read its rows and the records' bytes
    publish(g, ready_steps)                              finish(done_steps)

No rank waits for all others: a reading rank waits for the slowest rank only if the ring is full (back-pressure), and a
rank waits for the reading rank only if the ring is empty. All waiting is on a futex with a time limit
(`alive_seconds`), after which the waiting rank checks for posted errors and dead neighbours. There are no locks between
processes, so a killed rank leaves nothing locked.

Every word has one writer (a slot's `ready` the process whose turn it is, a rank's `done` that rank) and only grows
within an epoch. So a store needs no atomic update, and a waiter that saw an old value loses nothing.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable

import numpy as np

from pario.comm import futex
from pario.comm.agree import peer_error
from pario.comm.base import AnyWorld
from pario.comm.farewell import spread
from pario.comm.memory import shared_parts
from pario.errors import ClosedError, DeadRankError, OptionError, ParioError

#: Bytes of an error note.
NOTE_BYTES = 4096

#: `done` of a rank that takes nothing more from this epoch.
LEFT = 0x7FFFFFFF

#: int32 words per cache line: one line per word, so that ranks do not slow each other down.
LINE = 16


class Notes:
    """Errors that ranks of a node post for each other: one note per rank; the earliest note counts.

    memory : u8[Notes.nbytes(ranks)], zeroed, shared by the node
    me : node rank of this process
    """

    def __init__(self, memory: np.ndarray, ranks: int, me: int) -> None:
        self._heads = memoryview(memory.view(np.int64)[: 2 * ranks])  # (nanoseconds, bytes) per rank
        self._texts: np.ndarray = memory[16 * ranks :].reshape(ranks, NOTE_BYTES)
        self._ranks = ranks
        self._me = me

    @staticmethod
    def nbytes(ranks: int) -> int:
        return ranks * (16 + NOTE_BYTES)

    def post(self, rank: int, text: str) -> bool:
        """Post a note; returns whether it is the process's first. Not thread-safe."""
        at = 2 * self._me
        if self._heads[at]:
            return False
        note = f"{rank} {text}".encode(errors="replace")[:NOTE_BYTES]
        self._texts[self._me, : len(note)] = np.frombuffer(note, dtype=np.uint8)
        self._heads[at + 1] = len(note)
        futex.fence()
        self._heads[at] = time.monotonic_ns()  # one clock per node
        futex.fence()
        return True

    def first(self) -> tuple[int, str] | None:
        """(failing rank, text) of the note that another process posted first."""
        futex.fence()
        posted = [(self._heads[2 * r], r) for r in range(self._ranks) if self._heads[2 * r] and r != self._me]
        if not posted:
            return None
        first = min(posted)[1]
        note = bytes(self._texts[first, : self._heads[2 * first + 1]]).decode(errors="replace")
        rank, _, text = note.partition(" ")
        return int(rank), text

    def clear(self) -> None:
        for r in range(self._ranks):
            self._heads[2 * r] = 0


class Ring:
    """The ring of one node. Collective over `world`; an error is raised on all ranks.

    Parameters
    ----------
    world : World or Solo
    slots : slots in the ring
    alive_seconds : how often a waiting rank checks for errors and dead neighbours
    """

    def __init__(self, world: AnyWorld, slots: int, *, alive_seconds: float = 1.0) -> None:
        if slots < 1:
            raise OptionError(f"slots must be at least 1, got {slots!r}")
        self._world = world
        self._alive_seconds = alive_seconds
        self.slots = slots

        ranks = world.node_size
        words = LINE * (slots + ranks + 1)  # ready, done, failed
        longs = slots + ranks  # ready_steps; left per rank
        sizes = [4 * words, 8 * longs, Notes.nbytes(ranks)]
        parts = shared_parts(world, sizes, "allocating the ring")

        word = parts[0].view(np.int32)
        base = word.ctypes.data
        self._words = memoryview(word)  # ten times as fast as numpy's scalar access
        self._done_at = LINE * slots
        self._failed_at = LINE * (slots + ranks)
        self._ready_address = [base + 4 * LINE * slot for slot in range(slots)]
        self._done_address = [base + 4 * (self._done_at + LINE * rank) for rank in range(ranks)]

        long = parts[1].view(np.int64)
        self._ready_steps = memoryview(long[:slots])
        self._left = memoryview(long[slots:])
        self._notes: Notes | None = Notes(parts[2], ranks, world.node_rank)  # None once closed

        self._closed = False
        self._fail_lock = threading.RLock()  # the garbage collector may call `close` while this thread holds it
        self._me = world.node_rank
        self._pid = os.getpid()
        self._looked = time.monotonic()

    # -- feeding ranks ---------------------------------------------------------------------------------------------

    def publish(self, group: int, ready_steps: int) -> None:
        """Announce that slot `group % slots` and the tables of all steps below `ready_steps` are complete; wake the
        waiters.

        Called by the process that filled the slot, in any thread.
        """
        slot = group % self.slots
        self._ready_steps[slot] = ready_steps
        futex.fence()
        self._words[LINE * slot] = group + 1
        futex.wake_all(self._ready_address[slot])

    def wait_done(
        self, at_least_steps: int, check: Callable[[], None] | None = None, stop: threading.Event | None = None
    ) -> bool:
        """Wait until every rank of the node has finished `at_least_steps` steps. Returns False if `stop` was set.

        Raises what `check` raises, PeerError if another rank of the node posted an error, DeadRankError if one died.
        `check` must not call MPI if this runs in a background thread.
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

    def is_done(self, at_least_steps: int, by: Callable[[Iterable[bool]], bool] = all) -> bool:
        """True if every rank of the node has finished this many steps: `wait_done` without waiting.

        by : any: one of them has
        """
        first = self._done_at
        done = by(self._words[first + LINE * rank] >= at_least_steps for rank in range(len(self._done_address)))
        futex.fence()
        return done

    def deserted(self) -> bool:
        """True if every rank of the node has left this epoch, so that nobody needs further reads."""
        return all(self.has_left(rank) for rank in range(len(self._done_address)))

    def has_left(self, node_rank: int) -> bool:
        """True if this rank of the node takes nothing more from this epoch."""
        return bool(self._words[self._done_at + LINE * node_rank] == LEFT)

    def stop_feeder(self, stop: threading.Event, thread: threading.Thread, limit_s: float = math.inf) -> bool:
        """Set `stop` and wait for `thread`, which may be inside wait_done; returns whether it ended within
        `limit_s`."""
        stop.set()
        pause, end = 1e-3, time.monotonic() + limit_s
        while thread.is_alive() and time.monotonic() < end:
            # Repeatedly: the thread may have tested `stop` just before, and fall asleep just after a wake.
            self.wake()
            thread.join(pause)
            pause = min(2 * pause, 0.05)
        return not thread.is_alive()

    # -- every rank ------------------------------------------------------------------------------------------------

    def wait_group(self, group: int, check: Callable[[], None] | None = None) -> int:
        """Wait until `group` is published; returns the number of steps that are ready then.

        While it waits, it checks at least every `alive_seconds` for errors and dead neighbours, and calls `check`.
        Raises PeerError, DeadRankError, and what `check` raises.
        """
        slot = group % self.slots
        if self._words[LINE * slot] != group + 1:
            self._wait_ready(slot, group + 1, check)
        futex.fence()
        return self._ready_steps[slot]

    def full_slots(self, group: int) -> int:
        """Number of groups, from `group` on and without a gap, that are published and not yet overwritten. Does not
        wait."""
        for k in range(self.slots):
            if self._words[LINE * ((group + k) % self.slots)] != group + k + 1:
                return k
        return self.slots

    def _wait_ready(self, slot: int, wanted: int, check: Callable[[], None] | None) -> None:
        words, at, address = self._words, LINE * slot, self._ready_address[slot]
        while (now := words[at]) != wanted:
            if now > wanted:
                raise ParioError(f"group {wanted - 1} was overwritten by group {now - 1} before this rank took it")
            self._look(check)
            futex.wait(address, now, self._alive_seconds)

    def finish(self, node_rank: int, done_steps: int) -> None:
        """This rank (`node_rank`) no longer needs records of steps below `done_steps`; wakes waiting reading ranks.

        LEFT as `done_steps`: it takes nothing more from this epoch.
        """
        futex.fence()
        self._words[self._done_at + LINE * node_rank] = done_steps
        futex.wake_all(self._done_address[node_rank])

    def reset(self, done_steps: int = 0) -> None:
        """Prepare a new run from step `done_steps` on: nothing published, nothing posted.

        Called by one rank of the node between two node barriers, when all reading threads have stopped.
        """
        for slot in range(self.slots):
            self._words[LINE * slot] = 0
            self._ready_steps[slot] = 0
        for rank in range(len(self._done_address)):
            self._words[self._done_at + LINE * rank] = done_steps
        if self._notes is not None:
            self._notes.clear()
        self._words[self._failed_at] = 0

    def fail(self, rank: int, text: str) -> None:
        """Post an error for the other ranks of the node (the first one counts) and wake them all. Any thread.

        rank : the failing rank, usually this one
        text : kind of the error and its message, truncated to 4 KiB of UTF-8
        """
        with self._fail_lock:  # the reading thread and the main thread of one process share a note
            if self._notes is None or not self._notes.post(rank, text):
                return
            self._words[self._failed_at] = 1
        self.wake()

    def wake(self) -> None:
        """Wake all waiting ranks of this node; they check for errors and continue to wait."""
        if not self._closed:
            for address in self._ready_address + self._done_address:
                futex.wake_all(address)

    def check(self) -> None:
        """Raise PeerError if another rank of the node posted an error, DeadRankError if one is gone.

        Cheap: checks for dead neighbours at most once per `alive_seconds`.
        """
        self._look(None)

    def close(self) -> None:
        """This rank leaves: the others no longer expect it, and it drops its views. Local, idempotent.

        The memory itself belongs to the World, which frees it.
        """
        if (
            self._closed or os.getpid() != self._pid
        ):  # a forked child has a copy of this object, but does not belong to the ring
            return
        self.finish(self._me, LEFT)
        self._left[self._me] = 1
        self.wake()
        with self._fail_lock:
            self._closed = True
            self._notes = None
        self._words = self._ready_steps = self._left = memoryview(b"")

    # -- looking around --------------------------------------------------------------------------------------------

    def _look(self, check: Callable[[], None] | None) -> None:
        if self._closed:
            raise ClosedError("the ring was closed", rank=self._world.rank)
        if self._words[self._failed_at]:
            self._raise_posted()
        now = time.monotonic()
        if now - self._looked >= self._alive_seconds:  # before `check`: an MPI library may fail over a dead rank
            self._looked = now
            self._check_alive()
        if check is not None:
            check()

    def _raise_posted(self) -> None:
        first = self._notes.first() if self._notes is not None else None
        if first is not None:  # None: our own error; the code that posted it raises it
            raise spread(self._world, peer_error(*first))

    def _check_alive(self) -> None:
        try:
            self._world.check_alive(lambda node_rank: bool(self._left[node_rank]))
        except DeadRankError as error:
            raise spread(self._world, error) from None
