"""Down a tree, to the next item and the next duplicate: where a cursor stands and goes. All of it compiled."""

from __future__ import annotations

import numpy as np
from numba import types

from pario.format.layout import F_DUPDATA, F_SUBDATA, MDB_DUPFIXED, MDB_INTEGERKEY, NUM_METAS
from pario.kernels.jit import inner
from pario.kernels.nodes import (
    BIG,
    LAST_PGNO,
    PAGE_SIZE,
    WORD,
    child,
    compare,
    count,
    key_span,
    node_at,
    search_branch,
    search_leaf,
    u16,
    u32,
    word,
)
from pario.lmdb.abi import (
    C_AHEAD_PAGE,
    C_DUP_ENTRIES,
    C_DUP_PATH,
    C_DUP_TREE,
    C_DUPS,
    C_END,
    C_PATH,
    C_SCAN,
    C_SET,
    C_SUB_I,
    DAMAGED,
    DEPTH,
    DUP_INTEGER,
    DUP_RULES,
    DUP_TREE,
    DUP_WAY,
    DUPSORT,
    EMPTY_KEY,
    ERROR,
    FD,
    FIRST,
    FIRST_DUP,
    GATE,
    INCOMPATIBLE,
    INTEGER,
    LAST,
    LAST_DUP,
    LEVELS,
    MISSING,
    NEXT,
    NEXT_DUP,
    NEXT_NODUP,
    NO_DUPS,
    OK,
    PAD,
    PATH_WORDS,
    PREV_DUP,
    PREV_NODUP,
    ROOT,
    RULES,
    SET_KEY_DUP,
    SET_RANGE,
    SET_RANGE_DUP,
    SUB_PAGE,
    TREE_WORDS,
    UNPOSITIONED,
    WAY,
)
from pario.lmdb.capi import WILLNEED, as_words, fadvise, intc, pages_of, scratch_memory
from pario.lmdb.pages import cached, data_at, fail, is_in_copy, page_at

#: Leaves that a scan asks for ahead.
LEAVES_AHEAD = 64


@inner
def leaf_for(g, handle, key):  # type: ignore[no-untyped-def]
    """Where the leaf that `key` belongs to starts in the pool; -1: an error is noted."""
    pgno, depth, way = handle[ROOT], handle[DEPTH], handle[WAY]
    for level in range(depth - 1):
        o = page_at(g, pgno, level, handle)
        if o < 0:
            return o
        pool = pages_of(g)
        pgno = child(pool, o, search_branch(pool, o, key, way, g), g)
    return page_at(g, pgno, depth - 1, handle)


@inner
def _down(g, tree, path, pgno, level, last):  # type: ignore[no-untyped-def]
    """From page `pgno` at `level` down to the first or last item below. path : i64[PATH_WORDS], filled in"""
    depth = tree[DEPTH]
    while True:
        o = page_at(g, pgno, level, tree)
        if o < 0:
            return g[ERROR]
        pool = pages_of(g)
        i = count(pool, o, g) - 1 if last else 0
        path[level], path[LEVELS + level] = pgno, i
        if level >= depth - 1:
            return OK
        pgno = child(pool, o, i, g)
        level += 1


@inner
def _down_to(g, tree, path, key):  # type: ignore[no-untyped-def]
    """To the first item >= key. Returns (status, whether it is equal); MISSING: all are less."""
    pgno, depth, way = tree[ROOT], tree[DEPTH], tree[WAY]
    for level in range(depth):
        o = page_at(g, pgno, level, tree)
        if o < 0:
            return g[ERROR], False
        pool = pages_of(g)
        path[level] = pgno
        if level < depth - 1:
            i = search_branch(pool, o, key, way, g)
            path[LEVELS + level] = i
            pgno = child(pool, o, i, g)
            continue
        if tree[INTEGER] and key_span(pool, o, 0, g)[1] != len(key):
            return MISSING, False
        i, equal = search_leaf(pool, o, key, way, g)
        path[LEVELS + level] = i
        if i == count(pool, o, g):
            path[LEVELS + level] = i - 1
            return _turn(g, tree, path, 1, as_words(scratch_memory(), 0)), False
        return OK, equal
    return MISSING, False


