"""A checkpoint under way: what a rank knows of it, what `save` returns, how long it will take, where it goes to, and
what the ranks of a node tell each other about it, by words in their shared memory.

Threads in the background must not call MPI. Every word has one writer and holds the number of an attempt, which only
grows: `written[rank]` says that this rank has written all its blocks of that attempt.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pario.checkpoint.layout import NodeFile
from pario.checkpoint.manifest import Manifest
from pario.checkpoint.store import Name, discard, listed, order_of
from pario.codec.base import Codec
from pario.codec.registry import parse
from pario.comm import futex
from pario.comm.base import AnyWorld
from pario.comm.memory import shared_parts
from pario.errors import CheckpointError, OptionError, ReadError

Tier = Literal["fast", "slow"]

ALIKE = "All ranks must call the same methods in the same order"

#: Bytes of an error's text.
_NOTE = 2048
_PAUSE_S = 2e-3
#: Words of the node's leader, then WORDS of each rank.
OPENED, STRAIGHT, CHOSEN, DONE, DRAINED, CANCELLED, DRAINING, COPYING, LEADERS = range(9)
WRITTEN, SUMMED, CODED, FAILED, MOVED, CALLED, BUSY, WORDS = range(8)
#: Of `Board.places`.
TAKEN = -1
#: Checkpoints, and intervals between calls, of which the longest counts.
_LAST, _LAST_STEPS = 5, 10
#: A store that others use may be slower next time: that much longer than the longest is expected.
_SPREAD = 1.5


# -- on one rank -------------------------------------------------------------------------------------------------------


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
    straight: bool = False  # to the slow tier; known on the node's first rank when it is written
    described: str = ""  # checksum of the description of the node's file, on its first rank when it is written
    # When this node's part was durable on the tier that it was written to first; the whole on the slow one, on rank 0.
    durable_at: dict[Tier, float] = field(default_factory=dict)

    @property
    def name(self) -> Name:
        return Name(self.manifest.step, self.manifest.id)

    def over(self, tier: Tier) -> threading.Event:
        """Set when this rank has nothing left to do for it on that tier."""
        return self.written if tier == "fast" else self.committed

    def fail(self, error: CheckpointError) -> None:
        if self.error is None:
            self.error = error


class Handle:
    """A checkpoint that was handed to `save`.

    step : its step; stall_s : seconds that `save` took on this rank
    """

    def __init__(self, attempt: Attempt, stall_s: float, wait: Callable[[Attempt, str, float | None], None]) -> None:
        self._attempt, self._wait = attempt, wait
        self.step = attempt.manifest.step
        self.stall_s = stall_s

    def __repr__(self) -> str:
        return f"Handle(step={self.step}, done={self.done})"

    @property
    def done(self) -> bool:
        """Whether nothing of it is left to do on this rank. Local; does not wait."""
        return self._attempt.committed.is_set()

    def wait(self, tier: str = "slow", timeout_s: float | None = None) -> None:
        """Return when the checkpoint is complete and durable on the slow store, or with "fast" on the tier that it is
        written to first. With "partner" also the copies of all nodes' parts stand on other nodes' fast tiers; where one
        cannot be made, it returns when the slow store has the checkpoint. Collective.

        Raises CheckpointError if it could not be saved, and TimeoutError (on all ranks) after `timeout_s` seconds.
        """
        if tier not in ("fast", "partner", "slow"):
            raise OptionError(f'tier must be "fast", "partner" or "slow", got {tier!r}')
        self._wait(self._attempt, tier, timeout_s)


class Budget:
    """How long checkpoints of this rank took until they were durable, and from that, how long the next one will take.
    All numbers are seconds, all moments those of time.monotonic().

    A checkpoint is served by one line of threads: it begins when `save` is called, or when the one before it is
    durable, whichever is later. What is under way must be finished first, so its remainder counts, too.
    """

    def __init__(self) -> None:
        self._took: dict[Tier, deque[float]] = {"fast": deque(maxlen=_LAST), "slow": deque(maxlen=_LAST)}
        self._last: dict[Tier, tuple[int, float]] = {"fast": (0, 0.0), "slow": (0, 0.0)}  # number, durable when
        self._asked: float | None = None
        self._steps: deque[float] = deque(maxlen=_LAST_STEPS)

    def learn(self, attempts: Iterable[Attempt]) -> None:
        """From those that have become durable since the last call, oldest first."""
        for attempt in attempts:
            for tier in self._took:
                moment = attempt.durable_at.get(tier)
                number, before = self._last[tier]
                if moment is not None and attempt.number > number:
                    self._took[tier].append(moment - max(before, attempt.began))
                    self._last[tier] = attempt.number, moment

    def seconds(self, attempts: Iterable[Attempt], tier: Tier, now: float) -> float:
        """Until a checkpoint that begins `now` is durable on that tier; 0.0 while nothing has been measured.

        attempts : what is under way, oldest first
        """
        attempts = list(attempts)
        self.learn(attempts)
        _, before = self._last[tier]
        waiting = [each for each in attempts if each.error is None and not each.over(tier).is_set()]
        longest = max(self._took[tier], default=0.0)
        if not waiting:
            return _SPREAD * longest
        served = now - max(before, waiting[0].began)  # the first one for this long already
        longest = max(longest, served)
        return _SPREAD * ((len(waiting) + 1) * longest) - served

    def step(self, now: float) -> float:
        """The longest of the last intervals between two calls of this method."""
        if self._asked is not None:
            self._steps.append(now - self._asked)
        self._asked = now
        return max(self._steps, default=0.0)


# -- the tiers that it goes to -----------------------------------------------------------------------------------------


def check_options(
    keep: Any, rate: Any, full: Any, pending: Any, compress: Any, differing: Any, timeout_s: Any, alone: bool
) -> Codec | None:
    """The codec. alone : partner copies without a fast tier. Raises OptionError, also where a codec's package is
    missing."""
    for name, value, fits, what in (
        ("keep", keep, keep is None or (type(keep) is int and keep >= 1), "a whole number from 1 on, or None"),
        ("rate", rate, rate is None or _is_above_0(rate), "bytes per second above 0, or None"),
        ("full", full, full in ("wait", "slow"), '"wait" or "slow"'),
        ("pending", pending, type(pending) is int and pending >= 1, "a whole number from 1 on"),
        ("differing", differing, differing in ("rank0", "raise"), '"rank0" or "raise"'),
        ("timeout_s", timeout_s, _is_above_0(timeout_s), "seconds above 0"),
        ("compress", compress, isinstance(compress, str | None), "a codec and its level, as in 'zstd:3', or None"),
    ):
        if not fits:
            raise OptionError(f"{name} must be {what}, got {value!r}")
    if alone:
        raise OptionError("partner=True copies what is on the nodes' fast tiers, and there are none", hint="Give fast=")
    return None if compress is None else parse(compress)


def _is_above_0(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def step_error(step: Any) -> OptionError | None:
    """What is wrong with it."""
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or not 0 <= step < 10**12:
        return OptionError(f"step must be a whole number from 0 to 10^12 - 1, got {step!r}")
    return None


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


# -- among the ranks of a node -----------------------------------------------------------------------------------------


class Board:
    """Collective over `world`; afterwards local, for any thread. stopped : whether this rank's waiting is to end;
    limit_s : it ends, too, when no byte was moved for this long

    sums, stored, coded : u64 per block of the node's file, which the rank that writes the block fills in: checksum of
        the block, checksum of what is written of it, and bytes that a codec made of it, 0 without one
    places : i64 per block, of the leader: where it lies in the file, or TAKEN from an older one
    """

    def __init__(self, world: AnyWorld, limit_s: float) -> None:
        self._world, self._limit_s = world, limit_s
        self.stopped = False
        self._ranks = world.node_size
        self._seat = world.node_rank
        sizes = [8 * (LEADERS + WORDS * self._ranks), _NOTE * self._ranks]
        words, notes = shared_parts(world, sizes, "preparing checkpoints")
        self._words = memoryview(words.view(np.int64))
        self._notes = notes.reshape(self._ranks, _NOTE)
        self._table(np.empty(0, np.uint64))

    def _table(self, memory: np.ndarray) -> None:
        self.sums, self.stored, self.coded, self.places = memory.reshape(4, -1)
        self.places = self.places.view(np.int64)

    def fit(self, blocks: int) -> None:
        """Room for the checksums of this many blocks. Collective over all ranks; the most of all nodes is taken."""
        most = self._world.allreduce_max(blocks)
        if most > self.sums.size:
            (memory,) = shared_parts(self._world, [4 * 16 * most], "preparing checkpoints")
            self._table(memory.view(np.uint64))

    def get(self, word: int) -> int:
        value = self._words[word]
        futex.fence()
        return value

    def put(self, word: int, value: int) -> None:
        """Only the leader."""
        futex.fence()
        self._words[word] = value

    def mine(self, word: int, value: int) -> None:
        """A word of this rank."""
        self.put(LEADERS + WORDS * self._seat + word, value)

    def theirs(self, word: int) -> list[int]:
        """That word of every rank of the node."""
        return [self.get(LEADERS + WORDS * seat + word) for seat in range(self._ranks)]

    def movement(self) -> list[int]:
        """Changes when any rank of the node writes something, or its first rank drains or copies something."""
        return [*self.theirs(MOVED), *self.theirs(WRITTEN), *map(self.get, (DONE, DRAINED, DRAINING, COPYING))]

    def late(self, call: int) -> list[int]:
        """The ranks of the node that have not come to that call, and are not held up in the one before."""
        came, busy = self.theirs(CALLED), self.theirs(BUSY)
        return [self._rank(seat) for seat in range(self._ranks) if came[seat] < call and busy[seat] <= came[seat]]

    def fail(self, attempt: int, text: str) -> None:
        """This rank cannot do its part."""
        note = text.encode(errors="replace")[:_NOTE]
        self._notes[self._seat] = 0
        self._notes[self._seat, : len(note)] = np.frombuffer(note, np.uint8)
        self.mine(FAILED, attempt)

    def failure(self, attempt: int) -> CheckpointError | None:
        """What another rank of the node has said about that attempt."""
        for seat, number in enumerate(self.theirs(FAILED)):
            if number == attempt and seat != self._seat:
                text = bytes(self._notes[seat]).rstrip(b"\0").decode(errors="replace")
                return CheckpointError(f"a rank of the node could not write its part: {text}", rank=self._rank(seat))
        return None

    def wait(self, word: int, attempt: int, what: str, of_all: bool = False) -> None:
        """Until a word of the leader, or one of every rank (`of_all`), has reached that attempt.

        Raises CheckpointError if another rank fails, if this one is stopped, or if no rank of the node moves any byte
        for this long; it names who is missing.
        """
        moved, since = self.theirs(MOVED), time.monotonic()
        pause = 1e-4
        while (min(self.theirs(word)) if of_all else self.get(word)) < attempt:
            failure = self.failure(attempt)
            if failure is not None:
                raise failure
            if self.stopped:
                raise CheckpointError(f"given up while it waited for {what}")
            if self.get(CANCELLED) >= attempt:
                raise CheckpointError("the node's first rank has given up this checkpoint")
            now = time.monotonic()
            if moved != (moved := self.theirs(MOVED)):
                since = now
            if now - since > self._limit_s:
                step = self.theirs(word if of_all else WRITTEN)
                late = [self._rank(seat) for seat, number in enumerate(step) if number < attempt]
                raise CheckpointError(
                    f"no byte was written for {self._limit_s:.0f} s while it waited for {what}; missing: "
                    f"{', '.join(f'rank {rank}' for rank in late) or 'the first rank of the node'}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_S)

    def _rank(self, seat: int) -> int:
        return self._world.node_ranks[seat]


def apart(doing: list[str]) -> CheckpointError:
    """Ranks have come to different calls. doing : of each rank"""
    first = {words: rank for rank, words in reversed(list(enumerate(doing)))}
    said = ", ".join(f"rank {rank} is {words}" for words, rank in sorted(first.items(), key=lambda each: each[1]))
    return CheckpointError(f"ranks call different methods: {said}", hint=ALIKE)
