"""Folders in the keys of a database: what lies directly in one, whether there is one, and what records are called."""

from __future__ import annotations

from collections.abc import Iterator

from pario.files import names
from pario.files.database import Database
from pario.files.keys import Leaf
from pario.format.layout import F_BIGDATA, F_SUBDATA
from pario.format.tree import check_ascending

#: The byte that follows / in the order of keys.
_AFTER_SLASH = b"0"
#: Components behind shortened names, which a look-up would have to search for.
_KNOWN = 1 << 16
#: The same extension, spelt otherwise.
_SPELT = {".jpg": (".jpg", ".jpeg"), ".tif": (".tif", ".tiff"), ".h5": (".h5", ".hdf5")}


def parts_of(db: Database, prefix: bytes, start: bytes = b"") -> Iterator[tuple[Leaf, int, bool, bytes]]:
    """(leaf, item, is a folder, component) of what lies in a folder, from the component `start` on; of a folder
    the item is its first record."""
    keys, skip = db.keys, len(prefix)
    path = keys.path_to(keys.order(prefix + start)) if prefix + start else keys.first()
    hidden = db.packed.key if db.packed is not None else None
    before: bytes | None = None
    while path:
        leaf, i = path[-1]
        if before is not None:
            check_ascending(keys.order, before, leaf.key(i), leaf)
        for item in range(i, len(leaf.keys)):
            key = leaf.key(item)
            if not key.startswith(prefix):
                return
            before = key
            flags = leaf.node(item).flags
            if flags == F_SUBDATA:
                key = db.clean(key)
            elif flags & ~F_BIGDATA:
                raise leaf.fault(f"item {item} has several values in a database without duplicates")
            slash = -1 if db.flat else key.find(b"/", skip)
            if slash >= 0:
                yield leaf, item, True, key[skip:slash]
                before = key[:slash] + b"/"
                path = keys.path_to(key[:slash] + _AFTER_SLASH)
                break
            if key != hidden:
                yield leaf, item, False, key[skip:]
        else:
            path = keys.next([*path[:-1], (leaf, len(leaf.keys) - 1)])


def is_taken(db: Database, key: bytes) -> bool:
    """Whether anything would have the name of this key: with an extension, no other record must get it."""
    if db.flat:
        return not db.integers and db.keys.find(db.keys.order(key)) is not None
    return db.keys.find(key) is not None or _is_above(db, key)


def is_folder(db: Database, key: bytes, leaf: Leaf, i: int) -> bool:
    """Whether the key of a record, item i of a leaf, is also the path of a folder."""
    # Nearly always the next key has another beginning.
    if i + 1 < len(leaf.keys) and not leaf.keys[i + 1].startswith(key):
        return False
    return _is_above(db, key)


def _is_above(db: Database, key: bytes) -> bool:
    return has_prefix(db, key + b"/") or db.named(key) is not None


def has_prefix(db: Database, prefix: bytes) -> bool:
    path = db.keys.path_to(prefix)
    return bool(path) and path[-1][0].keys[path[-1][1]].startswith(prefix)


class Namer:
    """What records are called by the rules of names.py, with extensions or without, and which component of a key has a
    name. Any thread.

    longest : bytes of a name, without its extension
    """

    def __init__(self, extensions: bool) -> None:
        self.extensions = extensions
        self.longest = names.LONGEST - (names.LONGEST_EXTENSION if extensions else 0)
        self._known: dict[tuple[int, bytes, str], bytes] = {}

    def component(self, db: Database, prefix: bytes, name: str, mark: str = "") -> bytes | None:
        """The part of a key that has this name with this mark; its records need not exist."""
        if db.integers:
            width = len(db.keys.first()[-1][0].key(0)) if db.keys.db.md_entries else 0
            try:
                number = int(name) if len(name) <= 20 else -1
                key = number.to_bytes(width, db.byteorder)
            except (ValueError, OverflowError):
                return None
            return key if str(number) == name else None
        part = names.part_of(name, flat=db.flat, longest=self.longest)
        if part is None or part.mark != mark:
            return None
        if not part.digest:
            return part.start
        whole = self._known.get((id(db), prefix, part.digest)) or self._search(db, prefix, part.start, part.digest)
        if whole is None or names.name_of(whole, mark, flat=db.flat, longest=self.longest) != name:
            return None
        return whole

    def _search(self, db: Database, prefix: bytes, start: bytes, digest: str) -> bytes | None:
        """The component that begins so and has this digest: looks at all that begin so."""
        for _, _, _, part in parts_of(db, prefix, b"" if db.flat else start):
            if not part.startswith(start):
                if db.flat:
                    continue
                break
            if names.digest_of(part) == digest:
                self.remember(db, prefix, part)
                return part
        return None

    def record_name(self, db: Database, prefix: bytes, part: bytes, leaf: Leaf, i: int) -> str:
        """The name of a record in its folder."""
        if db.integers:
            name = str(leaf.keys[i])
        else:
            mark = names.RECORD_MARK if not db.flat and is_folder(db, prefix + part, leaf, i) else ""
            name = names.name_of(part, mark, flat=db.flat, longest=self.longest)
        if self.extensions:
            extension = names.extension_of(db.read_part(leaf.node(i), 0, names.HEAD_BYTES))
            taken = name.lower().endswith(_SPELT.get(extension, extension))
            if extension and not taken and not is_taken(db, prefix + part + extension.encode()):
                name += extension
        return name

    def remember(self, db: Database, prefix: bytes, part: bytes) -> None:
        known = self._known
        if len(known) >= _KNOWN:
            known.clear()
        known[id(db), prefix, names.digest_of(part)] = part
