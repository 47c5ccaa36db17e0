"""Who waits for whom when no more than some of all readers may read at once, in the order of the file.

    size 7, group 3        turn   0        1        2
                           ranks  0 1 2    3 4 5    6
    each hands over to     rank + 3, which reads the part of the file `group` places behind

A reader begins when the one `group` places before it has ended, so `group` readers at most are at work, the window of
them moves up the file, and nobody waits for a whole turn to end. Any number of readers and any `group` will do.
"""

from __future__ import annotations

from typing import NamedTuple

from pario.errors import OptionError

__all__ = ["Turn", "candidates", "turn"]


class Turn(NamedTuple):
    """turn : 0, 1, ... ; before, after : the readers to wait for and to hand over to, or None"""

    turn: int
    before: int | None
    after: int | None


def turn(rank: int, size: int, group: int) -> Turn:
    """The turn of reader `rank` of `size`, of which `group` may read at once."""
    if not 0 <= rank < size or group < 1:
        raise OptionError(f"no turn for reader {rank!r} of {size!r} with {group!r} at once")
    before, after = rank - group, rank + group
    return Turn(rank // group, before if before >= 0 else None, after if after < size else None)


def candidates(size: int) -> list[int]:
    """1, 2, 4, ... and `size` itself: what is worth a try."""
    found = [1 << k for k in range(size.bit_length()) if 1 << k < size]
    return [*found, size]
