"""Down a tree, to the next item and the next duplicate: where a cursor stands and goes. All of it compiled."""

from __future__ import annotations

from numba import types

from pario.format.layout import F_DUPDATA, F_SUBDATA, MDB_DUPFIXED, MDB_INTEGERKEY, NUM_METAS
from pario.kernels import nodes
from pario.kernels.jit import inner
from pario.lmdb import abi
from pario.lmdb.capi import WILLNEED, as_words, fadvise, intc, pages_of, scratch_memory
from pario.lmdb.pages import cached, copy_state, data_at, fail, moved, page_at

#: Leaves that a scan asks for ahead.
LEAVES_AHEAD = 64


@inner
def leaf_for(g, handle, key):  # type: ignore[no-untyped-def]
    """Where the leaf that `key` belongs to starts in the pool; -1: an error is noted."""
    pgno, depth, way = handle[abi.ROOT], handle[abi.DEPTH], handle[abi.WAY]
    for level in range(depth - 1):
        o = page_at(g, pgno, level, handle)
        if o < 0:
            return o
        pool = pages_of(g)
        pgno = nodes.child(pool, o, nodes.search_branch(pool, o, key, way, g), g)
    return page_at(g, pgno, depth - 1, handle)


@inner
def _down(g, tree, path, pgno, level, last):  # type: ignore[no-untyped-def]
    """From page `pgno` at `level` down to the first or last item below. path : i64[PATH_WORDS], filled in"""
    depth = tree[abi.DEPTH]
    while True:
        o = page_at(g, pgno, level, tree)
        if o < 0:
            return g[abi.ERROR]
        pool = pages_of(g)
        i = nodes.count(pool, o, g) - 1 if last else 0
        path[level], path[abi.LEVELS + level] = pgno, i
        if level >= depth - 1:
            return abi.OK
        pgno = nodes.child(pool, o, i, g)
        level += 1


@inner
def _down_to(g, tree, path, key):  # type: ignore[no-untyped-def]
    """To the first item >= key. Returns (status, whether it is equal); MISSING: all are less."""
    pgno, depth, way = tree[abi.ROOT], tree[abi.DEPTH], tree[abi.WAY]
    for level in range(depth):
        o = page_at(g, pgno, level, tree)
        if o < 0:
            return g[abi.ERROR], False
        pool = pages_of(g)
        path[level] = pgno
        if level < depth - 1:
            i = nodes.search_branch(pool, o, key, way, g)
            path[abi.LEVELS + level] = i
            pgno = nodes.child(pool, o, i, g)
            continue
        if tree[abi.INTEGER] and nodes.key_span(pool, o, 0, g)[1] != len(key):
            return abi.MISSING, False
        i, equal = nodes.search_leaf(pool, o, key, way, g)
        path[abi.LEVELS + level] = i
        if i == nodes.count(pool, o, g):
            path[abi.LEVELS + level] = i - 1
            return _turn(g, tree, path, 1, as_words(scratch_memory(), 0)), False
        return abi.OK, equal
    return abi.MISSING, False


@inner
def _turn(g, tree, path, step, ahead):  # type: ignore[no-untyped-def]
    """To the neighbouring leaf's nearest item; MISSING, and nothing changed, if there is none.

    ahead : i64[3] of a scanning cursor (C_SCAN, C_AHEAD_PAGE, C_AHEAD_I), else of length 0
    """
    lowest = tree[abi.DEPTH] - 2
    level = lowest
    while level >= 0:
        o = page_at(g, path[level], level, tree)
        if o < 0:
            return g[abi.ERROR]
        pool = pages_of(g)
        i = path[abi.LEVELS + level] + step
        n = nodes.count(pool, o, g)
        if 0 <= i < n:
            if len(ahead) and ahead[0] and level == lowest:
                _ask_ahead(g, pool, o, path[level], i, step, ahead)
            path[abi.LEVELS + level] = i
            return _down(g, tree, path, nodes.child(pool, o, i, g), level + 1, step < 0)
        level -= 1
    return abi.MISSING


@inner
def _ask_ahead(g, pool, o, pgno, i, step, ahead):  # type: ignore[no-untyped-def]
    """Have the kernel read the next leaves below this branch page: many at once, while we look at the first."""
    n = nodes.count(pool, o, g)
    if ahead[1] == pgno and (ahead[2] - i) * step > 0:
        return
    j = i
    asked = 0
    size = g[nodes.PAGE_SIZE]
    while 0 <= j < n and asked < LEAVES_AHEAD:
        below = nodes.child(pool, o, j, g)
        if cached(g, below) < 0:
            # Neighbouring pages are asked for by one call.
            first = last = below
            while 0 <= j + step < n and nodes.child(pool, o, j + step, g) == last + step and asked < LEAVES_AHEAD:
                last += step
                j += step
                asked += 1
            start, nbytes = min(first, last) * size, (abs(last - first) + 1) * size
            if g[abi.GATE] == 0 and copy_state(g, start, nbytes) == 0:
                fadvise(intc(g[abi.FD]), types.int64(start), types.int64(nbytes), intc(WILLNEED))
        asked += 1
        j += step
    ahead[1], ahead[2] = pgno, j


