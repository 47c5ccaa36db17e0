"""The stores of the benchmarks, and their counters.

* The bare disk: a file's pages are dropped from the page cache before a cold run, and the drop is verified.
* The throttled disk: ext4 in a file on a loop device (direct I/O, so nothing is cached below it). The kernel's blkio
  controller caps its bandwidth for the processes of one control group.
* A control group as a counter: bytes that the device really read on behalf of a group of processes. This measures
  redundant reading: neither read-ahead nor the page cache can hide anything from it.
* fio, always with --readonly: without it fio lays a file out again and destroys it.

Functions that need root or fio raise `Unavailable` with the reason if they do not have it.
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
from typing import Any

from benchmarks.cache import Unavailable, drop_file

__all__ = ["Disk", "Group", "device_of", "fio", "fio_jobs", "require_fio", "throttled_disk"]

UNLIMITED = 1 << 40  # bytes/s; the controller counts only for devices that have a rule


def _require_root(what: str) -> None:
    if os.geteuid() != 0:
        raise Unavailable(f"{what} needs root (this is user id {os.geteuid()})")


def require_fio() -> str:
    found = shutil.which("fio")
    if found is None:
        raise Unavailable("fio is not installed (Debian: apt-get install fio)")
    return found


# -- devices and control groups ---------------------------------------------------------------------------------------


def device_of(path: str) -> tuple[str, str]:
    """("major:minor", name) of the whole block device under `path`."""
    number = os.stat(path).st_dev
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not link.exists():
        raise Unavailable(f"{path} does not lie on a block device (network or memory file system, overlay)")
    device = link.resolve()
    if (device / "partition").exists():  # the controller knows only whole disks
        device = device.parent
    return (device / "dev").read_text().strip(), device.name


@contextmanager
def _blkio_root() -> Iterator[Path]:
    """The mounted blkio controller of control groups version 1; mounts it if necessary."""
    _require_root("counting or throttling device I/O")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mounted, kind, options = line.split()[:4]
        if kind == "cgroup" and "blkio" in options.split(","):
            yield Path(mounted)
            return
    mount = tempfile.mkdtemp(prefix="pario-blkio-")
    try:
        done = subprocess.run(
            ["mount", "-t", "cgroup", "-o", "blkio", "none", mount], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise Unavailable(f"no blkio controller of control groups version 1: {done.stderr.strip()}")
        try:
            yield Path(mount)
        finally:
            subprocess.run(["umount", mount], check=False)
    finally:
        os.rmdir(mount)


@dataclass
class Group:
    """A control group that counts, and on request caps, reads from one device. Use it as a context manager.

    device : "major:minor"
    bytes_per_s : cap of all reads of the group together; None: only count
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
        """The same command, started inside the group, with its children."""
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", *command]

    def bytes_read(self) -> int:
        """Bytes that the device has read for this group since its creation."""
        return self._count("blkio.throttle.io_service_bytes")

    def reads(self) -> int:
        """Reads of the device for this group since its creation, as the block layer issued them."""
        return self._count("blkio.throttle.io_serviced")

    def _count(self, file: str) -> int:
        for line in (self.path / file).read_text().splitlines():
            if line.startswith(f"{self.device} Read"):
                return int(line.split()[2])
        return 0


def _tools_path() -> str:
    """PATH with the directories of root's tools, which not every root has in PATH."""
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _run(*command: str) -> str:
    environment = {**os.environ, "PATH": _tools_path()}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
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
        """Copy a file or folder onto the disk and drop its pages. Returns the new path."""
        target = os.path.join(self.folder, os.path.basename(source.rstrip("/")))
        if os.path.isdir(source):
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("lock.mdb", "*.pario.index"))
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

    A `Group` sets the cap. Mount, loop device and image are removed afterwards, whatever happens in between (except
    after SIGKILL: then run `umount` and `losetup -D`).
    """
    _require_root("a loop device")
    for tool in ("losetup", "mkfs.ext4", "mount", "umount"):
        if shutil.which(tool, path=_tools_path()) is None:
            raise Unavailable(f"{tool} is not installed (Debian: apt-get install util-linux mount e2fsprogs)")
    with ExitStack() as stack:
        work = tempfile.mkdtemp(prefix="pario-disk-", dir=folder)
        stack.callback(shutil.rmtree, work)
        image, mount = os.path.join(work, "image"), os.path.join(work, "mnt")
        with open(image, "wb") as file:
            file.truncate(nbytes)
        # No journal and no lazy initialisation: no background I/O may disturb the counters.
        _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=0", "-m", "0", image)
        loop = _run("losetup", "--find", "--show", "--direct-io=on", image)
        stack.callback(_run, "losetup", "--detach", loop)
        os.mkdir(mount)
        _run("mount", "-o", "noatime", loop, mount)
        stack.callback(_unmount, mount)
        device, name = device_of(mount)
        yield Disk(mount, device, name)


def _unmount(mount: str) -> None:
    for attempt in range(20):
        try:
            _run("umount", mount)
            return
        except Unavailable:
            if attempt == 19:
                _run("umount", "--lazy", mount)
            time.sleep(0.1)


# -- fio --------------------------------------------------------------------------------------------------------------


def fio_jobs(
    words: Sequence[str], files: Sequence[str], *, group: Group | None = None, timeout_s: float = 900
) -> list[dict[str, Any]]:
    """What fio says of its jobs. files : which it must not change; then it runs with --readonly"""
    command = [require_fio(), *(["--readonly"] if files else []), "--thread", "--direct=1", "--output-format=json"]
    command += words
    before = [os.stat(file) for file in files]
    try:
        done = subprocess.run(
            group.command(command) if group else command, capture_output=True, text=True, check=False,
            timeout=timeout_s, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unavailable("fio did not end in time") from None
    for file, was in zip(files, before, strict=True):
        now = os.stat(file)
        if (was.st_size, was.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
            raise RuntimeError(f"fio changed {file}, or somebody else did: its figures are worthless now")
    if done.returncode != 0 or "{" not in done.stdout:
        raise Unavailable(f"fio failed: {(done.stderr or done.stdout).strip()[:300]}")
    jobs: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return jobs


def fio(path: str, *, random: bool, read_bytes: int, depth: int, group: Group | None = None) -> dict[str, float]:
    """Read every block of a file once with fio, bypassing the page cache (O_DIRECT).

    random : random or sequential order
    read_bytes : bytes per read
    depth : reads in flight at once (libaio)

    Returns bytes, seconds and bytes_per_s.
    """
    words = ["--name=pario", f"--filename={path}", "--size=100%", f"--rw={'randread' if random else 'read'}"]
    words += [f"--bs={read_bytes}", f"--ioengine={'libaio' if depth > 1 else 'psync'}", f"--iodepth={depth}"]
    if random:
        words.append(f"--randseed={time.time_ns() % (1 << 31)}")
    read = fio_jobs(words, [path], group=group)[0]["read"]
    seconds = read["runtime"] / 1000
    return {"bytes": read["io_bytes"], "seconds": seconds, "bytes_per_s": read["io_bytes"] / max(seconds, 1e-3)}
