"""Gives memory of the memory tier back before others miss it, and lets it take no more than they leave; takes it again
when they leave more.

The kernel cannot reclaim this memory, as it can the page cache, and a training script may allocate late. So the process
that fills the tier looks several times a second at what is available, on the node and in its control groups, and more
often the less that is; and the tier asks before it grows.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref

from pario import machine
from pario.text import decimal_bytes
from pario.threads import start_thread
from pario.tiers.memory import MemoryTier

_log = logging.getLogger("pario")

#: The most seconds between two looks, each of which takes 30 us, and the least.
_EVERY_S, _LEAST_S = 0.2, 0.005
#: The fastest allocation that it must survive, in bytes per second: one core that touches new pages.
_ALLOCATION = 3e9
#: What is kept available: what such an allocation takes until the next look, and as much again while memory is given
#: back. On a small machine, or in a small control group, this part of its memory.
_MARGIN_BYTES = int(2 * _EVERY_S * _ALLOCATION)
_MARGIN_PART = 10
#: How often limits of control groups are looked up, which hardly ever change, in seconds.
_RENEW_S = 10.0
#: Until the next look such an allocation takes at most this part of what is available, and the tier at most one half.
_TAKEN_PART = 8


class PressureWatch:
    """A thread that lets the tier shrink until `close`, or until nobody refers to the tier; and whom the tier asks
    before it takes more."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = weakref.ref(tier)
        self._lock = threading.RLock()  # guards what follows
        self._allowed = 0  # bytes that the tier may take until the next look
        self._pause_s = _EVERY_S
        self._sooner = threading.Event()
        self._closed = False
        self._warned = False
        self._gauge, self._renew_at = machine.MemoryGauge(), time.monotonic() + _RENEW_S
        tier.admit = self.admit
        start_thread("pario-memory", self._run, stop=self.close)

    def admit(self, chunks: int) -> int:
        """How many of these chunks the tier may take. If none, it is full from now on. Any thread."""
        tier = self._tier()
        assert tier is not None  # it asks
        nbytes = tier.grid.chunk_bytes
        with self._lock:
            if chunks * nbytes > self._allowed:
                self._look(tier)
            chunks = min(chunks, self._allowed // nbytes)
            self._allowed -= chunks * nbytes
            if not chunks:
                tier.shrink(0)
                self._warn("takes no more")
        return chunks

    def look(self) -> int:
        """Give back what must be; returns how many bytes."""
        tier = self._tier()
        with self._lock:
            if tier is not None and (tier.held_bytes or tier.budget < tier.wanted):
                return self._look(tier)
            self._allowed, self._pause_s = 0, _EVERY_S
        return 0

    def _look(self, tier: MemoryTier) -> int:
        total, available = self._gauge.read()
        margin = min(_MARGIN_BYTES, total // _MARGIN_PART)
        given = 0
        if available < margin:
            given = tier.shrink(2 * margin - available)
            self._warn(f"gives back {decimal_bytes(given)}, and more if need be", available)
        elif available > 2 * margin and tier.budget < tier.wanted:  # less than twice, and it would swing
            tier.grow((available - 2 * margin) // 2)
        before = self._pause_s
        self._pause_s = max(_LEAST_S, min(_EVERY_S, (available + given) / (_TAKEN_PART * _ALLOCATION)))
        if self._pause_s < before / 2:
            self._sooner.set()
        self._allowed = max(0, available - tier.promised * tier.grid.chunk_bytes - margin) // 2
        return given

    def _warn(self, what: str, available: int | None = None) -> None:
        if not self._warned:
            self._warned = True
            if available is None:
                _, available = self._gauge.read()
            _log.warning(
                "memory is short (%s available): the memory tier %s; what it does not hold comes from the next tier or "
                "the store",
                decimal_bytes(available),
                what,
            )

    def _run(self) -> None:
        while not self._closed:
            self._sooner.wait(self._pause_s)
            self._sooner.clear()
            if self._closed or self._tier() is None:
                return
            if time.monotonic() > self._renew_at and self._pause_s >= _EVERY_S:
                self._gauge, self._renew_at = machine.MemoryGauge(), time.monotonic() + _RENEW_S
            self.look()

    def close(self) -> None:
        """Does not wait. Idempotent."""
        self._closed = True
        self._sooner.set()
