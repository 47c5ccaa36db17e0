"""Files of a checkpoint: made complete before anybody sees them, and opened with distrust.

Names of a tier's folder:

    step-000000000100-0000017n89abcdef          a committed checkpoint, step and id
    step-000000000100-0000017n89abcdef.node-00003of00004    on the fast tier: what one of four nodes wrote of it
    step-000000000100-0000017n89abcdef.node-00003of00004.copy   a partner's copy of that, on another node's fast tier
    .attempt-step-000000000100-0000017n89abcdef one that is being made, or whose maker was killed
    .trash-...                                  one that is being deleted
    .job                                        which job saves here; locked by it

An id is the checkpoint's number in the order of commits of its folder, in hex, "n", and 32 random bits. It stands in
the name so that the newest is known without a clock and without opening a file. Older versions of pario had 64 random
bits: those come before all others, in the order of their steps.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from pario.comm.base import AnyWorld
from pario.comm.launcher import job_name
from pario.errors import CheckpointError, CorruptedError, MissingError, ReadError
from pario.machine import closing_fd, replaced, sync_path, write_all

#: An id, as a pattern.
ID = "[0-9a-f]{7}[0-9a-fn][0-9a-f]{8}"
_NAME = re.compile(rf"step-(\d{{12}})-({ID})(?:\.node-(\d{{5}})of(\d{{5}})(\.copy)?)?")
ATTEMPT, TRASH = ".attempt-", ".trash-"
#: The file by which a job claims a folder, bytes of its text, and how often one that is just given back is tried again.
_CLAIM, _MOST_CLAIM, _CLAIM_TRIES = ".job", 300, 8
#: What devices read and write past the page cache is made of these.
PAGE = 4096
#: Bytes of one read: requests of 32 MiB were now and then three times slower than these.
_REQUEST = 4 << 20
#: Descriptions are read whole: about 100 bytes per array or piece.
MOST_SMALL = 128 << 20
T = TypeVar("T", bound="_Opened")
#: System calls that `os` lacks: fallocate without glibc's emulation, which writes to every block.
_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None) if sys.platform == "linux" else None


class Name(NamedTuple):
    """Of a checkpoint's folder. node, nodes : whose part it is, of how many, on the fast tier; nodes 0: the whole;
    copy : it is a copy of that part, which another node keeps"""

    step: int
    id: str
    node: int = 0
    nodes: int = 0
    copy: bool = False

    def __str__(self) -> str:
        part = f".node-{self.node:05d}of{self.nodes:05d}" if self.nodes else ""
        return f"step-{self.step:012d}-{self.id}{part}{'.copy' if self.copy else ''}"

    @property
    def order(self) -> tuple[int, int]:
        """The larger the later it was committed."""
        return order_of(self.step, self.id)


def whole_pages(nbytes: int) -> int:
    """This many bytes, rounded up to pages."""
    return -(-nbytes // PAGE) * PAGE


def sum_of(data: Any) -> int:
    """XXH3 with 64 bits of anything with a buffer."""
    return int(xxhash.xxh3_64_intdigest(data))


def empty_bytes(nbytes: int) -> np.ndarray:
    """u8[nbytes], page-aligned where that pays."""
    if nbytes < 1 << 16:
        return np.empty(nbytes, np.uint8)
    raw = np.empty(nbytes + PAGE, np.uint8)
    start = -raw.__array_interface__["data"][0] % PAGE  # `ctypes.data` took a tenth of restoring small arrays
    return raw[start : start + nbytes]


def order_of(step: int, id_: str) -> tuple[int, int]:
    """As `Name.order`: (number of the commit, 0 in those of older versions; step)."""
    return int(id_[:7], 16) if id_[7] == "n" else 0, step


def next_id(number: int, random: str) -> str:
    """random : 8 hex digits"""
    return f"{number:07x}n{random}"


def listed(folder: str) -> list[Name]:
    """The committed checkpoints of a tier, oldest first; none if there is no such folder. Raises ReadError."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as e:
        raise ReadError(f"cannot list the checkpoints: {e.strerror}", path=folder) from e
    found = [match for match in map(_NAME.fullmatch, names) if match]
    made = (Name(int(m[1]), m[2], int(m[3] or 0), int(m[4] or 0), bool(m[5])) for m in found)
    return sorted(made, key=lambda name: (name.order, name))


