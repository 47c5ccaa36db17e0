"""What the records of a database are called in their folders, and which component of a key has a name."""

from __future__ import annotations

from pario.files.database import Database
from pario.files.folders import is_folder, is_taken, parts_of
from pario.files.keys import Leaf
from pario.files.kinds import HEAD_BYTES, LONGEST_EXTENSION, extension_of
from pario.files.names import LONGEST, RECORD_MARK, digest_of, name_of, part_of

__all__ = ["Namer"]

#: Components behind shortened names, which a look-up would have to search for.
_KNOWN = 1 << 16
#: The same extension, spelt otherwise.
_SPELT = {".jpg": (".jpg", ".jpeg"), ".tif": (".tif", ".tiff"), ".h5": (".h5", ".hdf5")}


class Namer:
    """Names by the rules of names.py, with extensions or without. Any thread.

    longest : bytes of a name, without its extension
    """

    def __init__(self, extensions: bool) -> None:
        self.extensions = extensions
        self.longest = LONGEST - (LONGEST_EXTENSION if extensions else 0)
        self._known: dict[tuple[int, bytes, str], bytes] = {}

    def component(self, db: Database, prefix: bytes, name: str, mark: str = "") -> bytes | None:
        """The part of a key that has this name with this mark; its records need not exist."""
        if db.integers:
            width = len(db.keys.first()[-1][0].key(0)) if db.keys.tree.db.md_entries else 0
            try:
                number = int(name) if len(name) <= 20 else -1
                key = number.to_bytes(width, db.byteorder)
            except (ValueError, OverflowError):
                return None
            return key if str(number) == name else None
        part = part_of(name, flat=db.flat, longest=self.longest)
        if part is None or part.mark != mark:
            return None
        if not part.digest:
            return part.start
        whole = self._known.get((id(db), prefix, part.digest)) or self._search(db, prefix, part.start, part.digest)
        if whole is None or name_of(whole, mark, flat=db.flat, longest=self.longest) != name:
            return None
        return whole

    def _search(self, db: Database, prefix: bytes, start: bytes, digest: str) -> bytes | None:
        """The component that begins so and has this digest: looks at all that begin so."""
        for _, _, _, part in parts_of(db, prefix, b"" if db.flat else start):
            if not part.startswith(start):
                if db.flat:
                    continue
                break
            if digest_of(part) == digest:
                self.remember(db, prefix, part)
                return part
        return None

    def record_name(self, db: Database, prefix: bytes, part: bytes, leaf: Leaf, i: int) -> str:
        """The name of a record in its folder."""
        if db.integers:
            name = str(leaf.keys[i])
        else:
            mark = RECORD_MARK if not db.flat and is_folder(db, prefix + part, leaf, i) else ""
            name = name_of(part, mark, flat=db.flat, longest=self.longest)
        if self.extensions:
            extension = extension_of(db.head(leaf.node(i), HEAD_BYTES))
            taken = name.lower().endswith(_SPELT.get(extension, extension))
            if extension and not taken and not is_taken(db, prefix + part + extension.encode()):
                name += extension
        return name

    def remember(self, db: Database, prefix: bytes, part: bytes) -> None:
        known = self._known
        if len(known) >= _KNOWN:
            known.clear()
        known[id(db), prefix, digest_of(part)] = part
