"""The names that a packed folder or tar has: besides its records links, empty folders, modes and times.

They are kept sorted, about 120 bytes each, so that a look-up is a search in memory, and a listing a walk over it.
"""

from __future__ import annotations

import stat
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from errno import ELOOP, ENOENT
from os import strerror

import numpy as np

from pario.codec.listing import Row

#: Symbolic links in a path, as the kernel counts them.
_LINKS = 40
#: The byte that follows / in the order of paths.
_AFTER_SLASH = b"0"


class Listed:
    """Names by their numbers, in the order of their paths. Any thread.

    paths : below the folder; modes : st_mode; times : i64, ns, UNKNOWN_TIME of a folder that nobody named
    targets : of symbolic links; firsts : the number of the name that a further one is the same file as
    links : names of a file, where there are several, by the number of the first
    """

    def __init__(self, rows: Sequence[Row], sizes: np.ndarray) -> None:
        """rows : in the order of their paths; sizes : i64, of the records, in the order of their keys"""
        self.paths = [row.path for row in rows]
        self.modes = np.fromiter((row.mode for row in rows), np.uint16, len(rows))
        self.times = np.fromiter((row.mtime_ns for row in rows), np.int64, len(rows))
        self.targets = {i: row.target or b"" for i, row in enumerate(rows) if stat.S_ISLNK(row.mode)}
        further = ((i, row.target) for i, row in enumerate(rows) if row.is_record and row.target is not None)
        self.firsts = {i: self.at(target) for i, target in further}
        self.links = {first: 1 + more for first, more in Counter(self.firsts.values()).items()}
        self._keys = {i: row.key for i, row in enumerate(rows) if row.is_record and row.key != row.path}
        files = sorted((i for i, row in enumerate(rows) if row.is_record), key=self.key)
        self.sizes = np.zeros(len(rows), np.int64)
        self.sizes[files] = sizes

    def at(self, path: bytes) -> int:
        """The number of a path, -1 if there is none."""
        i = bisect_left(self.paths, path)
        return i if i < len(self.paths) and self.paths[i] == path else -1

    def path(self, i: int) -> str:
        return self.paths[i].decode("utf-8", "surrogateescape")

    def followed(self, path: str, last: bool, at: str) -> str:
        """See `Tree.followed`."""
        left, done, count = path.split("/")[::-1], list[str](), 0
        while left:
            name = left.pop()
            if name == ".." and not done:
                raise FileNotFoundError(ENOENT, "a link leads out of the tree", path)
            if name in ("", ".", ".."):
                del done[len(done) - (name == "..") :]
                continue
            done.append(name)
            here = "/".join(done).encode("utf-8", "surrogateescape")
            target = self.targets.get(self.at(here)) if left or last else None
            if target is None:
                continue
            count += 1
            if count > _LINKS:
                raise OSError(ELOOP, strerror(ELOOP), path)
            text = target.decode("utf-8", "surrogateescape")
            done.pop()
            if text.startswith("/"):
                if not at or not (text + "/").startswith(at + "/"):
                    raise FileNotFoundError(ENOENT, "a link leads out of the tree", path)
                text, done = text[len(at) :], []
            left += text.split("/")[::-1]
        return "/".join(done)

    def key(self, i: int) -> bytes:
        """Of the record."""
        return self._keys.get(i) or self.paths[i]

    def below(self, folder: bytes, begin: int = 0) -> Iterator[tuple[bytes, int]]:
        """Name and number of what lies directly in a folder, from a number on. folder : its path and a slash"""
        paths, skip = self.paths, len(folder)
        i = max(begin, bisect_left(paths, folder) + (not folder))
        while i < len(paths) and (path := paths[i]).startswith(folder):
            slash = path.find(b"/", skip)
            if slash < 0:
                yield path[skip:], i
                i += 1
            else:
                i = bisect_left(paths, path[:slash] + _AFTER_SLASH, i)
