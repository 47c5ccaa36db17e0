"""Knobs: values that may change while an epoch runs, within bounds, with the reason of the present value."""

from __future__ import annotations

import logging
from typing import NamedTuple

from pario.errors import OptionError
from pario.options import KNOBS

_log = logging.getLogger("pario")

#: Reads in flight before anything is measured.
START_DEPTH = KNOBS["inflight"].start


class Setting(NamedTuple):
    """The value of a knob, and why it is not another one."""

    value: int
    reason: str


class Knob:
    """A bounded live value. Any thread may read it; one thread at a time turns it.

    name : in plain words, for the log
    least, most : its bounds; equal bounds pin it
    start : its value before anything was measured
    reason : why it is that, if no user has pinned it

    Raises OptionError.
    """

    def __init__(self, name: str, least: int, most: int, start: int, reason: str = "") -> None:
        if not 1 <= least <= most:
            raise OptionError(f"{name}: the bounds must satisfy 1 <= least <= most, got {least!r} and {most!r}")
        self.name = name
        self.least, self.most = least, most
        reason = reason or ("set by the user" if least == most else "nothing is measured yet")
        self._setting = Setting(self._clip(start), reason)

    @property
    def setting(self) -> Setting:
        """Value and reason, of the same moment."""
        return self._setting

    @property
    def value(self) -> int:
        return self._setting.value

    @property
    def reason(self) -> str:
        return self._setting.reason

    @property
    def is_pinned(self) -> bool:
        return self.least == self.most

    def turn(self, value: int, reason: str) -> bool:
        """Set it to `value`, or to the nearest bound; returns whether the value changed. A pinned knob stays."""
        if self.is_pinned:
            return False
        before, self._setting = self._setting, Setting(self._clip(value), reason)
        changed = before.value != self._setting.value
        if changed:
            _log.debug("%s: %d -> %d, %s", self.name, before.value, self._setting.value, reason)
        return changed

    def at_least(self, value: int) -> None:
        """Before anything is measured, where less would be too little."""
        if self.value < value:
            self.turn(value, "nothing is measured yet")

    def limit(self, most: int, reason: str) -> None:
        """Lower the upper bound, and the value if it is above."""
        self.most = max(1, min(self.most, most))
        self.least = min(self.least, self.most)
        if self.value > self.most:
            self._setting = Setting(self.most, reason)

    def _clip(self, value: int) -> int:
        return max(self.least, min(value, self.most))
