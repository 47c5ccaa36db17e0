"""What the handlers of system calls share: where paths of programs lead, and descriptors of files and folders."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pario.files.crew import Crew
from pario.files.entries import Entries
from pario.files.held import Held, HeldFiles, Wanted
from pario.files.notify import Listener, Memory, failed
from pario.files.outputs import Outputs
from pario.files.spots import Escaped, Prefixes, Spot, decoded, encoded, has_dots
from pario.machine import closing_fd

if TYPE_CHECKING:
    from pario.files.tree import Node, Tree

AT_FDCWD = -100

#: id, thread, flags, number, architecture, instruction pointer, six arguments
Call = tuple[int, ...]


def of_thread(thread: int, path: bytes) -> bytes:
    """An absolute path that means the same when this process looks it up."""
    return _SELF.sub(b"/proc/%d" % thread, path)


def _text(link: bytes) -> bytes:
    """Where a link leads; empty for anything else."""
    try:
        return os.readlink(link)
    except OSError:
        return b""


def _followed(thread: int, found: re.Match[bytes]) -> bytes:
    process = found[1] if found[1] and found[1].isdigit() else b"%d" % thread
    return _text(b"/proc/%s/%s" % (process, found[2] or found[3]))


class Limits(NamedTuple):
    """held_bytes, held_files : of what is kept in memory after a program has opened it"""

    held_bytes: int = 1 << 30
    held_files: int = 4096


#: A program's descriptors and its working folder, as paths; and what follows.
_THROUGH = re.compile(
    rb"(?:/proc/(self|thread-self|[0-9]+)(?:/task/[0-9]+)?/(fd/[0-9]+|cwd)|/dev/(fd/[0-9]+))(/.*)?", re.DOTALL
)
#: What processes have open, or map, in the directory of one of them; and what means the one that looks.
_OPENED = re.compile(rb"/proc/([0-9]+)(?:/task/[0-9]+)?/(fd/[0-9]+|cwd|map_files/[0-9a-f]+-[0-9a-f]+)")
_SELF = re.compile(rb"^(?:/proc/(?:thread-)?self|/dev(?=/fd))(?=/|$)")
#: Symbolic links in a path, as the kernel counts them; and a file of a view whose name is too long for its memfd.
_LINKS, _LONG_NAME = 40, b"/memfd:pario (deleted)"
_NAME_BYTES = 255

#: beginnings of the names of skeletons, and the lock in one
_NAME, _LOCK = "pario-view-", "lock"


class _Skeleton:
    """Real, empty folders that stand for the folders of a view.

    A program that opens a folder gets a descriptor of one of them, and one that changes into a folder works in one. So
    the kernel inherits, duplicates and closes them as it does any other. They lie side by side, not in each other:
    making one never changes another, whose times a program may be watching. They are in memory if there is a writable
    folder for that.
    """

    def __init__(self) -> None:
        parent = sweep()
        while True:
            self.base = os.path.realpath(tempfile.mkdtemp(prefix=f"{_NAME}{os.getuid()}-", dir=parent))
            # Held until this process ends, however it does.
            lock = os.path.join(self.base, _LOCK)
            self._lock = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink:
                break
            os.close(self._lock)  # another supervisor has just swept it away
        self._head = os.fsencode(self.base) + b"/"
        self._folders: list[Spot] = []
        self._numbers: dict[Spot, int] = {}

    def folder(self, spot: Spot, node: Node) -> str:
        """Path of the folder that stands for one of the view, or of a link that stands for one. Raises OSError."""
        spot = Spot(spot.root, spot.path)
        number = self._numbers.get(spot)
        if number is None:
            number = len(self._folders)
            path = self._path(number)
            if node.kind == "folder":
                os.mkdir(path)
                # Nobody else may write there, and its owner has to be able to remove it.
                os.chmod(path, 0o755 if node.mode is None else node.mode & 0o1755 | 0o500)
            else:
                os.symlink(b"x" * node.size, path)  # as long as the true one, and leads nowhere
            os.utime(path, ns=(node.mtime_ns, node.mtime_ns), follow_symlinks=False)
            self._folders.append(spot)
            self._numbers[spot] = number
        return self._path(number)

    def spot(self, path: bytes) -> Spot | None:
        """Which folder of the view a real path stands for; None for any other path."""
        if not path.startswith(self._head):
            return None
        name = path[len(self._head) :]
        return self._folders[int(name)] if name.isdigit() and int(name) < len(self._folders) else None

    def _path(self, number: int) -> str:
        return f"{self.base}/{number}"

    def close(self) -> None:
        shutil.rmtree(self.base, ignore_errors=True)
        os.close(self._lock)


def sweep() -> str:
    """Remove what supervisors of this user left behind that were killed. Returns the folder where skeletons are."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else tempfile.gettempdir()
    mine = f"{_NAME}{os.getuid()}-"
    for entry in os.scandir(parent):
        if not entry.name.startswith(mine):
            continue
        with contextlib.suppress(OSError):  # it may have just ended
            found = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            with closing_fd(os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path, ignore_errors=True)
    return parent


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody may read it any more
        os.write(2, text.encode("utf-8", "replace"))


