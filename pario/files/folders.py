"""Folders in the keys of a database: what lies directly in one, and whether there is one."""

from __future__ import annotations

from collections.abc import Iterator

from pario.files.database import Database
from pario.files.keys import Leaf
from pario.format.layout import F_BIGDATA, F_SUBDATA
from pario.format.tree import check_ascending

__all__ = ["has_prefix", "is_folder", "is_taken", "parts_of"]

#: The byte that follows / in the order of keys.
_AFTER_SLASH = b"0"


def parts_of(db: Database, prefix: bytes, start: bytes = b"") -> Iterator[tuple[Leaf, int, bool, bytes]]:
    """(leaf, item, is a folder, component) of what lies in a folder, from the component `start` on; of a folder
    the item is its first record."""
    keys, skip = db.keys, len(prefix)
    path = keys.seek(keys.tree.order(prefix + start)) if prefix + start else keys.first()
    hidden = db.packed.key if db.packed is not None else None
    before: bytes | None = None
    while path:
        leaf, i = path[-1]
        if before is not None:
            check_ascending(keys.tree.order, before, leaf.key(i), leaf.page)
        for item in range(i, len(leaf.keys)):
            key = leaf.key(item)
            if not key.startswith(prefix):
                return
            before = key
            flags = leaf.page.node(item).flags
            if flags == F_SUBDATA:
                key = db.clean(key)
            elif flags & ~F_BIGDATA:
                raise leaf.page.fault(f"item {item} has several values in a database without duplicates")
            slash = -1 if db.flat else key.find(b"/", skip)
            if slash >= 0:
                yield leaf, item, True, key[skip:slash]
                before = key[:slash] + b"/"
                path = keys.seek(key[:slash] + _AFTER_SLASH)
                break
            if key != hidden:
                yield leaf, item, False, key[skip:]
        else:
            path = keys.next([*path[:-1], (leaf, len(leaf.keys) - 1)])


def is_taken(db: Database, key: bytes) -> bool:
    """Whether anything would have the name of this key: with an extension, no other record must get it."""
    if db.flat:
        order = db.keys.tree.order
        path = [] if db.integers else db.keys.seek(order(key))
        return bool(path) and path[-1][0].keys[path[-1][1]] == order(key)
    path = db.keys.seek(key)
    return bool(path) and (path[-1][0].keys[path[-1][1]] == key or _is_above(db, key))


def is_folder(db: Database, key: bytes, leaf: Leaf, i: int) -> bool:
    """Whether the key of a record, item i of a leaf, is also the path of a folder."""
    # Nearly always the next key has another beginning.
    if i + 1 < len(leaf.keys) and not leaf.keys[i + 1].startswith(key):
        return False
    return _is_above(db, key)


def _is_above(db: Database, key: bytes) -> bool:
    return has_prefix(db, key + b"/") or db.named(key) is not None


def has_prefix(db: Database, prefix: bytes) -> bool:
    path = db.keys.seek(prefix)
    return bool(path) and path[-1][0].keys[path[-1][1]].startswith(prefix)