@inner
def enter(g, handle, c, last):  # type: ignore[no-untyped-def]
    """The cursor has come to another item: go to its first or last duplicate."""
    c[abi.C_DUPS] = 0
    pgno = c[abi.C_PATH + handle[abi.DEPTH] - 1]
    at = node_of(g, handle, c)
    if at < 0:
        return g[abi.ERROR]
    pool = pages_of(g)
    flags = nodes.u16(pool, at + 4, g[nodes.BIG])
    if not flags & F_DUPDATA:
        return abi.OK
    if not handle[abi.DUPSORT]:
        return fail(g, abi.DAMAGED, pgno, pgno * g[nodes.PAGE_SIZE], 0, 0, 0)
    data = data_at(pool, at, g)
    tree = dup_tree(c)
    tree[abi.WAY], tree[abi.INTEGER] = handle[abi.DUP_WAY], handle[abi.DUP_INTEGER]
    if not flags & F_SUBDATA:
        c[abi.C_DUPS], c[abi.C_DUP_ENTRIES] = 1, nodes.count(pool, data, g)
        tree[abi.ROOT], tree[abi.DEPTH], tree[abi.RULES] = -1 - pgno, 1, handle[abi.RULES]
        tree[abi.SUB_OF] = c[abi.C_PATH + abi.LEVELS + handle[abi.DEPTH] - 1]
        c[abi.C_DUP_PATH], c[abi.C_DUP_PATH + abi.LEVELS] = tree[abi.ROOT], c[abi.C_DUP_ENTRIES] - 1 if last else 0
        return abi.OK
    wide = g[nodes.WORD]
    tree_flags = nodes.u16(pool, data + 4, g[nodes.BIG])
    depth = nodes.u16(pool, data + 6, g[nodes.BIG])
    entries, root = nodes.word(pool, data + 8 + 3 * wide, g), nodes.word(pool, data + 8 + 4 * wide, g)
    sound = tree_flags == 0 or tree_flags == MDB_DUPFIXED or tree_flags == MDB_DUPFIXED | MDB_INTEGERKEY
    sound = sound and 1 <= depth <= abi.LEVELS and entries >= 1 and NUM_METAS <= root <= g[nodes.LAST_PGNO]
    pad = nodes.u32(pool, data, g[nodes.BIG]) if tree_flags & MDB_DUPFIXED else 0
    if not sound or (tree_flags & MDB_DUPFIXED and pad == 0):
        return fail(g, abi.DAMAGED, pgno, pgno * g[nodes.PAGE_SIZE], 0, 0, 0)
    c[abi.C_DUPS], c[abi.C_DUP_ENTRIES] = 1, entries
    tree[abi.ROOT], tree[abi.DEPTH], tree[abi.PAD], tree[abi.RULES] = root, depth, pad, handle[abi.DUP_RULES]
    return _down(g, tree, dup_path(c), root, 0, last)


@inner
def dup_tree(c):  # type: ignore[no-untyped-def]
    return c[abi.C_DUP_TREE : abi.C_DUP_TREE + abi.TREE_WORDS]


@inner
def dup_path(c):  # type: ignore[no-untyped-def]
    return c[abi.C_DUP_PATH : abi.C_DUP_PATH + abi.PATH_WORDS]


@inner
def node_of(g, handle, c):  # type: ignore[no-untyped-def]
    """Where the node of the cursor's key starts in the pool; -1: an error is noted."""
    level = handle[abi.DEPTH] - 1
    o = page_at(g, c[abi.C_PATH + level], level, handle)
    if o < 0:
        return o
    pool = pages_of(g)
    i = c[abi.C_PATH + abi.LEVELS + level]
    if not 0 <= i < nodes.count(pool, o, g):
        return moved(g)
    return nodes.node_at(pool, o, i, g)


@inner
def _step_in(g, tree, path, step, ahead):  # type: ignore[no-untyped-def]
    """To the neighbouring item of a tree; MISSING, and nothing changed, if there is none. ahead : see `_turn`"""
    level = tree[abi.DEPTH] - 1
    o = page_at(g, path[level], level, tree)
    if o < 0:
        return g[abi.ERROR]
    i = path[abi.LEVELS + level] + step
    if 0 <= i < nodes.count(pages_of(g), o, g):
        path[abi.LEVELS + level] = i
        return abi.OK
    return _turn(g, tree, path, step, ahead)


