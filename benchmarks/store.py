"""The stores that the benchmarks read from, and what they count.

* the bare disk: a file's pages are dropped from the page cache before a cold run, and that they are gone is checked;
* the throttled disk: ext4 in a file on a loop device (direct I/O, so that nothing is cached below it), its bandwidth
  capped by the kernel's blkio controller for the processes of one control group;
* a control group as a counter: bytes that really reached the device on behalf of a group of processes. That is the
  measure of redundant reading: neither read-ahead nor the page cache can hide from it;
* fio, always with --readonly: without it fio lays a file out again and destroys it.

What needs root or fio and does not have it raises `Unavailable` with the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pario.study.cache import Unavailable, cached_bytes, drop_file, warm_file

__all__ = [
    "Group",
    "Unavailable",
    "cached_bytes",
    "device_bytes",
    "device_of",
    "drop_all",
    "drop_file",
    "fio",
    "require_fio",
    "require_root",
    "throttled_disk",
    "warm_file",
]

PAGE = 4096
UNLIMITED = 1 << 40  # bytes/s; the controller counts only for devices that have a rule


def require_root(what: str) -> None:
    if os.geteuid() != 0:
        raise Unavailable(f"{what} needs root (this is user id {os.geteuid()})")


def require_fio() -> str:
    found = shutil.which("fio")
    if found is None:
        raise Unavailable("fio is not installed (Debian: apt-get install fio)")
    return found


# -- the page cache ---------------------------------------------------------------------------------------------------


def drop_all() -> None:
    """Drop every clean page of the machine (root)."""
    require_root("dropping all caches")
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


# -- devices and control groups ---------------------------------------------------------------------------------------


def device_of(path: str) -> tuple[str, str]:
    """("major:minor", name) of the whole block device under `path`."""
    number = os.stat(path).st_dev
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not link.exists():
        raise Unavailable(f"{path} does not lie on a block device (network or memory file system, overlay)")
    place = link.resolve()
    if (place / "partition").exists():  # the controller knows whole disks only
        place = place.parent
    return (place / "dev").read_text().strip(), place.name


def device_bytes(name: str) -> int:
    """Bytes that the device `name` has read since it exists, for everybody."""
    return int(Path(f"/sys/block/{name}/stat").read_text().split()[2]) * 512


@contextmanager
def _blkio_root() -> Iterator[Path]:
    """The mounted blkio controller of control groups version 1; mounted for us if nobody has."""
    require_root("counting or throttling device I/O")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        if kind == "cgroup" and "blkio" in options.split(","):
            yield Path(place)
            return
    place = tempfile.mkdtemp(prefix="pario-blkio-")
    try:
        done = subprocess.run(
            ["mount", "-t", "cgroup", "-o", "blkio", "none", place], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise Unavailable(f"no blkio controller of control groups version 1: {done.stderr.strip()}")
        try:
            yield Path(place)
        finally:
            subprocess.run(["umount", place], check=False)
    finally:
        os.rmdir(place)


@dataclass
class Group:
    """A control group whose reads from one device are counted, and capped if asked. Use as a context manager.

    device : "major:minor"
    bytes_per_s : cap of all reads of the group together; None = count only
    """

    device: str
    bytes_per_s: int | None = None
    path: Path = field(init=False)
    _stack: ExitStack = field(init=False, repr=False, default_factory=ExitStack)

    def __enter__(self) -> Group:
        with ExitStack() as stack:
            root = stack.enter_context(_blkio_root())
            self.path = root / f"pario-{uuid.uuid4().hex[:12]}"
            self.path.mkdir()
            stack.callback(self._remove)
            rule = f"{self.device} {self.bytes_per_s or UNLIMITED}\n"
            (self.path / "blkio.throttle.read_bps_device").write_text(rule)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _remove(self) -> None:
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except OSError:  # a process of the group is still ending
                time.sleep(0.1)
        users = (self.path / "cgroup.procs").read_text().split()
        raise RuntimeError(f"control group {self.path} is still in use by processes {users}")

    def command(self, command: Sequence[str]) -> list[str]:
        """The same command, started inside the group (its children are too)."""
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", *command]

    def bytes_read(self) -> int:
        """Bytes that the device has read for this group since it exists."""
        return self._count("blkio.throttle.io_service_bytes")

    def reads(self) -> int:
        """Reads of the device for this group since it exists, as the block layer made them."""
        return self._count("blkio.throttle.io_serviced")

    def _count(self, file: str) -> int:
        for line in (self.path / file).read_text().splitlines():
            if line.startswith(f"{self.device} Read"):
                return int(line.split()[2])
        return 0


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


@dataclass(frozen=True)
class Disk:
    """A mounted throttled disk."""

    folder: str
    device: str  # "major:minor"
    name: str  # loopN

    def copy(self, source: str) -> str:
        """Copy a file or folder onto the disk; its pages are dropped. Returns the new path."""
        target = os.path.join(self.folder, os.path.basename(source.rstrip("/")))
        if os.path.isdir(source):
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("lock.mdb", "*.pario.h5"))
        else:
            shutil.copyfile(source, target)
        _run("sync", "-f", self.folder)
        for file in [Path(target), *Path(target).rglob("*")]:
            if file.is_file():
                drop_file(str(file))
        return target


@contextmanager
def throttled_disk(folder: str, nbytes: int) -> Iterator[Disk]:
    """An ext4 file system of `nbytes` bytes in a file below `folder`, on a loop device without a cache below it.

    The cap itself is a `Group`'s. Mount, loop device and image are gone afterwards, whatever happens in between
    (a SIGKILL excepted: then `losetup -D` and `umount` are yours).
    """
    require_root("a loop device")
    for tool in ("losetup", "mkfs.ext4", "mount", "umount"):
        if shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
            raise Unavailable(f"{tool} is not installed (Debian: apt-get install util-linux mount e2fsprogs)")
    env_path = os.environ.get("PATH", "")
    with ExitStack() as stack:
        if "/usr/sbin" not in env_path.split(":"):
            os.environ["PATH"] = env_path + ":/usr/sbin:/sbin"
            stack.callback(os.environ.__setitem__, "PATH", env_path)
        work = tempfile.mkdtemp(prefix="pario-disk-", dir=folder)
        stack.callback(shutil.rmtree, work)
        image, place = os.path.join(work, "image"), os.path.join(work, "mnt")
        with open(image, "wb") as file:
            file.truncate(nbytes)
        # No journal and no lazy initialisation: nothing may write or read in the background while bytes are counted.
        _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=0", "-m", "0", image)
        loop = _run("losetup", "--find", "--show", "--direct-io=on", image)
        stack.callback(_run, "losetup", "--detach", loop)
        os.mkdir(place)
        _run("mount", "-o", "noatime", loop, place)
        stack.callback(_unmount, place)
        device, name = device_of(place)
        yield Disk(place, device, name)


def _unmount(place: str) -> None:
    for attempt in range(20):
        try:
            _run("umount", place)
            return
        except Unavailable:
            if attempt == 19:
                _run("umount", "--lazy", place)
            time.sleep(0.1)


# -- fio --------------------------------------------------------------------------------------------------------------


def fio(
    path: str,
    *,
    random: bool,
    read_bytes: int,
    depth: int,
    nbytes: int | None = None,
    group: Group | None = None,
) -> dict[str, float]:
    """Read a file with fio past the page cache (O_DIRECT), every block once.

    random : random or sequential order
    read_bytes : bytes per read
    depth : reads under way at once (libaio)
    nbytes : stop after that many bytes; None = the whole file

    Returns bytes, seconds and bytes_per_s.
    """
    command = [
        require_fio(),
        "--name=pario",
        f"--filename={path}",
        "--readonly",
        "--size=100%",
        "--thread",
        "--direct=1",
        f"--rw={'randread' if random else 'read'}",
        f"--bs={read_bytes}",
        "--ioengine=libaio" if depth > 1 else "--ioengine=psync",
        f"--iodepth={depth}",
        "--output-format=json",
    ]
    if random:
        command.append(f"--randseed={time.time_ns() % (1 << 31)}")
    if nbytes is not None:
        command.append(f"--io_size={nbytes // read_bytes * read_bytes}")
    before = os.stat(path)
    done = subprocess.run(
        group.command(command) if group else command, capture_output=True, text=True, check=False, timeout=900
    )
    after = os.stat(path)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise RuntimeError(f"fio changed {path}: its figures and the file are worthless now")
    if done.returncode != 0:
        raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    read = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    seconds = read["runtime"] / 1000
    return {"bytes": read["io_bytes"], "seconds": seconds, "bytes_per_s": read["io_bytes"] / max(seconds, 1e-3)}
