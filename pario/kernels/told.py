"""The table of the values that an announcing process has brought for all processes of its node: i64 words in memory
that all of them map. tiers/ahead.py fills it, lmdb/prepared.py looks values up in it.

    head   HEAD words
    slots  SLOT words each; a page number may stand in one of the PROBES slots from `slot_of` on
    late   the pages of the last LATE reads; -1 where the table had the page. A value that was read before its slot was
           made need not be read again

A slot's first word counts its uses in steps of 4; its lowest two bits say what it is used for. A reader of a value
compares it before and after: the bytes are right if it is the same.
"""

from __future__ import annotations

#: Words of the head: reads of any page or value so far; those of announced ones that had not come; for how many
#: microseconds one that is coming is waited for.
ASKED, MISSED, PATIENCE = 0, 1, 2
HEAD = 8

#: Words of a slot: see above; the page where the value begins; its bytes, with the header of its page; where it stands
#: in the memory; how often it was read, or given up, since it was announced.
USE, PAGE, NBYTES, AT, TAKEN = range(5)
SLOT = 8

#: What a slot is used for: a value that was announced, one that is being read, one that is here. (0: nothing)
TOLD, COMING, HERE = 1, 2, 3

#: A power of two. (1 MiB; untouched slots cost nothing.)
SLOTS = 1 << 14
PROBES = 16

#: Read number n (of ASKED) stands at word LATE_AT + n % LATE.
LATE_AT, LATE = HEAD + SLOT * SLOTS, 1 << 13
WORDS = LATE_AT + LATE


def slot_of(page: int) -> int:
    """The first slot for this page. No step overflows 64 bits."""
    return (page * 40503 + (page >> 14)) & (SLOTS - 1)
