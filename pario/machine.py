"""What this node offers to this process: file systems, memory, cores. Linux only: read from the kernel's own files."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from typing import Any, BinaryIO, NamedTuple

#: (type, kind); a type of fuse.NAME is "FUSE"
_KINDS = {
    **dict.fromkeys(("lustre", "gpfs", "beegfs", "beegfs_nodev", "panfs", "wekafs", "pvfs2", "ceph"), "parallel"),
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "glusterfs", "virtiofs"), "network"),
    **dict.fromkeys(("tmpfs", "ramfs", "hugetlbfs"), "memory"),
    "overlay": "a container's layers",
    "fuse.fuse-overlayfs": "a container's layers",
}
#: files of a control group, of version 2 and of version 1
_LIMIT, _USED = ("memory.max", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes")
#: Bytes of the longest of the kernel's files that are read at once.
_MOST_TEXT = 32 << 10
#: Nobody can change the size of such memory.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ESCAPED = re.compile(r"\\([0-7]{3})")


class FileSystem(NamedTuple):
    """Where a file lies.

    type : the kernel's word: ext4, lustre, ...
    kind : "parallel", "network", "FUSE", "memory", "a container's layers" or "local"
    mounted_at : its mount point; source: what is mounted there
    readonly : it is mounted read-only
    """

    type: str
    kind: str
    mounted_at: str
    source: str
    readonly: bool

    @property
    def shared(self) -> bool:
        """Other nodes see it, too (assumed for FUSE)."""
        return self.kind in ("parallel", "network", "FUSE")


def file_system(path: str) -> FileSystem:
    """The file system of a path, or of its nearest existing parent."""
    real = os.path.realpath(path)
    while not os.path.exists(real) and real != "/":
        real = os.path.dirname(real)
    found = FileSystem("unknown", "local", "/", "", False)
    # Later lines are mounted over earlier ones.
    for _, each, _ in _mounts():
        where = each.mounted_at
        if (real == where or real.startswith(where.rstrip("/") + "/")) and len(where) >= len(found.mounted_at):
            found = each
    return found


def file_system_of(path: str, device: int) -> FileSystem:
    """The file system of an open file, without a request to the storage.

    path : how it was opened, for a file system that has several devices; device : its `st_dev`
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    found = [each for mounted, each, _ in _mounts() if mounted == number]
    return found[-1] if found else file_system(path)


def _mounts() -> Iterator[tuple[str, FileSystem, set[str]]]:
    """(device as MAJOR:MINOR, what is mounted, options) of every mount."""
    # "id parent device root PLACE OPTIONS tags... - TYPE SOURCE OPTIONS"
    for line in _lines("/proc/self/mountinfo"):
        head, _, tail = line.partition(" - ")
        fields, more = head.split(), tail.split()
        if len(fields) >= 6 and len(more) >= 3:
            mounted_at, source = (_ESCAPED.sub(lambda m: chr(int(m[1], 8)), word) for word in (fields[4], more[1]))
            kind = _KINDS.get(more[0]) or ("FUSE" if more[0].split(".")[0] in ("fuse", "fuseblk") else "local")
            options = {*fields[5].split(","), *more[2].split(",")}
            yield fields[2], FileSystem(more[0], kind, mounted_at, source, "ro" in options), options


def boot() -> str:
    """An id of this kernel's boot: the same for all its processes, in any container, and different on other
    machines."""
    return next(iter(_lines("/proc/sys/kernel/random/boot_id")), "") or os.uname().nodename


def is_rotating(device: int) -> bool | None:
    """Whether a block device of this node is a rotating disk. device : `st_dev` of a file; None: unknown, or no block
    device."""
    sysfs = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for queue in ("queue", "../queue"):  # a disk; a part of one
        for line in _lines(f"{sysfs}/{queue}/rotational"):
            return line.strip() == "1"
    return None


#: No processor has more of its last cache for a core: a virtual machine that shows more shares it with machines that it
#: does not see. (Two cores with "300 MB", which hold no batches of 13 MB: past the caches 1.2 times as fast on 1, 2 and
#: 4 ranks, also for loops that read each batch once.)
_CACHE_OF_CORE = 16 << 20


