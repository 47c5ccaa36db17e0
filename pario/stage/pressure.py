"""Gives memory of the memory tier back before others miss it.

The kernel cannot reclaim this memory, as it can the page cache, and a training script may allocate late. So the process
that fills the tier looks several times a second at what is available, on the node and in its control groups.
"""

from __future__ import annotations

import logging
import threading
import weakref

from pario import machine
from pario.stage.memory import MemoryTier
from pario.text import decimal_bytes
from pario.threads import start_thread

__all__ = ["PressureWatch"]

_log = logging.getLogger("pario")

#: Seconds between two looks, each of which takes about a millisecond.
_EVERY_S = 0.2
#: The fastest allocation that it must survive, in bytes per second: one core that touches new pages.
_ALLOCATION = 3e9
#: What is kept available: what such an allocation takes until the next look, and as much again while memory is given
#: back. On a small machine, or in a small control group, this part of its memory.
_MARGIN_BYTES = int(2 * _EVERY_S * _ALLOCATION)
_MARGIN_PART = 10


class PressureWatch:
    """A thread that lets the tier shrink until `close`, or until nobody refers to the tier."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = weakref.ref(tier)
        self._closed = threading.Event()
        self._warned = False
        start_thread("pario-memory", self._run)

    def look(self) -> int:
        """Give back what must be; returns how many bytes."""
        tier = self._tier()
        if tier is None or not tier.held_bytes:
            return 0
        total, available = machine.memory(swap=False)
        margin = min(_MARGIN_BYTES, total // _MARGIN_PART)
        if available >= margin:
            return 0
        given = tier.shrink(2 * margin - available)
        if given and not self._warned:
            self._warned = True
            _log.warning(
                "memory is short (%s available): the memory tier gives back %s, and more if need be; what it gave back "
                "comes from the next tier or the store",
                decimal_bytes(available),
                decimal_bytes(given),
            )
        return given

    def _run(self) -> None:
        while not self._closed.wait(_EVERY_S):
            if self._tier() is None:
                return
            self.look()

    def close(self) -> None:
        """Does not wait. Idempotent."""
        self._closed.set()
