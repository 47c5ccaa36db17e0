"""What ahead.py has to know of those who read: which pages they need, what they have read already, and how many values
are to wait for them."""

from __future__ import annotations

import time
from collections import OrderedDict

import numpy as np

from pario.lmdb import told
from pario.lmdb.told import ToldMemory

#: Pages that are kept, and how many times as many reads later one that nobody has read is of no use.
_MOST_PAGES, _FORGET = 2048, 4
#: Values that are here or on their way.
_LEAST_HERE, _MOST_HERE = 16, 4096
#: How often it is considered whether these should be more, and fewer.
_MORE_S, _FEWER_S = 0.05, 1.0
#: Seconds between two looks at what was read, while that is what is waited for.
_LEAST_LOOK_S, _MOST_LOOK_S = 0.001, 0.05


class Pages:
    """Pages on the way to values, put where other processes find them. The least recently used one goes."""

    def __init__(self, memory: ToldMemory) -> None:
        self._memory = memory
        #: page -> slot, reads of anybody when it came, whether it holds a record itself or leads to such pages only
        self._pages: OrderedDict[int, tuple[int, int, bool]] = OrderedDict()
        self._with_records = 0

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def keep(self, page: int, content: bytes | None, asked: int, with_records: bool) -> None:
        """with_records : what it leads to does not lie in pages of its own"""
        memory = self._memory
        if page in self._pages:
            self._pages.move_to_end(page)
        elif content is not None and (slot := memory.add(page)):
            if not memory.put(slot, np.frombuffer(content, np.uint8)):
                memory.drop(slot, 0)
                return
            self._pages[page] = slot, asked, with_records
            self._with_records += with_records
            if len(self._pages) > _MOST_PAGES:
                _, (oldest, _, had_records) = self._pages.popitem(last=False)
                self._with_records -= had_records
                memory.drop(oldest, 0)

    def has_room(self) -> bool:
        """The oldest page was of use, or will not be: else look-ups run away from those who read.

        True as well if most pages lead to values in pages of their own: the number of those that wait says then how far
        look-ups are ahead. (Nobody takes a page from here that is in a cache of his own.)
        """
        if len(self._pages) < _MOST_PAGES or 2 * self._with_records < _MOST_PAGES:
            return True
        slot, asked, _ = next(iter(self._pages.values()))
        return self._memory.taken(slot) > 0 or self._memory.words[told.ASKED] - asked > _FORGET * _MOST_PAGES


class Late:
    """Which pages were read before they stood in the table: their values are not read again."""

    def __init__(self, memory: ToldMemory) -> None:
        self._memory = memory
        self._pages: OrderedDict[int, int] = OrderedDict()  # page -> number of the read
        self._noted = memory.words[told.ASKED]

    def note(self, wanted: bool) -> int:
        """Look at the reads since the last call; returns how many there ever were. wanted : some may matter"""
        words = self._memory.words
        asked = words[told.ASKED]
        if wanted:
            for number in range(max(self._noted, asked - told.LATE), asked):
                page = words[told.LATE_AT + number % told.LATE]
                if page >= 0:
                    self._pages[page] = number
                    if len(self._pages) > told.LATE:
                        self._pages.popitem(last=False)
        self._noted = asked
        return asked

    def take(self, page: int, since: int) -> bool:
        """Whether it was read since the read of this number. Says so once."""
        return self._pages.pop(page, -1) >= since


class Stock:
    """How many values are to be here or on their way: more if somebody had to wait although as many as that were here,
    fewer if half of them have been enough for a while.

    size : that number
    was_full : there were this many since it became larger
    missed : how often somebody had waited at the last look
    """

    def __init__(self) -> None:
        self.size = _LEAST_HERE
        self.was_full = False
        self._fewest = 0  # ready ones since the last look whether they are too many
        self.missed = self._asked = 0
        self._more_at = self._fewer_at = self._asked_at = time.monotonic()
        self._rate = 1.0  # reads of anybody per second

    def look(self, words: memoryview[int], here: int) -> None:
        """words : of the table; here : values that wait"""
        now, missed = time.monotonic(), words[told.MISSED]
        self._fewest = min(self._fewest, here)
        if now >= self._more_at:
            self._rate = (words[told.ASKED] - self._asked) / max(now - self._asked_at, 1e-3)
            self._asked, self._asked_at = words[told.ASKED], now
            if missed > self.missed and self.was_full:  # else the store is what they wait for
                self.was_full = False
                self.size = min(_MOST_HERE, 2 * self.size)
                self._fewest, self._fewer_at = here, now + _FEWER_S
            self.missed, self._more_at = missed, now + _MORE_S
        if now >= self._fewer_at:
            if 2 * self._fewest > self.size:
                self.size = max(_LEAST_HERE, self.size - max(1, self.size // 8))
            self._fewest, self._fewer_at = here, now + _FEWER_S

    def pause_s(self, here: int) -> float:
        """Until a quarter of them may be gone."""
        return min(_MOST_LOOK_S, max(_LEAST_LOOK_S, here / max(self._rate, 1.0) / 4))
