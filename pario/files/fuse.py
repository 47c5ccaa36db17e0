"""A tree of records as a mounted folder, by FUSE. Needs /dev/fuse, fuse3 and mfusepy; `check` says what is missing.

Everything is of one state of the LMDB, so the kernel may keep what it has been told: names, sizes and bytes. It asks
for neither open nor close of files (they answer ENOSYS, which it remembers), and an idle mount does nothing.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import shutil
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from pario.errors import FileError, OptionError, ParioError, how_to_install
from pario.files.database import errno_of
from pario.files.tree import FILE, FOLDER, LINK, Node, Tree

_log = logging.getLogger("pario")

#: What the kernel is told stays as it is for as long as the mount lives.
_KEPT_S = 86400.0
#: Bytes of the largest request that the kernel makes.
_MAX_READ = 1 << 20
#: What libfuse returns after SIGTERM, SIGINT and SIGHUP.
_BY_SIGNAL = 8
#: Packed records stay unpacked for the next piece that is read, up to this many bytes, and one at least.
_UNPACKED_BYTES = 64 << 20
_KINDS = {FILE: stat.S_IFREG, FOLDER: stat.S_IFDIR, LINK: stat.S_IFLNK}
#: Places at which listings go on, of those that were made last; any other is found from the beginning of its folder.
_MOST_LISTINGS = 1024
_OTHER_WAYS = (
    "Without FUSE: `python -m pario files view` shows the records to one command, and Python reads them as pario:// "
    "(fsspec); see docs/files.md."
)


def check(folder: str) -> None:
    """Raises OptionError unless a file system can be mounted at `folder`, an empty folder."""
    if importlib.util.find_spec("mfusepy") is None:
        raise OptionError("mounting needs mfusepy", hint=f"{how_to_install('mount')}. {_OTHER_WAYS}")
    if not os.path.exists("/dev/fuse"):
        raise OptionError("this machine has no /dev/fuse: its kernel lacks FUSE, or hides it", hint=_OTHER_WAYS)
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise OptionError("no right to use /dev/fuse", hint=_OTHER_WAYS)
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise OptionError("fusermount3 is not installed", hint=f"Debian: apt-get install fuse3. {_OTHER_WAYS}")
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        raise OptionError(f"there is no folder {folder}", hint="Make it: mkdir.") from None
    except OSError as e:
        hint = f"A mount whose process is gone: fusermount3 -u -z {folder}" if e.errno == errno.ENOTCONN else None
        raise OptionError(f"{folder}: {e.strerror}", hint=hint) from None
    if names:
        raise OptionError(f"{folder} is not empty, and what is in it would be hidden", hint="Name an empty folder.")


def mount(tree: Tree, folder: str, *, others: bool = False, ready: Callable[[], None] = lambda: None) -> None:
    """Serve `tree` at `folder` until SIGTERM, SIGINT, SIGHUP or an unmount; unmounted in the end. Main thread only.

    others : let other users read, too
    ready : called when the folder is mounted
    Raises OptionError, FileError.
    """
    check(folder)
    mfusepy = _library()
    operations = _Operations(tree, others, ready)
    try:
        mfusepy.FUSE(
            operations,
            os.path.abspath(folder),
            foreground=True,
            fsname="pario",
            subtype="pario",
            ro=True,
            nosuid=True,
            nodev=True,
            default_permissions=True,
            allow_other=others,
            use_ino=True,
            kernel_cache=True,
            max_read=_MAX_READ,
            entry_timeout=_KEPT_S,
            attr_timeout=_KEPT_S,
            negative_timeout=_KEPT_S,
        )
    except RuntimeError as e:
        if operations.is_mounted and e.args == (_BY_SIGNAL,):
            return
        hint = "user_allow_other must stand in /etc/fuse.conf. " if others else ""
        raise FileError(
            f"the FUSE library could not mount it (status {e}); it has said why", path=folder, hint=hint + _OTHER_WAYS
        ) from None


def _library() -> Any:
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")  # mfusepy would take version 2, where both are installed
    try:
        import mfusepy
    except OSError as e:  # it loads libfuse
        raise OptionError(f"libfuse cannot be loaded: {e}", hint=f"Debian: apt-get install fuse3. {_OTHER_WAYS}") from e
    return mfusepy


def _told(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Errors of pario become numbers, and a line in the log."""

    @wraps(operation)
    def answer(self: _Operations, path: str, *arguments: Any) -> Any:
        try:
            return operation(self, path[1:], *arguments)
        except ParioError as e:
            _log.error("%s: %s", path, e)
            raise OSError(errno_of(e), str(e)) from None

    return answer