def make_folder(path: str) -> None:
    """With the folders above it; durable. Raises OSError."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(os.path.abspath(path))
    make_folder(above)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):  # nor has another rank just made it
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    sync_path(above)


def write_small(folder: str, name: str, data: bytes, durable_name: bool = True) -> None:
    """A file that is complete and durable, or not there under this name. Raises OSError.

    durable_name=False : `commit` makes the name durable
    """
    with replaced(os.path.join(folder, name)) as part, Writer(part, len(data), direct=False) as writer:
        writer.write(np.frombuffer(data, np.uint8), 0)
        writer.sync()
    if durable_name:
        with suppress(FileNotFoundError):  # it has a new name already, and was synced before
            sync_path(folder)


class Claim:
    """That one job alone saves into a folder. The system ends it with the process; a copy of the folder has none. Other
    machines see it where the file system passes locks on, as NFS and Lustre (with -o flock) do; one without locks, or a
    file of another user, keeps nobody out."""

    def __init__(self, folder: str) -> None:
        self._folder, self._path, self._fd, self._pid = folder, os.path.join(folder, _CLAIM), -1, os.getpid()

    def take(self) -> CheckpointError | None:
        """Idempotent. Returns an error that says which job has the folder."""
        for _ in range(_CLAIM_TRIES if self._fd < 0 else 0):
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError:
                return None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:  # else it was its owner's last moment
                    self._fd = fd
                    mine = f"{job_name()[0]}, process {self._pid} on {os.uname().nodename}"
                    with suppress(OSError):  # the disk is full: others are not told who it is
                        os.ftruncate(fd, 0)
                        os.pwrite(fd, f"{mine}, since {time.strftime('%F %T')}".encode()[:_MOST_CLAIM], 0)
                    return None
            except BlockingIOError:
                said = os.pread(fd, _MOST_CLAIM, 0).decode(errors="replace")
                return CheckpointError(
                    f"another job saves its checkpoints here: {''.join(filter(str.isprintable, said)) or 'unknown'}",
                    path=self._folder,
                    hint="Give each job a folder of its own, or end that one first",
                )
            except OSError:
                return None
            finally:
                if self._fd < 0:
                    os.close(fd)
        return None

    def close(self) -> None:
        """Idempotent. In a forked process it leaves its parent the folder."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if self._pid == os.getpid():
            with suppress(OSError):
                os.unlink(self._path)
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # forked processes may have the descriptor, too
        os.close(fd)


def commit(attempt: str, final: str) -> None:
    """Give a complete and synced folder its name. Raises OSError."""
    sync_path(attempt)
    os.rename(attempt, final)
    sync_path(os.path.dirname(final))


def discard(path: str) -> None:
    """Delete a checkpoint: first its name, so that nobody sees half of it, nor after a loss of power. Best effort."""
    folder, name = os.path.split(path)
    trash = path
    with suppress(OSError):
        if not name.startswith(TRASH):
            trash = os.path.join(folder, f"{TRASH}{name.removeprefix(ATTEMPT)}-{secrets.token_hex(4)}")
            os.rename(path, trash)
            if not name.startswith(ATTEMPT):
                sync_path(folder)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # not where a link leads
        with closing_fd(os.open(trash, flags)) as fd:
            for each in os.listdir(fd):
                os.unlink(each, dir_fd=fd)
        os.rmdir(trash)