@cache
def last_cache_bytes() -> int | None:
    """Size of the largest cache of this node's processors, at most what its cores can have; None if it is unknown."""
    sizes = []
    for number in range(8):
        for line in _lines(f"/sys/devices/system/cpu/cpu0/cache/index{number}/size"):
            if line.endswith("K") and line[:-1].isdigit():
                sizes.append(int(line[:-1]) << 10)
    return min(max(sizes), (os.cpu_count() or 1) * _CACHE_OF_CORE) if sizes else None


def _cached_bytes(lines: list[str]) -> int:
    """Of a control group's statistics. Cached file pages count as used, but the kernel drops them when a program needs
    memory."""
    stat = dict(line.split()[:2] for line in lines)
    return sum(int(stat.get(f"total_{name}") or stat.get(name) or 0) for name in ("active_file", "inactive_file"))


def memory(*, swap: bool = False) -> tuple[int, int]:
    """(bytes that this process and its neighbours in the control group may use, bytes of these available now).

    swap : also by swapping, as far as the machine goes
    """
    with closing(MemoryGauge()) as gauge:
        return gauge.read(swap)


class MemoryGauge:
    """`memory` for a thread that asks often and acts at once. The files stay open, and each costs one
    system call: after every one of them the interpreter may let other threads run first, for 5 ms each. Limits are
    those of the moment at which this was made."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self._info = self._open("/proc/meminfo")
        self._total = _meminfo().get("MemTotal", 0)
        self._groups: list[tuple[int, int, int]] = []
        for folder in _groups("memory"):
            limit = _number(folder, *_LIMIT)
            used = max(self._open(os.path.join(folder, name)) for name in _USED)
            stat = self._open(os.path.join(folder, "memory.stat"))
            if limit is not None and limit < self._total and used >= 0:
                self._groups.append((limit, used, stat))

    def read(self, swap: bool = False) -> tuple[int, int]:
        """See `memory`."""
        info = _meminfo(self._lines(self._info))
        total, available = self._total, info.get("MemAvailable", self._total) + swap * info.get("SwapFree", 0)
        for limit, used, stat in self._groups:
            total = min(total, limit)
            found = self._lines(used)
            if found:
                available = min(available, limit - int(found[0]) + _cached_bytes(self._lines(stat)))
        return total, max(0, available)

    def _open(self, path: str) -> int:
        """-1 if that is refused."""
        try:
            self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return -1
        return self._files[-1]

    def _lines(self, fd: int) -> list[str]:
        try:
            return os.pread(fd, _MOST_TEXT, 0).decode().splitlines()
        except OSError:
            return []

    def close(self, close: Any = os.close) -> None:  # at the interpreter's end `os` has gone
        while self._files:
            close(self._files.pop())

    __del__ = close


def _meminfo(found: list[str] | None = None) -> dict[str, int]:
    """In bytes; of these lines, or of now."""
    lines = (line.partition(":") for line in (_lines("/proc/meminfo") if found is None else found))
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in lines}


def core_quota() -> float | None:
    """Cores' worth of time that the control group grants, None without a limit."""
    least = None
    for folder in _groups("cpu"):
        words = " ".join(_lines(os.path.join(folder, "cpu.max"))).split()  # version 2: "quota period"
        if not words:
            both = (os.path.join(folder, f"cpu.cfs_{name}_us") for name in ("quota", "period"))  # version 1
            words = [" ".join(_lines(each)) for each in both]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            cores = int(words[0]) / int(words[1])
            least = cores if least is None else min(least, cores)
    return least


def task_limits() -> Iterator[tuple[int, int]]:
    """(limit, tasks now) of each control group around this process that limits processes and threads."""
    for folder in _groups("pids"):
        limit, used = _number(folder, "pids.max"), _number(folder, "pids.current")
        if limit is not None and used is not None:
            yield limit, used


