"""A name becomes an open file: which fetcher, which path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TypeVar

from pario.errors import FileError, MissingError
from pario.fetch.base import Fetcher
from pario.fetch.direct import DirectFetcher
from pario.fetch.file import FileFetcher
from pario.fetch.mapped import MappedFetcher
from pario.fetch.posix import PosixFetcher

__all__ = ["FETCHERS", "open_dataset", "resolve"]

#: name -> class: those of `pario.options.FETCHERS`, and one that only recipes use.
#: "auto" reads through the page cache: a set that fits into memory is read from the storage once. A cold file costs
#: nothing by it on a store of 200 MB/s; for fast disks of the node see past_cache.py.
FETCHERS: dict[str, type[FileFetcher]] = {
    "auto": PosixFetcher,
    "posix": PosixFetcher,
    "direct": DirectFetcher,
    "mapped": MappedFetcher,
}

F = TypeVar("F", bound=Fetcher)


def open_dataset(path: str | os.PathLike[str], fetcher: Callable[[str], F]) -> F:
    """Open the data file of an LMDB environment (see `resolve`). Raises FileError, MissingError among them.

    With one open and no stat where `path` is a directory that holds data.mdb: on a parallel file system each of them
    goes to the metadata server, which all ranks share.
    """
    try:
        return fetcher(os.path.join(os.path.expanduser(os.fspath(path)), "data.mdb"))
    except FileError as e:
        if not isinstance(e.__cause__, (NotADirectoryError, FileNotFoundError)):
            raise
    return fetcher(resolve(path))


def resolve(path: str | os.PathLike[str]) -> str:
    """The data file of an LMDB environment: `path` itself, or `data.mdb` in it when it is a directory."""
    given = Path(os.path.expanduser(os.fspath(path)))  # pathlib's own raises RuntimeError for a user without a home
    try:
        mode = given.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        parent = given.parent
        hint = (
            "Check the spelling and the mount on this node." if parent.is_dir() else f"{parent} does not exist either."
        )
        raise MissingError("no such file or directory", path=str(given), hint=hint) from None
    except OSError as e:
        raise FileError(f"cannot look at it: {e.strerror}", path=str(given), hint="Check owner and mode.") from e
    if S_ISDIR(mode):
        file = given / "data.mdb"
        if not file.exists():
            names = sorted(p.name for p in given.iterdir())[:5]
            found = f"it holds {', '.join(names)}" if names else "it is empty"
            raise MissingError(f"the directory has no data.mdb; {found}", path=str(given), hint="Is this an LMDB?")
        return str(file)
    if not S_ISREG(mode):
        raise MissingError("not a regular file", path=str(given))
    return str(given)