def _opened(path: str, flags: int = 0) -> tuple[int, os.stat_result]:
    """(descriptor, status) of a regular file that belongs to this user, to root or to the owner of the tier's folder.
    Raises MissingError, ReadError, CorruptedError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except FileNotFoundError:
        raise MissingError("a file of the checkpoint is missing", path=path) from None
    except OSError as e:
        raise ReadError(f"cannot open a file of the checkpoint: {e.strerror}", path=path) from e
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptedError("this is no regular file", path=path)
        if status.st_uid not in (os.geteuid(), 0, os.stat(os.path.dirname(os.path.dirname(path))).st_uid):
            raise CorruptedError(
                f"this file belongs to user {status.st_uid}, who is neither you nor the owner of the folder", path=path
            )
    except BaseException:
        os.close(fd)
        raise
    return fd, status


class _Opened:
    """A file that is open twice, the second time past the page cache, -1 where it cannot be."""

    _fd = _direct = -1

    def close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _past_the_cache(
        self, move: Callable[[int, np.ndarray, int], None], block: np.ndarray, offset: int, only: int | None = None
    ) -> None:
        """move(descriptor, bytes, offset): whole pages past the page cache where that can be, everything else through
        it. only : the error by which a device says that it cannot, by its number; None: any"""
        whole = block.size // PAGE * PAGE
        if self._direct < 0 or offset % PAGE or block.ctypes.data % PAGE or not whole:
            move(self._fd, block, offset)
            return
        try:
            move(self._direct, block[:whole], offset)
        except OSError as e:
            if only not in (None, e.errno):
                raise
            move(self._fd, block[:whole], offset)
        if whole < block.size:
            move(self._fd, block[whole:], offset + whole)


class Reader(_Opened):
    """A node's file: whole pages past the page cache where the store can. Any thread. Raises ReadError and the like."""

    def __init__(self, path: str, size: int, *, take: Callable[[int], None] | None = None) -> None:
        """size : that it must have; take(nbytes) : returns when this many may be read"""
        self.path = path
        self._take = take
        self._fd, status = _opened(path)
        if status.st_size != size:
            self.close()
            raise CorruptedError(f"the file has {status.st_size:,} bytes, {size:,} expected", path=path)
        with suppress(ReadError, MissingError):
            self._direct, _ = _opened(path, os.O_DIRECT)

    def read(self, block: np.ndarray, offset: int) -> None:
        """Fill `block`, u8[n]."""
        self._past_the_cache(self._read, block, offset)  # what a device cannot do past the cache it may do through it

    def _read(self, fd: int, block: np.ndarray, offset: int) -> None:
        done = 0
        while done < block.size:
            request = block[done : done + _REQUEST]
            try:
                if self._take is not None:
                    self._take(request.size)
                n = os.preadv(fd, [request.data], offset + done)
            except OSError as e:
                raise ReadError(f"cannot read: {e.strerror}", path=self.path, offset=offset + done) from e
            if n <= 0:
                raise ReadError("the file ends before its data", path=self.path, offset=offset + done)
            done += n


def read_small(path: str) -> bytes:
    """A whole file of at most 128 MiB. Raises MissingError, ReadError, CorruptedError."""
    fd, status = _opened(path)
    data = bytearray()
    with closing_fd(fd):
        if status.st_size > MOST_SMALL:
            raise CorruptedError(f"a description of {status.st_size:,} bytes", path=path)
        try:
            while chunk := os.pread(fd, status.st_size + 1 - len(data), len(data)):
                data += chunk
        except OSError as e:
            raise ReadError(f"cannot read: {e.strerror}", path=path) from e
    return bytes(data)