@inner
def _turn(g, tree, path, step, ahead):  # type: ignore[no-untyped-def]
    """To the neighbouring leaf's nearest item; MISSING, and nothing changed, if there is none.

    ahead : i64[3] of a scanning cursor (C_SCAN, C_AHEAD_PAGE, C_AHEAD_I), else of length 0
    """
    lowest = tree[DEPTH] - 2
    level = lowest
    while level >= 0:
        o = page_at(g, path[level], level, tree)
        if o < 0:
            return g[ERROR]
        pool = pages_of(g)
        i = path[LEVELS + level] + step
        n = count(pool, o, g)
        if 0 <= i < n:
            if len(ahead) and ahead[0] and level == lowest:
                _ask_ahead(g, pool, o, path[level], i, step, ahead)
            path[LEVELS + level] = i
            return _down(g, tree, path, child(pool, o, i, g), level + 1, step < 0)
        level -= 1
    return MISSING


@inner
def _ask_ahead(g, pool, o, pgno, i, step, ahead):  # type: ignore[no-untyped-def]
    """Have the kernel read the next leaves below this branch page: many at once, while we look at the first."""
    n = count(pool, o, g)
    if ahead[1] == pgno and (ahead[2] - i) * step > 0:
        return
    j = i
    asked = 0
    size = g[PAGE_SIZE]
    while 0 <= j < n and asked < LEAVES_AHEAD:
        below = child(pool, o, j, g)
        if cached(g, below) < 0:
            # Neighbouring pages are asked for by one call.
            first = last = below
            while 0 <= j + step < n and child(pool, o, j + step, g) == last + step and asked < LEAVES_AHEAD:
                last += step
                j += step
                asked += 1
            start, nbytes = min(first, last) * size, (abs(last - first) + 1) * size
            if g[GATE] == 0 and not is_in_copy(g, start, nbytes):
                fadvise(intc(g[FD]), types.int64(start), types.int64(nbytes), intc(WILLNEED))
        asked += 1
        j += step
    ahead[1], ahead[2] = pgno, j