class _Operations:
    """The operations that libfuse calls, in several threads at once."""

    use_ns = True

    def __init__(self, tree: Tree, others: bool, ready: Callable[[], None]) -> None:
        self._tree = tree
        self._ready = ready
        self.is_mounted = False
        self._owner = {"st_uid": os.getuid(), "st_gid": os.getgid()}
        modes = (0o444, 0o555, 0o444) if others else (0o400, 0o500, 0o400)
        self._modes = dict(zip(_KINDS, modes, strict=True))
        self._lock = threading.Lock()
        self._following: OrderedDict[tuple[str, int], Node] = OrderedDict()  # path, offset -> what stands there
        self._unpacked: OrderedDict[int, bytes] = OrderedDict()

    def init_with_config(self, connection: Any, _: Any) -> None:
        if connection is not None:
            connection.max_read = _MAX_READ  # libfuse needs it in both places
        self.is_mounted = True
        self._ready()

    @_told
    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        return self._status(self._tree.find(path))

    @_told
    def readlink(self, path: str) -> str:
        node = self._tree.find(path)
        if node.kind != LINK:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return node.target.decode("utf-8", "surrogateescape")

    def open(self, path: str, flags: int) -> int:
        raise OSError(errno.ENOSYS, "files need no opening")

    @_told
    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        node = self._tree.find(path)
        if node.size <= size or not self._tree.is_packed(node):
            return self._tree.read(node, offset, size)
        return self._whole(node)[offset : offset + size]

    def _whole(self, node: Node) -> bytes:
        """A packed record that is read in pieces."""
        with self._lock:
            data = self._unpacked.get(node.number)
            if data is not None:
                self._unpacked.move_to_end(node.number)
                return data
        data = self._tree.read(node)
        with self._lock:
            self._unpacked[node.number] = data
            while len(self._unpacked) > 1 and sum(map(len, self._unpacked.values())) > _UNPACKED_BYTES:
                self._unpacked.popitem(last=False)
        return data

    def readdir_with_offset(self, path: str, offset: int, fh: int) -> Iterator[tuple[str, dict[str, int], int]]:
        """(name, mode and number, offset of the following one). Where the kernel has enough, it goes on later."""
        folder = self._tree.find(path[1:])
        start = self._following.get((path, offset))
        if start is None:
            here = {"st_mode": stat.S_IFDIR, "st_ino": folder.number}
            yield from [(name, here, number) for name, number in ((".", 1), ("..", 2)) if number > offset]
        for number, (name, node) in enumerate(self._tree.names(folder, start), 3 if start is None else offset + 1):
            if number > offset:
                try:
                    yield name, {"st_mode": _KINDS[node.kind], "st_ino": node.number}, number
                except GeneratorExit:  # it had no room for this one
                    with self._lock:
                        self._following[path, number - 1] = node
                        if len(self._following) > _MOST_LISTINGS:
                            self._following.popitem(last=False)
                    raise

    def statfs(self, path: str) -> dict[str, int]:
        return {"f_bsize": 4096, "f_frsize": 4096, "f_namemax": 255}

    def _status(self, node: Node) -> dict[str, Any]:
        times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), node.mtime_ns)
        return {
            **self._owner,
            **times,
            "st_mode": _KINDS[node.kind] | (self._modes[node.kind] if node.mode is None else node.mode),
            "st_ino": node.number,
            "st_nlink": 2 if node.kind == FOLDER else node.links,
            "st_size": node.size,
            "st_blocks": (node.size + 511) // 512,
            "st_blksize": 128 << 10,
        }