class Writer(_Opened):
    """One node's file while it is written: whole pages past the page cache where the store can, the rest through it.

    Any thread may call `write`; each byte is written once. Raises OSError everywhere.
    """

    def __init__(self, path: str, size: int | None = None, *, direct: bool = True) -> None:
        """size : makes the file, with that many bytes reserved; None: it exists"""
        create = os.O_CREAT | os.O_EXCL if size is not None else 0
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.path = path
        self._fd = os.open(path, flags | create, 0o666)
        try:
            if size is not None:
                reserve(self._fd, size, path)
            if direct:
                with suppress(OSError):
                    self._direct = os.open(path, flags | os.O_DIRECT)
        except BaseException:
            self.close()
            raise

    def write(self, data: np.ndarray, offset: int) -> None:
        """data : u8[n]"""
        self._past_the_cache(write_all, data, offset, only=errno.EINVAL)

    def sync(self) -> None:
        os.fsync(self._fd)


def reserve(fd: int, size: int, path: str) -> None:
    """Take room for a file now, so that a full store is known before the work. Raises OSError (ENOSPC, EDQUOT)."""
    room = os.fstatvfs(fd)
    if room.f_bavail * room.f_frsize < size and room.f_blocks:
        raise OSError(errno.ENOSPC, f"{size:,} bytes wanted, {room.f_bavail * room.f_frsize:,} free")
    os.ftruncate(fd, size)
    if _fallocate is None or not size:
        return
    if _fallocate(ctypes.c_int(fd), 0, ctypes.c_long(0), ctypes.c_long(size)) != 0:
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(number, os.strerror(number), path)


def failed(error: BaseException, what: str, path: str) -> CheckpointError:
    """What the user sees of an error of the store; a CheckpointError stays what it is."""
    if isinstance(error, CheckpointError):
        return error
    said = error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    if isinstance(error, FileNotFoundError):
        said = "its folder is gone: another rank has given it up, or somebody has deleted it"
    hint: Any = None
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Make room there, or keep fewer; the last complete checkpoint is untouched"
    made = CheckpointError(f"{what}: {said}", path=path, hint=hint)
    made.__cause__ = error
    return made


# -- the folders of a job's tiers --------------------------------------------------------------------------------------


def run_of(slow: str) -> str:
    """Of the run that saves into this folder: a name on the fast tier."""
    return f"run-{hashlib.sha256(os.path.realpath(slow).encode(errors='surrogateescape')).hexdigest()[:16]}"


def newest(slow: str, fast: str | None) -> str:
    """In words: the folders, and the newest step that this node sees there."""
    tiers = {"slow": slow} | ({} if fast is None else {"fast": fast})
    found: list[tuple[tuple[int, int], str]] = []
    for tier, folder in tiers.items():
        with suppress(ReadError):
            found += [(name.order, f"newest step {name.step} on the {tier} tier") for name in listed(folder)]
    named = [f"{tier}={folder!r}" for tier, folder in tiers.items()]
    return ", ".join([*named, max(found)[1] if found else "no step"])


def open_folders(world: AnyWorld, slow: str, fast: str | None) -> None:
    """Rank 0 makes the slow tier's, each node's first rank its fast one. Raises CheckpointError."""
    if world.rank == 0:
        _make(slow)
    if fast is not None and world.is_leader:
        _make(fast)
        status = os.lstat(fast)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
            raise CheckpointError("this is not a folder of yours", path=fast, hint="Name another fast=")


def sweep(world: AnyWorld, slow: str, fast: str | None) -> None:
    """Delete what killed jobs have left, best effort; not before this one saves, since it may only read what another
    one saves. Collective calls come between this and the first new attempt."""
    for folder in ([slow] if world.rank == 0 else []) + ([fast] if fast is not None and world.is_leader else []):
        with suppress(OSError):
            for name in os.listdir(folder):
                if name.startswith((f"{ATTEMPT}step-", f"{TRASH}step-")):
                    discard(os.path.join(folder, name))


def _make(folder: str) -> None:
    try:
        make_folder(folder)
    except OSError as e:
        raise CheckpointError(f"cannot make the folder for checkpoints: {e.strerror}", path=folder) from e