@inner
def enter(g, handle, c, last):  # type: ignore[no-untyped-def]
    """The cursor has come to another item: go to its first or last duplicate."""
    c[C_DUPS] = NO_DUPS
    pgno = c[C_PATH + handle[DEPTH] - 1]
    at = node_of(g, handle, c)
    if at < 0:
        return g[ERROR]
    pool = pages_of(g)
    flags = u16(pool, at + 4, g[BIG])
    if not flags & F_DUPDATA:
        return OK
    if not handle[DUPSORT]:
        return fail(g, DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
    data = data_at(pool, at, g)
    if not flags & F_SUBDATA:
        c[C_DUPS], c[C_SUB_I] = SUB_PAGE, count(pool, data, g) - 1 if last else 0
        return OK
    wide = g[WORD]
    tree_flags = u16(pool, data + 4, g[BIG])
    depth = u16(pool, data + 6, g[BIG])
    entries, root = word(pool, data + 8 + 3 * wide, g), word(pool, data + 8 + 4 * wide, g)
    sound = tree_flags == 0 or tree_flags == MDB_DUPFIXED or tree_flags == MDB_DUPFIXED | MDB_INTEGERKEY
    if not sound or not 1 <= depth <= LEVELS or entries < 1 or root < NUM_METAS or root > g[LAST_PGNO]:
        return fail(g, DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
    pad = u32(pool, data, g[BIG]) if tree_flags & MDB_DUPFIXED else 0
    if tree_flags & MDB_DUPFIXED and pad == 0:
        return fail(g, DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
    c[C_DUPS], c[C_DUP_ENTRIES] = DUP_TREE, entries
    tree = dup_tree(c)
    tree[ROOT], tree[DEPTH], tree[PAD] = root, depth, pad
    tree[RULES], tree[WAY], tree[INTEGER] = handle[DUP_RULES], handle[DUP_WAY], handle[DUP_INTEGER]
    return _down(g, tree, dup_path(c), root, 0, last)


@inner
def dup_tree(c):  # type: ignore[no-untyped-def]
    return c[C_DUP_TREE : C_DUP_TREE + TREE_WORDS]


@inner
def _path(c):  # type: ignore[no-untyped-def]
    return c[C_PATH : C_PATH + PATH_WORDS]


@inner
def dup_path(c):  # type: ignore[no-untyped-def]
    return c[C_DUP_PATH : C_DUP_PATH + PATH_WORDS]


@inner
def sub_page(g, handle, c):  # type: ignore[no-untyped-def]
    """Where the sub-page starts in the pool; -1: an error is noted."""
    at = node_of(g, handle, c)
    if at < 0:
        return at
    pool = pages_of(g)
    if u16(pool, at + 4, g[BIG]) != F_DUPDATA:
        moved(g)
        return np.int64(-1)
    return data_at(pool, at, g)


@inner
def moved(g):  # type: ignore[no-untyped-def]
    """The cursor's numbers contradict its page: two threads move it at once."""
    return fail(g, UNPOSITIONED, 0, 0, 0, 0, 0)


@inner
def node_of(g, handle, c):  # type: ignore[no-untyped-def]
    """Where the node of the cursor's key starts in the pool; -1: an error is noted."""
    level = handle[DEPTH] - 1
    o = page_at(g, c[C_PATH + level], level, handle)
    if o < 0:
        return o
    pool = pages_of(g)
    i = c[C_PATH + LEVELS + level]
    if not 0 <= i < count(pool, o, g):
        moved(g)
        return np.int64(-1)
    return node_at(pool, o, i, g)


@inner
def _step_in(g, tree, path, step, ahead):  # type: ignore[no-untyped-def]
    """To the neighbouring item of a tree; MISSING, and nothing changed, if there is none. ahead : see `_turn`"""
    level = tree[DEPTH] - 1
    o = page_at(g, path[level], level, tree)
    if o < 0:
        return g[ERROR]
    i = path[LEVELS + level] + step
    if 0 <= i < count(pages_of(g), o, g):
        path[LEVELS + level] = i
        return OK
    return _turn(g, tree, path, step, ahead)


@inner
def _step_dup(g, handle, c, step):  # type: ignore[no-untyped-def]
    """To the next or previous duplicate; MISSING, and nothing changed, if there is none."""
    if c[C_DUPS] == SUB_PAGE:
        o = sub_page(g, handle, c)
        if o < 0:
            return g[ERROR]
        i = c[C_SUB_I] + step
        if not 0 <= i < count(pages_of(g), o, g):
            return MISSING
        c[C_SUB_I] = i
        return OK
    return _step_in(g, dup_tree(c), dup_path(c), step, c[0:0])


@inner
def _end_dup(g, handle, c, last):  # type: ignore[no-untyped-def]
    """To the first or last duplicate of the key where the cursor stands."""
    if c[C_DUPS] == SUB_PAGE:
        o = sub_page(g, handle, c)
        if o < 0:
            return g[ERROR]
        c[C_SUB_I] = count(pages_of(g), o, g) - 1 if last else 0
        return OK
    tree = dup_tree(c)
    return _down(g, tree, dup_path(c), tree[ROOT], 0, last)


@inner
def _find_dup(g, handle, c, value, exact):  # type: ignore[no-untyped-def]
    """To the duplicate `value`, or (not exact) to the first that is >= it."""
    way, integer = handle[DUP_WAY], handle[DUP_INTEGER]
    if c[C_DUPS] == NO_DUPS:
        at = node_of(g, handle, c)
        if at < 0:
            return g[ERROR]
        pool = pages_of(g)
        nbytes = u32(pool, at, g[BIG])
        if u16(pool, at + 4, g[BIG]) != 0:
            # A value of a DUPSORT database is short: it has no pages of its own, and is no database.
            pgno = c[C_PATH + handle[DEPTH] - 1]
            return fail(g, DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
        if integer and nbytes != len(value):
            return MISSING
        order = compare(pool, data_at(pool, at, g), nbytes, value, 0, len(value), way)
        return OK if order == 0 or (order > 0 and not exact) else MISSING
    if len(value) == 0:
        return fail(g, EMPTY_KEY, 0, 0, 0, 0, 0)
    if c[C_DUPS] == SUB_PAGE:
        o = sub_page(g, handle, c)
        if o < 0:
            return g[ERROR]
        pool = pages_of(g)
        if integer and key_span(pool, o, 0, g)[1] != len(value):
            return MISSING
        i, equal = search_leaf(pool, o, value, way, g)
        if i == count(pool, o, g) or (exact and not equal):
            return MISSING
        c[C_SUB_I] = i
        return OK
    status, equal = _down_to(g, dup_tree(c), dup_path(c), value)
    return MISSING if status == OK and exact and not equal else status


@inner
def _step(g, handle, c, step):  # type: ignore[no-untyped-def]
    """To the next or previous key; its first or last duplicate. MISSING, and nothing changed, if there is none."""
    status = _step_in(g, handle, _path(c), step, c[C_SCAN : C_SCAN + 3])
    return enter(g, handle, c, step < 0) if status == OK else status


@inner
def go(g, handle, c, op):  # type: ignore[no-untyped-def]
    """One of the moves without a key. The rules are LMDB's."""
    if op in (FIRST_DUP, LAST_DUP):
        if not c[C_SET]:
            return fail(g, UNPOSITIONED, 0, 0, 0, 0, 0)
        if not handle[DUPSORT]:
            return fail(g, INCOMPATIBLE, 0, 0, 0, 0, 0)
        c[C_END] = 0
        return OK if c[C_DUPS] == NO_DUPS else _end_dup(g, handle, c, op == LAST_DUP)
    step = 1 if op in (NEXT, NEXT_DUP, NEXT_NODUP, FIRST) else -1
    if op in (FIRST, LAST) or not c[C_SET]:
        c[C_SET] = c[C_END] = 0
        if handle[ROOT] < 0:
            return MISSING
        if c[C_SCAN] and handle[DEPTH] > 1:
            c[C_AHEAD_PAGE] = 0
        status = _down(g, handle, _path(c), handle[ROOT], 0, step < 0)
        if status == OK:
            status = enter(g, handle, c, step < 0)
        c[C_SET] = status == OK
        return status
    if c[C_END] and step > 0:
        return MISSING
    if handle[DUPSORT] and op != NEXT_NODUP and op != PREV_NODUP:
        only_dup = op in (NEXT_DUP, PREV_DUP)
        if c[C_DUPS] != NO_DUPS:
            status = _step_dup(g, handle, c, step)
            if status == OK:
                c[C_END] = 0
            if only_dup or status != MISSING:
                return status
        elif only_dup:
            return MISSING
    if step < 0:
        c[C_END] = 0
    status = _step(g, handle, c, step)
    if status == MISSING and step > 0:
        c[C_END] = 1
    return status


@inner
def seek(g, handle, c, op, key, value):  # type: ignore[no-untyped-def]
    """One of the moves to a key. A miss leaves the cursor nowhere."""
    with_value = op in (SET_KEY_DUP, SET_RANGE_DUP)
    if with_value and not handle[DUPSORT]:
        return fail(g, INCOMPATIBLE, 0, 0, 0, 0, 0)
    if len(key) == 0:
        return fail(g, EMPTY_KEY, 0, 0, 0, 0, 0)
    c[C_SET] = c[C_END] = 0
    c[C_AHEAD_PAGE] = 0
    if handle[ROOT] < 0:
        return MISSING
    status, equal = _down_to(g, handle, _path(c), key)
    if status == OK and not equal and op != SET_RANGE:
        status = MISSING
    if status == OK:
        status = enter(g, handle, c, False)
    if status == OK and with_value:
        status = _find_dup(g, handle, c, value, op == SET_KEY_DUP)
    c[C_SET] = status == OK
    return status