class View:
    """
    roots : (prefix, records) of each
    outputs : where programs may write
    """

    def __init__(
        self,
        roots: Sequence[tuple[str, Tree]],
        listener: Listener,
        limits: Limits,
        outputs: Outputs | None = None,
    ) -> None:
        #: its lock guards everything here
        self.crew = Crew()
        self.roots = roots
        self.outputs = outputs
        self.listener = listener
        self.memory = Memory()
        self.skeleton = _Skeleton()
        self.held = HeldFiles(limits.held_bytes, limits.held_files, self.crew)
        prefixes = [prefix for prefix, _ in roots]
        if outputs is not None:
            outputs.root = len(roots)
            prefixes.append(outputs.folder)
        self.prefixes = Prefixes(prefixes, self._is_folder, self.followed)
        self.heads = self.prefixes.heads
        self.find = lru_cache(8192)(self._find)
        #: a program has confined itself by Landlock, which nobody else can see, nor who inherits it
        self.confined = False
        self._reported: set[type] = set()
        self.entries = Entries(self._names)

    def _find(self, spot: Spot) -> Node:
        try:
            node = self.roots[spot.root][1].find(spot.path)
        except FileNotFoundError:
            if any(len(name) > _NAME_BYTES for name in encoded(spot.path).split(b"/")):
                raise failed(errno.ENAMETOOLONG) from None
            raise
        if spot.folder and node.kind != "folder":
            raise NotADirectoryError
        return node

    def _is_folder(self, spot: Spot) -> bool:
        if self.outputs is not None and spot.root == self.outputs.root:
            return self.outputs.is_folder(spot.path)
        return self.find(Spot(spot.root, spot.path)).kind == "folder"

    def followed(self, spot: Spot, last: bool = True) -> Spot:
        """The same without symbolic links of the view, none of which is followed out of it. Raises OSError."""
        if spot.root == len(self.roots):  # of the outputs
            return spot
        at = decoded(self.prefixes.full(Spot(spot.root, "")))
        return spot._replace(path=self.roots[spot.root][1].followed(spot.path, last or spot.folder, at))

    # -- where paths lead --

    def spot(self, thread: int, folder_fd: int, path: bytes) -> Spot | Escaped | None:
        """Where a path leads, None: outside, the kernel's business. Raises OSError for what cannot be in the view."""
        if path[:1] == b"/":
            if path.startswith((b"/proc/", b"/dev/fd/")):
                through = self._through(thread, path)
                if through is not None:
                    return through
            if has_dots(path):
                return self.prefixes.absolute(path)
            return self.prefixes.clean(path) if path.startswith(self.heads) else None
        if not path:
            return None
        base = self.link(thread, folder_fd)
        if base is None:
            return None
        here = self.standing(base)
        if here is not None:
            return self.prefixes.relative(here, path)
        return self.prefixes.absolute(base + b"/" + path)

    def _through(self, thread: int, path: bytes) -> Spot | Escaped | None:
        """Where a path leads that goes through a folder that a process has open."""
        found = _THROUGH.fullmatch(path)
        here = self.standing(_followed(thread, found)) if found and (found[4] or b"").strip(b"/") else None
        return self.prefixes.relative(here, found[4]) if found and here is not None else None

    def link_text(self, thread: int, path: bytes) -> bytes | None:
        """What `readlink` says of a process's descriptor for a file or a folder of the view; None of anything else."""
        found = _THROUGH.fullmatch(path)
        spot = self.opened(_followed(thread, found)) if found and not found[4] else None
        return self.prefixes.full(spot) if spot is not None else None

    def opened(self, real: bytes) -> Spot | None:
        """Which file or folder of the view a descriptor means, by its real path."""
        if real.startswith(b"/memfd:/") and real.endswith(b" (deleted)"):
            return self.prefixes.clean(real[len(b"/memfd:") : -len(b" (deleted)")])
        return self.standing(real)

    def is_record(self, real: bytes) -> bool:
        """Whether a descriptor's real path is that of a file or folder that nobody may change."""
        spot = self.opened(real)
        return real == _LONG_NAME or (spot is not None and (self.outputs is None or spot.root != self.outputs.root))

    def leads_to_record(self, thread: int, path: bytes) -> bool:
        """Whether an absolute path outside, or a link there, names a descriptor or mapping of a record."""
        # A thread's descriptor need not be one of ours. The folder's file system may take its time.
        with contextlib.suppress(OSError), self.crew.given_up(another=True):
            if not stat.S_ISLNK(os.lstat(b"/proc/%d/root" % thread + path).st_mode):
                return False
        for _ in range(_LINKS):
            above, _, name = of_thread(thread, path).rpartition(b"/")
            above = os.path.realpath(above or b"/")
            found = _OPENED.fullmatch(above + b"/" + name)
            texts = [_text(above + b"/" + name)]
            if found and int(found[1]) == os.getpid():  # a link further up to /proc/self has led here
                texts.append(_text(b"/proc/%d/" % thread + found[2]))
            if found or not texts[0]:
                return any(map(self.is_record, texts))
            path = os.path.join(above, texts[0])
        return False

    def standing(self, real: bytes) -> Spot | None:
        """Which folder of the view a real folder stands for."""
        found = self.skeleton.spot(real)
        if found is None and self.outputs is not None:
            below = self.outputs.below(real)
            return None if below is None else Spot(self.outputs.root, below)
        return found

    def link(self, thread: int, folder_fd: int) -> bytes | None:
        """The real path of a program's working directory (AT_FDCWD) or of one of its descriptors."""
        name = b"cwd" if folder_fd == AT_FDCWD else b"fd/%d" % folder_fd
        return _text(b"/proc/%d/%s" % (thread, name)) or None

    # -- files and folders --

    def file(self, spot: Spot, node: Node) -> Held:
        """Its inode, with or without the contents."""
        return self.held.get(self._wanted(spot, node))

    def open(self, spot: Spot, node: Node, flags: int) -> int:
        """A descriptor of a file, with its contents. Raises OSError, ParioError."""
        return self.held.open(self._wanted(spot, node), self.roots[spot.root][1], node, flags)

    def _wanted(self, spot: Spot, node: Node) -> Wanted:
        key = (spot.root, spot.path if node.links == 1 else node.number)
        mode = 0o444 if node.mode is None else node.mode
        return Wanted(key, self.prefixes.full(spot), node.size, node.mtime_ns, mode)

    def folder(self, spot: Spot, node: Node, flags: int = os.O_RDONLY) -> int:
        """A descriptor of the folder, or of the link (O_PATH), that stands for it."""
        flags |= os.O_DIRECTORY if node.kind == "folder" else os.O_NOFOLLOW
        return os.open(self.skeleton.folder(spot, node), flags | os.O_CLOEXEC)

    def _names(self, spot: Spot, start: Any) -> Iterator[tuple[bytes, Node]]:
        """Names in a folder from one of them on, which `start` is of; None: all, and "." and "..", too."""
        here: Node = self.find(spot)
        if start is None:
            yield from ((b".", here), (b"..", here))
        for name, node in self.roots[spot.root][1].names(spot.path, start):
            yield encoded(name), node

    def report(self, error: BaseException, number: int = errno.EIO) -> None:
        """Say once per kind of error why programs get this errno."""
        if type(error) not in self._reported:
            self._reported.add(type(error))
            told = f"pario view: {type(error).__name__}: {error} (programs get {errno.errorcode.get(number, number)})\n"
            say(told)

    def close(self) -> None:
        self.held.close()
        self.skeleton.close()
        for _, records in self.roots:
            records.close()
