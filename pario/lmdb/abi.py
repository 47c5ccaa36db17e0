"""Between Python and the compiled functions: the arrays of words (i64) that describe a file, a database, a transaction
and a cursor, and the numbers that are taken and returned. Errors travel as a bytearray of ERROR_WORDS words, which no
other result is.
"""

from __future__ import annotations

import sys
from typing import Any

from pario.format.layout import MAX_DEPTH
from pario.kernels.nodes import FILE

#: A store: one open file at one snapshot, and its cached pages. The first words are nodes.FILE.
_F = len(FILE)
(
    FD, OPEN, NOWAIT, META_AT, META_BYTES, META, POOL, SLOTS, TABLE, MASK, PAGE_OF, LIVES, HAND, ERROR,
) = range(_F, _F + 14)  # fmt: skip
ERROR_WORDS = 6

#: How many reads of values had to wait for the storage.
WAITED = ERROR + ERROR_WORDS

#: The other meta page: where it stands in the file, and its bytes when the snapshot was taken (as many as META_BYTES).
OTHER_AT, OTHER = WAITED + 1, WAITED + 2

#: The node's copy (tiers/memory.py): its file, the states of its chunks (0: there is none), and a chunk's bytes as a
#: power of two.
COPY_FD, COPY_STATES, CHUNK_BITS = OTHER + 1, OTHER + 2, OTHER + 3

#: What is called before the file is read, with bytes and operations: 0, or a Python function (`DataFile.gate`), which
#: returns whether to go on.
GATE = CHUNK_BITS + 1
STORE_WORDS = GATE + 1

#: A long value to be read: first page of its overflow run, bytes, address; and what the run's header must repeat in
#: format 3, its transaction and pages.
JOB_WORDS = 5

#: A tree: of a database's keys, or of one key's duplicates. Bytes of the items of its P_LEAF2 leaves (0: its leaves
#: have nodes), what nodes.check_page is to expect of its pages, how its keys compare, and whether all are of one width.
#: Duplicates in a sub-page are a tree, too, of this page alone: ROOT is -1 - the leaf page in which it lies, SUB_OF the
#: item there, RULES are the leaf page's.
ROOT, DEPTH, PAD, RULES, WAY, INTEGER, SUB_OF = range(7)
TREE_WORDS = 7

#: A database in a snapshot: the tree of its keys, and what the trees of duplicates have in common.
DUPSORT, DUP_RULES, DUP_WAY, DUP_INTEGER = range(TREE_WORDS, TREE_WORDS + 4)
HANDLE_WORDS = TREE_WORDS + 4

#: A transaction.
ALIVE, STORE, MAIN = range(3)
TXN_WORDS = 3

#: A cursor: where it stands in its tree, and in the duplicates of the key where it stands.
C_TXN, C_HANDLE = 0, 1
C_SET = 2  # it stands somewhere; else the next move is to the first or last item
C_VALID = 3  # the last move succeeded: there is a key and a value
C_DUPS = 4  # the key has duplicates
C_END = 5  # a move beyond the last key was tried: the moves to next items fail until the cursor goes elsewhere
C_DUP_TREE, C_DUP_ENTRIES = 6, 6 + TREE_WORDS  # the tree of the duplicates, and how many these are
C_SCAN, C_AHEAD_PAGE, C_AHEAD_I = 14, 15, 16  # scanning: leaves below this page are asked for up to here
#: A way down a tree: the page and the item of each level, from the root on.
LEVELS = MAX_DEPTH
PATH_WORDS = 2 * LEVELS
C_PATH, C_DUP_PATH = 17, 17 + PATH_WORDS
CURSOR_WORDS = 17 + 2 * PATH_WORDS

#: Bytes of a Python object before its first slot: count of references and type.
OBJECT_BYTES = object.__basicsize__

#: Moves.
(
    FIRST, LAST, NEXT, PREV, NEXT_DUP, PREV_DUP, NEXT_NODUP, PREV_NODUP, FIRST_DUP, LAST_DUP,
    SET_KEY, SET_RANGE, SET_KEY_DUP, SET_RANGE_DUP,
) = range(14)  # fmt: skip

#: What an item is made of.
KEY, VALUE, ITEM = 1, 2, 3

#: Statuses of the compiled functions; from CLOSED on they are errors: (code, page, offset, a, b, c).
OK, MISSING = 0, 1
CLOSED = 2  # the transaction, cursor or environment is closed
NOT_BYTES = 3  # a key or value that is not a bytes object: make one and call again
EMPTY_KEY = 4  # MDB_BAD_VALSIZE
INCOMPATIBLE = 5  # MDB_INCOMPATIBLE: no duplicates in this database
UNPOSITIONED = 6  # EINVAL
DAMAGED = 7  # page, a = what nodes.check_page found
MISPLACED = 8  # page, a = its level, b = levels of the tree, c = bytes of a LEAF2 item
BAD_RUN = 9  # the overflow run at page, a = bytes of the value, b, c = transaction and pages where it is referred to
SHORT = 10  # offset, a = bytes wanted, b = bytes there
FAILED = 11  # offset, a = bytes wanted, b = errno
OVERTAKEN = 12  # a writer committed twice: the snapshot is not to be trusted any more
INTERRUPTED = 14  # a signal's handler raised while the read waited for its turn (`DataFile.raised`)
NOTED = 13  # the object that tells of an error has been made


def plain_bytes(key: Any) -> bytes:
    """A key or value as compiled functions take it; TypeError for what is none."""
    if isinstance(key, str):
        raise TypeError("Won't implicitly convert Unicode to bytes; use .encode()")
    if isinstance(key, bytes):
        return key
    return bytes(memoryview(key))


def code_of(noted: bytearray) -> int:
    """The status in an error."""
    return int.from_bytes(noted[:8], sys.byteorder, signed=True)