def _groups(controller: str) -> Iterator[str]:
    """The folders of this process's control group and of those around it, of version 2 and of version 1."""
    paths = {}
    for line in _lines("/proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    for _, mount, options in _mounts():
        if mount.type == "cgroup2" and "" in paths:
            path = paths[""]
        elif mount.type == "cgroup" and controller in options and controller in paths:
            path = paths[controller]
        else:
            continue
        folder = os.path.normpath(mount.mounted_at + path)
        # In a container the path may be the host's: the mounted root is then the container's own group.
        while folder.startswith(mount.mounted_at):
            if os.path.isdir(folder):
                yield folder
            folder = os.path.dirname(folder)


def _number(folder: str, *names: str) -> int | None:
    for name in names:
        for line in _lines(os.path.join(folder, name)):
            if line.isdigit():
                return int(line)
    return None


def open_files() -> int:
    """How many this process may have."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if most == resource.RLIM_INFINITY else most


def allow_many_files() -> int:
    """As many as the system lets this process have; returns how many. Of a service each connection is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return open_files()


def silence(*streams: int) -> None:
    """These descriptors lead nowhere from now on: nobody waits for the end of a pipe that only this process holds."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nothing, stream)
    if nothing > 2:
        os.close(nothing)


def lock_holders(path: str) -> list[int]:
    """Processes of this node that hold a lock on the file. Of an LMDB's lock file: those that have the LMDB open."""
    with suppress(OSError):
        status = os.stat(path)
        file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        # "1: POSIX  ADVISORY  READ PID MAJOR:MINOR:INODE START END"; a waiting one has "->" after the number.
        found = {words[4] for words in map(str.split, _lines("/proc/locks")) if file in words[5:6]}
        return sorted(int(pid) for pid in found if pid.isdigit())
    return []


def _lines(path: str) -> list[str]:
    """The lines of a file; none if it is missing or unreadable."""
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """`with closing_fd(os.open(...)) as fd:` closes the descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def sync_path(path: str) -> None:
    """Make a file, or the names in a folder, durable. Raises OSError, but not where a file system has no such call."""
    with closing_fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        try:
            os.fsync(fd)
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
                raise


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end: a reader sees the old one or the new one, whole. After an
    error there is none. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with replaced(path) as part, os.fdopen(os.open(part, flags, 0o666), "wb", buffering=1 << 20) as file:
        yield file


@contextmanager
def replaced(path: str) -> Iterator[str]:
    """The same by the name of the new file, which is not there yet."""
    part = f"{path}.{os.getpid()}.part"
    with suppress(FileNotFoundError):
        os.unlink(part)
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise


def absolute(path: str) -> str:
    """The path from the root on, which means the same after the script has gone to another folder. What its ".." lead
    to stays for links to say."""
    if not os.path.isabs(path):
        with suppress(OSError):  # this folder was removed
            return os.path.join(os.getcwd(), path.removeprefix("./"))
    return path


def allowed_cores() -> list[int]:
    """The cores on which this process may run."""
    return sorted(os.sched_getaffinity(0))


def fair_threads(mine: list[int], everyones: list[list[int]]) -> int:
    """One thread per core that this rank may use; ranks of a node divide the cores that they share.

    mine : this rank's cores; everyones : those of every rank of its node, this one's among them
    """
    users = Counter(core for cores in everyones for core in cores)
    return max(1, int(sum(1 / users[core] for core in mine) + 1e-6))


class Share(NamedTuple):
    """One rank's share of the job's machines. Cores and the page cache belong to a machine, which MPI may see as
    several nodes (containers).

    machines : number of machines of the job
    threads : threads of this rank if the ranks divide the machine's cores fairly
    crowded : the machine has more ranks than cores
    """

    machines: int
    threads: int
    crowded: bool


def my_share(rank: int, everyones: Sequence[tuple[str, list[int]]]) -> Share:
    """everyones : (`boot`, `allowed_cores`) of every rank of the job"""
    machines = [machine for machine, _ in everyones]
    here = [cores for machine, cores in everyones if machine == machines[rank]]
    threads = fair_threads(everyones[rank][1], here)
    return Share(len(set(machines)), threads, crowded=len(here) > len(set().union(*here)))


def sealed_memory(name: str, nbytes: int, *, whole: bool = False) -> int:
    """The descriptor of new, empty memory whose size nobody can change; whole : with all its pages. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        if whole:
            os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int, nbytes: int) -> bool:
    """Whether it is `sealed_memory` of this many bytes."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memfd
        return False
    return seals & _SEALS == _SEALS and os.fstat(fd).st_size == nbytes


def write_all(fd: int, data: Any, offset: int) -> None:
    """All of these bytes, from here on in the file. Raises OSError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        if not done:
            raise OSError(errno.EIO, "the store takes no bytes")
        view, offset = view[done:], offset + done
