"""Which paths lie in a view: prefixes, and the arithmetic of paths below them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pario.errors import OptionError


class Spot(NamedTuple):
    """A path in a view.

    root : number of the prefix; path : below it, "" for the prefix itself
    folder : the path ends with a slash, so only a folder will do
    """

    root: int
    path: str
    folder: bool = False


class Escaped(NamedTuple):
    """A path that begins in a view, or goes through it, and leads out of it, made absolute.

    named : the program wrote the view's folder; for that the kernel goes the same way, or finds nothing. Otherwise it
        would start from a folder that stands for one of the view, and go astray
    """

    path: bytes
    named: bool = True


def decoded(path: bytes) -> str:
    """As the names of the tree are, whatever the encoding of this process's files."""
    return path.decode("utf-8", "surrogateescape")


def encoded(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def has_dots(path: bytes) -> bool:
    """Whether there is more in a path than names with one slash between them."""
    return b"//" in path or (
        b"/." in path and (b"/./" in path or b"/../" in path or path.endswith((b"/.", b"/..")))
    )


class Prefixes:
    """The folders under which the records of a view appear.

    prefixes : absolute paths, as users name them; none lies in another
    is_folder : tells whether there is a folder at a Spot
    followed : the Spot without the symbolic links of the view
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        is_folder: Callable[[Spot], bool],
        followed: Callable[[Spot], Spot] = lambda spot: spot,
    ) -> None:
        self._shown = [os.fsencode(each) for each in prefixes]
        real = [os.fsencode(real_prefix(each)) for each in prefixes]
        self._names = [(name, k) for k, pair in enumerate(zip(self._shown, real, strict=True)) for name in {*pair}]
        #: what every absolute path into the view begins with, if it has no "." in its way
        self.heads = tuple(name for name, _ in self._names)
        self._tails = {os.path.basename(name) for name in self.heads}
        self._is_folder, self._followed = is_folder, followed

    def clean(self, path: bytes) -> Spot | None:
        """Where an absolute path without "//", "/./" and "/../" lies."""
        for prefix, k in self._names:
            if path.startswith(prefix):
                rest = path[len(prefix) :]
                if not rest:
                    return Spot(k, "")
                if rest[0] == 47:
                    return Spot(k, decoded(rest.strip(b"/")), rest[-1] == 47)
        return None

    def absolute(self, path: bytes) -> Spot | Escaped | None:
        """Where any absolute path lies; None: outside. Raises FileNotFoundError and NotADirectoryError for `x/..` in
        the view where x is no folder."""
        # No other way leads in than by a folder's own name: the kernel follows symbolic links, and finds nothing there.
        if not any(tail in path for tail in self._tails):
            return None
        whole, through = self._without_dots(path)
        found = self.clean(whole)
        if found is not None:
            return found._replace(folder=True) if path.endswith((b"/", b"/.", b"/..")) else found
        return Escaped(whole + (b"/" if path.endswith(b"/") else b"")) if through else None

    def relative(self, spot: Spot, path: bytes) -> Spot | Escaped:
        """Where a path lies that begins in a folder of the view."""
        found = self.absolute(self.full(spot) + b"/" + path)
        assert found is not None
        return found if isinstance(found, Spot) else found._replace(named=False)

    def full(self, spot: Spot) -> bytes:
        """The path that a program knows it by."""
        return self._shown[spot.root] + (b"/" + encoded(spot.path) if spot.path else b"")

    def _without_dots(self, path: bytes) -> tuple[bytes, bool]:
        """The path, and whether its way went through the view."""
        done: list[bytes] = []
        through = False
        for part in path.split(b"/"):
            if part in (b"", b"."):
                continue
            if part != b"..":
                done.append(part)
                continue
            here = b"/" + b"/".join(done)
            spot = self.clean(here)
            if spot is not None:
                followed = self._followed(spot)
                if followed != spot:
                    spot, done = followed, self.full(followed).split(b"/")[1:]
            if spot is None:  # the kernel follows symbolic links before it goes up
                done = os.path.realpath(here).split(b"/")[1:]
            elif self._is_folder(spot):
                through = True
            else:
                raise NotADirectoryError
            done = done[:-1]
        return b"/" + b"/".join(done), through


def real_prefix(prefix: str) -> str:
    """The same without symbolic links."""
    above, name = os.path.split(prefix)
    return os.path.join(os.path.realpath(above), name)


def checked_prefix(prefix: str) -> str:
    """The prefix in its shortest form. Raises OptionError unless its folder exists, and it does not, or is an empty
    folder."""
    shown = os.path.abspath(prefix)
    where = real_prefix(shown)
    way = "Name a folder that does not exist yet, below one that does."
    devices = (where + "/").startswith(("/proc/", "/dev/", "/sys/")) and not where.startswith("/dev/shm/")
    if where == "/" or devices:
        raise OptionError(f"a view cannot be at {prefix!r}", hint=way)
    if not os.path.isdir(os.path.dirname(where)):
        raise OptionError(f"there is no folder {os.path.dirname(where)!r} in which {prefix!r} could appear", hint=way)
    if os.path.lexists(where) and (os.path.islink(where) or not os.path.isdir(where) or os.listdir(where)):
        raise OptionError(f"{prefix!r} exists and is no empty folder: a view would hide what is there", hint=way)
    return shown
