"""A slow shared store: a FUSE mount that passes a folder through with latency, and counts the requests.

A parallel file system is slow per operation, not per byte: every read and every metadata operation is a round trip. A
daemon in a separate process sleeps for that time, keeps one clock for the bandwidth that all readers share, and counts
requests per path. On request it stalls, refuses reads, cuts them short, or becomes slower or faster.

    with latency_store("/data/set", read_s=0.020, metadata_s=0.002, bytes_per_s=200_000_000) as store:
        Loader(store.folder, ...)
        store.counts()["/data.mdb"]["read"]

One mount is one node's view: its kernel caches look-ups and attributes for `cache_s` seconds. Emulated nodes that must
not share a cache get separate mounts. A Python daemon serves at most about 2,500 operations per second.

Needs /dev/fuse, fuse3 (Debian: apt-get install fuse3) and mfusepy (pip); raises `Unavailable` without.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.cache import Unavailable

__all__ = ["METADATA", "LatencyStore", "Operations", "latency_store", "serve"]

#: Metadata operations. FUSE's high-level interface does not distinguish a look-up of a name from a stat: both are
#: getattr.
METADATA = ("open", "getattr", "readdir", "create", "rename", "unlink", "mkdir", "statfs", "other")

#: Bytes of the largest request that the kernel makes.
_MAX_READ = 1 << 20

#: where the daemon's own process finds this folder
_ROOT = Path(__file__).resolve().parents[2]

_START_S = 20.0
_END_S = 5.0


class LatencyStore:
    """A mounted store, as the process that started it sees it. `folder` is the mount point.

    Counts are a dict: path in the store ("/data.mdb") -> {operation: number}. The operations are those of METADATA,
    "read", "write", "bytes" (read), "head" (reads that begin in the first 4 KiB, where LMDB's meta pages begin), and
    "most" (the largest number of reads of the path in flight at once).
    """

    def __init__(self, folder: str, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.pid = process.pid
        self._process = process
        self._lock = threading.Lock()

    def counts(self, reset: bool = False) -> dict[str, dict[str, int]]:
        """Requests since the start or the last reset."""
        return self._ask(do="counts", reset=reset)

    def reset(self) -> None:
        self.counts(reset=True)

    def total(self, *operations: str) -> int:
        """Sum over all paths, e.g. total("read"), total(*METADATA)."""
        return sum(of_path.get(operation, 0) for of_path in self.counts().values() for operation in operations)

    def read_ahead(self, nbytes: int) -> None:
        """Set the kernel's read-ahead on this mount (128 KiB by default). Only root can; raises Unavailable
        otherwise."""
        device = os.stat(self.folder).st_dev
        try:
            with open(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb", "w") as file:
                file.write(str(nbytes >> 10))
        except OSError as e:
            raise Unavailable(f"the read-ahead of a mount cannot be set ({e}): be root") from None

    def stall(self, seconds: float, only: str = "") -> None:
        """Answer no operation for this many seconds, including operations that already sleep."""
        self._ask(do="fault", stall_s=seconds, only=only)

    def refuse_reads(self, number: int = errno.EIO, only: str = "", from_byte: int = 0) -> None:
        """Let reads that extend to `from_byte` or beyond fail with this errno until `heal`."""
        self._ask(do="fault", errno=number, only=only, from_byte=from_byte)

    def shorten_reads(self, nbytes: int, only: str = "", from_byte: int = 0) -> None:
        """Let reads that extend to `from_byte` or beyond return at most `nbytes` until `heal`; 0: as at the end of the
        file.

        A read longer than one kernel request (1 MiB) consists of several requests.
        """
        self._ask(do="fault", short=nbytes, only=only, from_byte=from_byte)

    def refuse_writes(self, number: int = errno.EIO, only: str = "") -> None:
        """Let writes fail with this errno until `heal`."""
        self._ask(do="fault", write_errno=number, only=only)

    def change(
        self,
        *,
        read_s: float | None = None,
        bytes_per_s: float | None = None,
        serial: bool | None = None,
        written_per_s: float | None = None,
    ) -> None:
        """Be another store from now on: reads that begin later follow it, those under way end as they began.

        read_s : seconds that each read, and each write, takes
        bytes_per_s : bandwidth of all reads together; 0: no limit
        written_per_s : bytes per second of all writes together, besides the reads; 0, as at the start: no limit
        serial : one read at a time, as a disk with one arm serves them: the next one's `read_s` begins when the one
            before has ended
        None: as it was.
        """
        self._ask(do="change", read_s=read_s, bytes_per_s=bytes_per_s, serial=serial, written_per_s=written_per_s)

    def heal(self) -> None:
        """End all faults at once."""
        self._ask(do="heal")

    def lose_power(self, after: int = 0, seed: int | None = None) -> None:
        """Of a volatile store: after so many further changes and syncs all operations fail (EIO), and the source
        folder has what was synced, with a `seed` also a random part of the other changes. Nothing if it is lost."""
        self._ask(do="lose_power", after=after, seed=seed)

    def power_on(self) -> None:
        """Of a volatile store: go on with what the source folder has."""
        self._ask(do="power_on")

    def _ask(self, **what: Any) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
            return _answer(self._process, _START_S)


@contextmanager
def latency_store(
    source: str | os.PathLike[str],
    *,
    read_s: float = 0.020,
    metadata_s: float = 0.002,
    bytes_per_s: float | None = 200_000_000,
    cache_s: float = 1.0,
    page_cache: bool = False,
    writable: bool = False,
    threads: int = 64,
    daemon: Sequence[str] = ("-m", "benchmarks.stores.latency"),
) -> Iterator[LatencyStore]:
    """Mount `source` with latency in a temporary directory. Daemon and mount end with the context, even if this process
    dies.

    read_s, metadata_s : seconds that each read and each metadata operation takes
    bytes_per_s : bandwidth of all reads together; None: no limit
    cache_s : how long the kernel caches look-ups (also failed ones) and attributes; 0: every one reaches the store
    page_cache : False: every read reaches the store
    writable : pass writes and new files through; False: a read-only file system (EROFS)
    threads : operations that can sleep at once
    daemon : what Python runs; another one may be a volatile store (tests/system/volatile.py)
    """
    _require()
    folder = tempfile.mkdtemp(prefix="pario-latency-")
    setup = {
        "source": os.path.abspath(source),
        "folder": folder,
        "read_s": read_s,
        "metadata_s": metadata_s,
        "bytes_per_s": bytes_per_s,
        "cache_s": cache_s,
        "page_cache": page_cache,
        "writable": writable,
        "threads": threads,
    }
    said = tempfile.TemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, *daemon, json.dumps(setup)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        cwd=_ROOT,
        env={**os.environ, "FUSE_LIBRARY_NAME": "fuse3"},
        start_new_session=True,  # a Ctrl-C is for the tests; the daemon ends when they end
    )
    try:
        try:
            _answer(process, _START_S)
        except Unavailable:
            said.seek(0)
            raise Unavailable(
                f"the FUSE daemon did not start: {said.read().decode(errors='replace').strip() or 'silent'}"
            ) from None
        yield LatencyStore(folder, process)
    finally:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()  # it ends itself
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if os.path.ismount(folder) or not _readable(folder):
            subprocess.run(["umount", "--lazy", folder], check=False, capture_output=True)
        assert process.stdout is not None
        process.stdout.close()
        said.close()
        os.rmdir(folder)


def _require() -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise Unavailable("no right to use /dev/fuse (be root, with the fuse module)")
    if shutil.which("fusermount3") is None:
        raise Unavailable("fusermount3 is not installed (Debian: apt-get install fuse3)")
    if importlib.util.find_spec("mfusepy") is None:
        raise Unavailable("mfusepy is not installed (pip install mfusepy)")


def _readable(folder: str) -> bool:
    """False if the mount's daemon is gone."""
    try:
        os.stat(folder)
    except OSError:
        return False
    return True


def _answer(process: subprocess.Popen[bytes], limit_s: float) -> Any:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    line = process.stdout.readline() if ready else b""
    if not line:
        raise Unavailable(f"the FUSE daemon (process {process.pid}) is {'gone' if ready else 'silent'}")
    return json.loads(line)


# -- the daemon -------------------------------------------------------------------------------------------------------


class Operations:
    """The operations that libfuse calls, in many threads at once."""

    use_ns = True

    def __init__(self, setup: dict[str, Any]) -> None:
        self._source = setup["source"]
        self._read_s = setup["read_s"]
        self._metadata_s = setup["metadata_s"]
        self._bytes_per_s = setup["bytes_per_s"]
        self._serial = False
        self._written_per_s = 0.0
        self._lock = threading.Lock()
        self._free_at = 0.0  # the bandwidth's clock: when the last requested byte will have arrived
        self._written_at = 0.0  # the same of writes
        self._counts: dict[str, Counter[str]] = {}
        self._reading: Counter[str] = Counter()  # reads under way, per path
        self._faults: list[dict[str, Any]] = []
        self.ending = threading.Event()
        if not setup["writable"]:
            for name in ("create", "write", "truncate", "unlink", "rename", "mkdir", "rmdir", "chmod", "utimens"):
                setattr(self, name, _refuse)

    # what the other side asks

    def command(self, what: dict[str, Any]) -> Any:
        with self._lock:
            if what["do"] == "counts":
                counts = {path: dict(of_path) for path, of_path in self._counts.items()}
                if what["reset"]:
                    self._counts.clear()
                return counts
            if what["do"] == "heal":
                self._faults = []
            elif what["do"] == "change":
                for name in ("read_s", "bytes_per_s", "serial", "written_per_s"):
                    if what[name] is not None:
                        setattr(self, f"_{name}", what[name])
            else:
                what["until"] = time.monotonic() + what["stall_s"] if "stall_s" in what else None
                self._faults = [*self._faults, what]
        return {}

    # time and trouble

    def _spend(self, path: str, operation: str, seconds: float) -> str:
        """Count and sleep; returns the path in the source folder."""
        with self._lock:
            self._counts.setdefault(path, Counter())[operation] += 1
        self.ending.wait(seconds)
        self._stall(path)
        return self._source + path

    def _metadata(self, path: str, operation: str) -> str:
        return self._spend(path, operation, self._metadata_s)

    def _stall(self, path: str) -> None:
        while not self.ending.is_set():
            now = time.monotonic()
            if not any(f.get("until") and f["until"] > now and f["only"] in path for f in self._faults):
                return
            self.ending.wait(0.02)

    def _transfer(self, nbytes: int) -> None:
        """Wait until the last of the bytes has come."""
        seconds = self._read_s if self._serial else 0.0
        seconds += nbytes / self._bytes_per_s if self._bytes_per_s else 0.0
        if seconds:
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic()) + seconds
                left = self._free_at - time.monotonic()
            self.ending.wait(left)

    # reading

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._metadata(path, "getattr")) if fh is None else os.fstat(self._open(path, fh))
        wanted = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_blksize")
        times = {f"st_{t}": getattr(status, f"st_{t}_ns") for t in ("atime", "mtime", "ctime")}
        return {**{name: getattr(status, name) for name in wanted}, **times}

    def _open(self, path: str, fh: int) -> int:
        self._metadata(path, "getattr")
        return fh

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        with os.scandir(self._metadata(path, "readdir")) as entries:
            found = {entry.name: entry.inode() for entry in entries}
        # The C library ignores names without an inode.
        return [(name, {"st_ino": inode}, 0) for name, inode in {".": 1, "..": 1, **found}.items()]

    def open(self, path: str, flags: int) -> int:
        return os.open(self._metadata(path, "open"), flags & ~os.O_DIRECT)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        with self._lock:
            self._reading[path] += 1
            counts = self._counts.setdefault(path, Counter())
            counts["most"] = max(counts["most"], self._reading[path])
        try:
            return self._read(path, size, offset, fh)
        finally:
            with self._lock:
                self._reading[path] -= 1

    def _read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._spend(path, "read", 0.0 if self._serial else self._read_s)
        for fault in self._faults:
            if fault["only"] in path and offset + size > fault.get("from_byte", 0):
                if "errno" in fault:
                    raise OSError(fault["errno"], os.strerror(fault["errno"]))
                size = min(size, fault.get("short", size))
        data = os.pread(fh, size, offset)
        self._transfer(len(data))
        with self._lock:
            self._counts.setdefault(path, Counter()).update(bytes=len(data), head=int(offset < 4096))
        return data

    def readlink(self, path: str) -> str:
        return os.readlink(self._metadata(path, "other"))

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._metadata(path, "statfs"))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    # writing

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._metadata(path, "create"), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._spend(path, "write", self._read_s)
        for fault in self._faults:
            if fault["only"] in path and "write_errno" in fault:
                raise OSError(fault["write_errno"], os.strerror(fault["write_errno"]))
        done = os.pwrite(fh, data, offset)
        if self._written_per_s:
            with self._lock:
                self._written_at = max(self._written_at, time.monotonic()) + done / self._written_per_s
                left = self._written_at - time.monotonic()
            self.ending.wait(left)
        return done

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._metadata(path, "other"), length)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._metadata(path, "unlink"))
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._metadata(old, "rename"), self._source + new)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._metadata(path, "mkdir"), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._metadata(path, "other"))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._metadata(path, "other"), mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int]) -> int:
        os.utime(self._metadata(path, "other"), ns=times)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._metadata(path, "other")
        os.fsync(fh)
        return 0


