"""Threads that decode, and batches that are prepared ahead: measurements in, knobs out. No clock, no threads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pario.tune.bridge import Bridge, Takes
from pario.tune.knobs import Knob, Setting
from pario.tune.tuner import WINDOW_S

#: A window has at least this many batches.
_LEAST_BATCHES = 4
#: The loop waits for decoding if it does so for more than this share of its time; below the other share it does not.
#: Between them nothing changes, so that the number does not swing.
_WAITS, _WAITS_NOT = 0.05, 0.01
#: Threads that decode, as a multiple of those that are busy on average.
_SPARE = 1.25
#: Batches differ in cost: what is needed is a mean over several windows.
_MEMORY = 0.7
#: A core is idle if this much of it is.
_IDLE = 0.5
#: More batches ahead help only if preparing takes less than this share of the time: else the queue is always empty.
_PREPARES = 0.9


@dataclass(frozen=True, slots=True)
class Loop:
    """What a training loop did so far: seconds of its own code, of waiting for batches, of waiting for bytes, and
    batches taken."""

    consumer: float
    waiting: float
    share: float
    batches: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """What a short time said.

    waits : the share of its time in loops for which the loop waited for decoding, not for bytes
    busy : threads that were decoding, mean
    idle : cores of this rank that this process left idle, mean
    prepares : batches that were being prepared at once, mean, with those that wait for bytes or for their turn: two
        threads may prepare
    taken : the most batches that the loop took in the time that one may take to prepare
    room : batches ahead for which there is memory
    """

    waits: float
    busy: float
    idle: float
    prepares: float
    taken: int
    room: int


class ThreadsLaw:
    """More threads while the loop waits for decoding and a core is idle, fewer when the loop is the limit."""

    def __init__(self) -> None:
        self._busy = self._over = 0.0

    def step(self, threads: int, window: Decoding) -> Setting:
        if window.waits > _WAITS:
            self._busy = self._over = 0.0
            share = f"the loop waits for decoding {window.waits:.0%} of the time"
            if window.idle < _IDLE:
                return Setting(threads, f"{share}, and no core is idle")
            return Setting(2 * threads, share)
        if window.waits > _WAITS_NOT:
            return Setting(threads, "the loop hardly waits for decoding")
        self._busy = _MEMORY * self._busy + window.busy
        self._over = _MEMORY * self._over + 1
        busy = self._busy / self._over
        enough = max(1, math.ceil(_SPARE * busy))
        reason = f"decoding keeps {busy:.2g} busy, and nobody waits for it"
        return Setting(min(threads, max(enough, threads // 2)), reason)


class AheadLaw:
    """As many batches ahead as the loop takes while one is being prepared; twice as many when it waits although
    preparing is faster than the loop."""

    def step(self, ahead: int, window: Decoding) -> Setting:
        aim = window.taken + 1  # the first one, and those that it takes before another one is there
        reason = f"the loop takes up to {aim} while one is being prepared"
        if window.waits > _WAITS and window.prepares < _PREPARES:
            aim, reason = max(aim, 2 * ahead), "the loop takes batches in bursts"
        elif aim < ahead:
            aim = max(aim, ahead // 2)
        if aim > window.room:
            return Setting(window.room, "held_bytes has no room for more")
        return Setting(aim, reason)


class DecodeTuner:
    """Turns both, of one rank. All times are handed in. Not thread-safe.

    cores : of this rank
    """

    def __init__(self, threads: Knob, ahead: Knob, cores: int) -> None:
        self.threads, self.ahead = threads, ahead
        self.cores = cores
        self._thread_law, self._ahead_law = ThreadsLaw(), AheadLaw()
        self._bridge, self._takes = Bridge(), Takes()
        self._until = 0.0
        self._last: tuple[Loop, float, float] | None = None  # and seconds of decoding, of the processor
        self._prepared = 0.0

    @property
    def is_pinned(self) -> bool:
        return self.threads.is_pinned and self.ahead.is_pinned

    def taken(self, now: float, prepared: float) -> bool:
        """The loop has taken a batch that took this many seconds to prepare; returns whether the time has come to
        `turn`."""
        self._takes.add(now)
        self._bridge.add(prepared)
        self._prepared += prepared
        return now >= self._until

    def turn(self, now: float, loop: Loop, decoded: float, process: float, room: int) -> bool:
        """decoded : seconds that threads were decoding so far, summed; process : processor seconds of this process so
        far; room : batches ahead for which there is memory. Returns whether the number of threads has changed."""
        before, self._last = self._last, (loop, decoded, process)
        prepared, self._prepared = self._prepared, 0.0
        self._until = now + WINDOW_S
        if before is None:
            return False
        then, decoded_then, process_then = before
        if loop.batches - then.batches < _LEAST_BATCHES:
            self._last, self._prepared = before, prepared  # go on with this window
            return False
        seconds = max(1e-9, loop.consumer - then.consumer + loop.waiting - then.waiting)
        window = Decoding(
            waits=max(0.0, loop.waiting - then.waiting - (loop.share - then.share)) / seconds,
            busy=(decoded - decoded_then) / seconds,
            idle=self.cores - (process - process_then) / seconds,
            prepares=prepared / seconds,
            taken=self._takes.most_within(self._bridge.seconds),
            room=room,
        )
        self.ahead.turn(*self._ahead_law.step(self.ahead.value, window))
        return self.threads.turn(*self._thread_law.step(self.threads.value, window))
