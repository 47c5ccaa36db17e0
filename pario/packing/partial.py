"""The folder DST.part, in which a dataset is made until it is complete: whose it is, what it was begun for, how its
content gets its final name.

It belongs to one user, who alone may look into it. `state.json` says what was packed and how; the LMDB beside it says
by its number of entries how far that went. Both must fit, else the work starts anew.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pario.errors import FileError, OptionError
from pario.machine import sync_path
from pario.text import read_json

_STATE = "state.json"
#: what a file system says that cannot rename without replacing, by a second name
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}


class Target:
    """Where the result goes. Local.

    path : as given by the user
    in_folder : the data file is to be data.mdb in a folder
    force : an LMDB that exists is replaced, when the new one is complete
    """

    def __init__(self, path: str, *, in_folder: bool = False, force: bool = False) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self.in_folder = in_folder or os.path.isdir(self.path)
        self.force = force

    @property
    def file(self) -> str:
        """The data file of an LMDB."""
        return os.path.join(self.path, "data.mdb") if self.in_folder else self.path

    def check(self, sources: list[str]) -> None:
        """Raise if it exists, is one of the sources or lies in one of them."""
        if not os.path.isdir(os.path.dirname(self.path)):
            raise FileError("the folder in which it would lie does not exist", path=self.path)
        mine = os.path.realpath(self.file)
        for source in map(os.path.realpath, sources):
            if mine in (source, os.path.join(source, "data.mdb")) or mine.startswith(source + os.sep):
                raise OptionError(f"{self.path} is SRC itself, or lies in it", hint="Choose another DST.")
        if self.in_folder and os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise FileError("it exists already, and is no folder", path=self.path, hint="Choose another DST.")
        if os.path.lexists(self.file) and not self.force:
            raise exists(self.path, self.file, "Choose another DST, or replace it by --force.")


class Partial:
    """The folder of one target. Rank 0 alone uses it, but for its path.

    Raises FileError if it belongs to another user, or if another process works in it.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.path = target + ".part"
        self._lock = -1

    def open(self, state: dict[str, Any], say: Callable[[str], None]) -> bool:
        """Begin, or go on where an earlier run has stopped; returns whether it goes on.

        state : sources and options, as JSON takes them; what was begun for others is thrown away
        """
        try:
            os.mkdir(self.path, 0o700)
        except FileExistsError:
            pass
        except OSError as e:
            raise FileError(f"cannot make the folder for the unfinished dataset: {e.strerror}", path=self.path) from e
        try:
            status = self._enter()
            before = self._state()
            wanted = json.loads(json.dumps(state))
            if status.st_mode & 0o022:
                before, reason = None, "others could write to it"
            elif before is None:
                reason = "it does not say what it was begun for"
            else:
                reason = _difference(before, wanted)
            if before is not None and not reason:
                say(f"going on with {self.path}")
                return True
            self._clear(reason, say)
            os.chmod(self.path, 0o700)
            self.keep(_STATE, json.dumps(wanted).encode())
        except OSError as e:
            raise FileError(f"cannot use the folder for the unfinished dataset: {e.strerror}", path=self.path) from e
        return False

    def _enter(self) -> os.stat_result:
        """Nobody else works in it from here on, until `close`."""
        status = os.lstat(self.path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            hint = "Have it removed, or choose another DST."
            raise FileError("the unfinished dataset is not yours", path=self.path, hint=hint)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._claim()
        return status

    def _claim(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "Wait for it, or choose another DST."
            raise FileError("another process is making this dataset", path=self.target, hint=hint) from None
        except OSError:
            pass  # a file system without locks: the user sees to it that only one process works there

    def _state(self) -> dict[str, Any] | None:
        with suppress(OSError, ValueError), open(os.path.join(self.path, _STATE)) as file:
            found = read_json(file.read())
            return found if isinstance(found, dict) else None
        return None

    def _clear(self, reason: str, say: Callable[[str], None]) -> None:
        names = os.listdir(self.path)
        if names:
            say(f"{self.path} is thrown away, and the work starts anew: {reason}")
        # The state first, for good: what a killed run leaves of the rest must not be gone on with.
        for name in sorted(names, key=lambda name: name != _STATE):
            self._delete(name)
            if name == _STATE:
                sync_path(self.path)

    def _delete(self, name: str) -> None:
        path = os.path.join(self.path, name)
        if os.path.isdir(path) and not os.path.islink(path):
            _remove_tree(path)
        else:
            os.unlink(path)

    def restart(self, reason: str, say: Callable[[str], None]) -> None:
        """Throw away all but the state."""
        kept = self.kept(_STATE)
        self._clear(reason, say)
        self.keep(_STATE, kept or b"")

    def keep(self, name: str, content: bytes) -> None:
        """A small file in it: whole, or not there."""
        path = os.path.join(self.path, name)
        try:
            with open(path + ".new", "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.rename(path + ".new", path)
            sync_path(self.path)
        except OSError as e:
            raise refused(e, path) from e

    def kept(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError), open(os.path.join(self.path, name), "rb") as file:
            return file.read()
        return None

    def finish(self, name: str, final: str, *, replace: bool) -> None:
        """Give what is called `name` in it its final name, in one step, when it is on the disk; and remove the rest.

        Raises FileError if `final` exists, unless it is to be replaced."""
        made = os.path.join(self.path, name)
        try:
            sync_path(made)
            os.makedirs(os.path.dirname(final), exist_ok=True)
            if replace or os.path.isdir(made):
                os.rename(made, final)
            else:
                _name_it(made, final)
            sync_path(os.path.dirname(final))
            sync_path(os.path.dirname(os.path.dirname(final)))
        except FileExistsError:
            raise FileError("it exists by now", path=final, hint="The new one is complete: use --force.") from None
        except OSError as e:
            raise FileError(f"cannot give the new dataset its name: {e.strerror}", path=final) from e
        self.remove()

    def tidy(self, final: str) -> None:
        """Remove what a run has left that was killed after its result, `final`, had its name. Never raises."""
        try:
            self._enter()
            made = [os.path.join(self.path, name) for name in ("data.mdb", "made")]
            # A second name of `final` itself is no result that waits for its name.
            waits = [path for path in made if os.path.lexists(path) and not os.path.samefile(path, final)]
            ours = self._state() is not None or not os.listdir(self.path)
            if ours and not waits:
                self.remove()
        except (OSError, FileError):
            pass  # there is none, or it is not ours, or another process works in it
        finally:
            self.close()

    def remove(self) -> None:
        with suppress(OSError):
            # The state last: it says that the folder is pario's, should this run be killed here.
            for name in sorted(os.listdir(self.path), key=lambda name: name == _STATE):
                self._delete(name)
            os.rmdir(self.path)
        self.close()

    def close(self) -> None:
        """The folder stays, for another run."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def exists(target: str, final: str, hint: str) -> FileError:
    """The error of a result, `final`, that is there already."""
    Partial(target).tidy(final)
    return FileError("it exists already", path=final, hint=hint)


def refused(e: OSError, path: str) -> FileError:
    """The error of something that could not be written."""
    hint = "Make room and give the same command again." if e.errno in (errno.ENOSPC, errno.EDQUOT) else None
    where = os.fsdecode(e.filename) if e.filename else path
    return FileError(f"cannot write it: {e.strerror or e}", path=where, hint=hint)


def _remove_tree(path: str) -> None:
    """Also folders that their owner may not write, as unpacked ones may be."""
    os.chmod(path, 0o700)
    for base, folders, _ in os.walk(path):
        for name in folders:
            if not os.path.islink(below := os.path.join(base, name)):
                os.chmod(below, 0o700)
    shutil.rmtree(path)


def _name_it(made: str, final: str) -> None:
    try:
        os.link(made, final)  # unlike rename it replaces nothing
    except OSError as e:
        if e.errno not in _NO_LINKS:  # also where it exists
            raise
        if os.path.lexists(final):
            raise FileExistsError(final) from None
        os.rename(made, final)


def _difference(before: dict[str, Any], wanted: dict[str, Any]) -> str:
    if before == wanted:
        return ""
    changed = sorted(key for key in before.keys() | wanted.keys() if before.get(key) != wanted.get(key))
    return f"it was begun for another {' and another '.join(changed)}"
