"""A name becomes an open file, or several: which fetcher, which path."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from glob import escape, glob, has_magic
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TypeVar

from pario.errors import FileError, MissingError, OptionError
from pario.fetch.base import OneFile
from pario.fetch.direct import DirectFetcher
from pario.fetch.file import FileFetcher
from pario.fetch.mapped import MappedFetcher
from pario.fetch.posix import PosixFetcher

#: name -> class: those of `pario.options.Fetch`.
FETCHERS: dict[str, type[FileFetcher]] = {"posix": PosixFetcher, "direct": DirectFetcher, "mapped": MappedFetcher}

F = TypeVar("F", bound=OneFile)

#: What users name: one path, or several in a list or a tuple. Each may be a pattern, or a folder of LMDBs.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

#: a number in the name of a file, as C prints it: data.%04d.lmdb
_NUMBER = re.compile(r"%(0?\d*)d")
#: a range of numbers in it, as the shell writes it: shard-{000..099}.tar
_RANGE = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")
#: A range of more files is a slip of the pen.
_MOST_FILES = 1 << 20
#: In a folder, these are LMDBs; what a pattern finds is one unless it ends like this.
_LMDB_NAMES = (".lmdb", ".mdb")
_OTHER_NAMES = ("-lock", "lock.mdb", ".pario.index", ".pario.sums")


def as_paths(given: Paths) -> tuple[str, ...]:
    """The paths that a user names. Raises OptionError, TypeError."""
    if not isinstance(given, (list, tuple)):
        return (os.fsdecode(given),)  # type: ignore[arg-type]
    paths = tuple(os.fsdecode(path) for path in given)
    if not paths:
        raise OptionError("the list of paths is empty", hint="Name at least one LMDB.")
    return paths


def open_datasets(given: Sequence[str], fetcher: Callable[[str], F]) -> list[list[F]]:
    """Open all data files that each of these paths means: that of an LMDB (see `open_dataset`), those that a pattern
    finds, or all LMDBs of a folder that is none itself.

    A name with `%d` or `%04d` stands for files with numbers in their place, in the order of the numbers, one of which
    must not be missing; `{000..099}` for all these numbers; `*`, `?` and `[...]` for what the shell would find, in the
    order of the names. A path that exists is that path.

    Raises FileError, MissingError among them, and OptionError if a file is named twice. Then none is open.
    """
    opened: list[list[F]] = []
    try:
        for path in given:
            opened.append([])
            for one in _expanded(path):
                try:
                    opened[-1].append(open_dataset(one, fetcher))
                except MissingError:
                    members = _members(one)
                    if not members:
                        raise
                    for member in members:
                        opened[-1].append(open_dataset(member, fetcher))
        _check_distinct([file for files in opened for file in files])
    except BaseException:
        for files in opened:
            for file in files:
                file.close()
        raise
    return opened


def _expanded(path: str) -> list[str]:
    """The paths that a pattern finds; `path` itself if it is none. Raises MissingError."""
    path = os.path.expanduser(path)
    folder, name = os.path.split(path)
    if (span := _RANGE.search(path)) and not os.path.lexists(path):
        first, last = map(int, span.groups())
        if not 0 <= last - first < _MOST_FILES:
            what = f"{span[0]} stands for {max(0, last - first + 1):,} files"
            raise MissingError(what, path=path, hint=f"The lower number first, and at most {_MOST_FILES:,} files.")
        each = (f"{number:0{len(span[1])}d}" for number in range(first, last + 1))
        return [one for number in each for one in _expanded(path[: span.start()] + number + path[span.end() :])]
    numbers = _NUMBER.findall(name)
    if not (numbers or has_magic(path)) or os.path.lexists(path):
        return [path]
    if len(numbers) == 1:
        return _numbered(path, folder, name)
    found = sorted(one for one in glob(path) if not one.endswith(_OTHER_NAMES))
    if not found:
        raise MissingError("no file has a name like this", path=path, hint=f"In {folder or '.'} look at the names.")
    return found


def _numbered(path: str, folder: str, name: str) -> list[str]:
    before, width, after = _NUMBER.split(name)
    pattern = re.compile(re.escape(before) + r"(\d+)" + re.escape(after))
    found: dict[int, str] = {}
    for one in glob(os.path.join(folder, escape(before) + "*" + escape(after))):
        match = pattern.fullmatch(os.path.basename(one))
        # As C would have printed it: 0007 is not %d.
        if match is not None and match[1] == f"%{width}d" % int(match[1]):
            found[int(match[1])] = one
    if not found:
        raise MissingError("no file has a name like this", path=path, hint=f"In {folder or '.'} look at the names.")
    for number in range(min(found), max(found)):
        if number not in found:
            raise MissingError(
                f"one of the files {min(found)} to {max(found)} is missing",
                path=os.path.join(folder, before + f"%{width}d" % number + after),
                hint="Bring it back, or name the files in a list.",
            )
    return [found[number] for number in sorted(found)]


def _members(folder: str) -> list[str]:
    """The LMDBs in a folder that is none itself, by name: files that are called so, and folders with a data.mdb."""
    try:
        with os.scandir(folder) as entries:
            found = [
                entry.path
                for entry in entries
                if (
                    os.path.exists(os.path.join(entry.path, "data.mdb"))
                    if entry.is_dir()
                    else entry.name.endswith(_LMDB_NAMES) and not entry.name.endswith(_OTHER_NAMES)
                )
            ]
    except OSError:
        return []
    return sorted(found)


def _check_distinct(files: Sequence[OneFile]) -> None:
    """Raises OptionError if two of them are the same file."""
    seen: dict[tuple[int, int], str] = {}
    for file in files:
        status = file.status()
        which = status.st_dev, status.st_ino
        if which in seen:
            raise OptionError(
                f"a file is named twice, as {seen[which]} and as {file.path}", hint="An epoch has each record once."
            )
        seen[which] = file.path


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
            line = shlex.join(["python", "-m", "pario", "data", "pack", str(given), f"{given}.lmdb"])
            hint = f"Is this an LMDB? If its files are the records, make a dataset of them: {line}"
            raise MissingError(f"the directory has no data.mdb; {found}", path=str(given), hint=hint)
        return str(file)
    if not S_ISREG(mode):
        raise MissingError("not a regular file", path=str(given))
    return str(given)