@inner
def _find_dup(g, handle, c, value, exact):  # type: ignore[no-untyped-def]
    """To the duplicate `value`, or (not exact) to the first that is >= it."""
    way, integer = handle[abi.DUP_WAY], handle[abi.DUP_INTEGER]
    if not c[abi.C_DUPS]:
        at = node_of(g, handle, c)
        if at < 0:
            return g[abi.ERROR]
        pool = pages_of(g)
        nbytes = nodes.u32(pool, at, g[nodes.BIG])
        if nodes.u16(pool, at + 4, g[nodes.BIG]) != 0:
            # A value of a DUPSORT database is short: it has no pages of its own, and is no database.
            pgno = c[abi.C_PATH + handle[abi.DEPTH] - 1]
            return fail(g, abi.DAMAGED, pgno, pgno * g[nodes.PAGE_SIZE], 0, 0, 0)
        if integer and nbytes != len(value):
            return abi.MISSING
        order = nodes.compare(pool, data_at(pool, at, g), nbytes, value, 0, len(value), way)
        return abi.OK if order == 0 or (order > 0 and not exact) else abi.MISSING
    if len(value) == 0:
        return fail(g, abi.EMPTY_KEY, 0, 0, 0, 0, 0)
    status, equal = _down_to(g, dup_tree(c), dup_path(c), value)
    return abi.MISSING if status == abi.OK and exact and not equal else status


@inner
def go(g, handle, c, op):  # type: ignore[no-untyped-def]
    """One of the moves without a key. The rules are LMDB's."""
    if op in (abi.FIRST_DUP, abi.LAST_DUP):
        if not c[abi.C_SET]:
            return fail(g, abi.UNPOSITIONED, 0, 0, 0, 0, 0)
        if not handle[abi.DUPSORT]:
            return fail(g, abi.INCOMPATIBLE, 0, 0, 0, 0, 0)
        c[abi.C_END] = 0
        if not c[abi.C_DUPS]:
            return abi.OK
        return _down(g, dup_tree(c), dup_path(c), dup_tree(c)[abi.ROOT], 0, op == abi.LAST_DUP)
    step = 1 if op in (abi.NEXT, abi.NEXT_DUP, abi.NEXT_NODUP, abi.FIRST) else -1
    if op in (abi.FIRST, abi.LAST) or not c[abi.C_SET]:
        c[abi.C_SET] = c[abi.C_END] = 0
        if handle[abi.ROOT] < 0:
            return abi.MISSING
        if c[abi.C_SCAN] and handle[abi.DEPTH] > 1:
            c[abi.C_AHEAD_PAGE] = 0
        status = _down(g, handle, c[abi.C_PATH : abi.C_DUP_PATH], handle[abi.ROOT], 0, step < 0)
        if status == abi.OK:
            status = enter(g, handle, c, step < 0)
        c[abi.C_SET] = status == abi.OK
        return status
    if c[abi.C_END] and step > 0:
        return abi.MISSING
    if handle[abi.DUPSORT] and op != abi.NEXT_NODUP and op != abi.PREV_NODUP:
        only_dup = op in (abi.NEXT_DUP, abi.PREV_DUP)
        if c[abi.C_DUPS]:
            status = _step_in(g, dup_tree(c), dup_path(c), step, c[0:0])
            if status == abi.OK:
                c[abi.C_END] = 0
            if only_dup or status != abi.MISSING:
                return status
        elif only_dup:
            return abi.MISSING
    if step < 0:
        c[abi.C_END] = 0
    status = _step_in(g, handle, c[abi.C_PATH : abi.C_DUP_PATH], step, c[abi.C_SCAN : abi.C_SCAN + 3])
    if status == abi.OK:
        return enter(g, handle, c, step < 0)
    if status == abi.MISSING and step > 0:
        c[abi.C_END] = 1
    return status


@inner
def seek(g, handle, c, op, key, value):  # type: ignore[no-untyped-def]
    """One of the moves to a key. A miss leaves the cursor nowhere."""
    with_value = op in (abi.SET_KEY_DUP, abi.SET_RANGE_DUP)
    if with_value and not handle[abi.DUPSORT]:
        return fail(g, abi.INCOMPATIBLE, 0, 0, 0, 0, 0)
    if len(key) == 0:
        return fail(g, abi.EMPTY_KEY, 0, 0, 0, 0, 0)
    c[abi.C_SET] = c[abi.C_END] = 0
    c[abi.C_AHEAD_PAGE] = 0
    if handle[abi.ROOT] < 0:
        return abi.MISSING
    status, equal = _down_to(g, handle, c[abi.C_PATH : abi.C_DUP_PATH], key)
    if status == abi.OK and not equal and op != abi.SET_RANGE:
        status = abi.MISSING
    if status == abi.OK:
        status = enter(g, handle, c, False)
    if status == abi.OK and with_value:
        status = _find_dup(g, handle, c, value, op == abi.SET_KEY_DUP)
    c[abi.C_SET] = status == abi.OK
    return status