def _refuse(*_: Any) -> int:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def serve(setup: dict[str, Any], operations: Operations) -> None:
    """The daemon: until its standard input ends."""
    import mfusepy

    out = os.fdopen(os.dup(1), "w")  # libfuse and whatever it loads may print
    asked = os.fdopen(os.dup(0), "rb", buffering=0)

    def say(what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    def listen() -> None:
        while line := asked.readline():
            say(operations.command(json.loads(line)))
        operations.ending.set()  # wakes all sleeping operations
        subprocess.run(["fusermount3", "-u", "-z", setup["folder"]], check=False, capture_output=True)
        os._exit(0)  # open files get ENOTCONN; otherwise the mount would wait for their owners

    def init(connection: Any, _: Any) -> None:
        connection.max_read = _MAX_READ  # libfuse needs it in both places
        threading.Thread(target=listen, daemon=True).start()
        say({})

    operations.init_with_config = init  # type: ignore[attr-defined]
    seconds = setup["cache_s"]
    mfusepy.FUSE(
        operations,
        setup["folder"],
        foreground=True,
        direct_io=not setup["page_cache"],
        use_ino=True,  # an index identifies its file by the inode
        max_read=_MAX_READ,
        max_threads=setup["threads"],
        entry_timeout=seconds,
        attr_timeout=seconds,
        negative_timeout=seconds,
        auto_unmount=True,  # also when this process is killed: fusermount3 waits for that
        fsname="pario-latency",
        ro=not setup["writable"],
    )


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    serve(given, Operations(given))
