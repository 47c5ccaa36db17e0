"""`files view`: unmodified programs see the records of an LMDB as files. The oracles are the programs themselves, on
real files, and what py-lmdb wrote."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from required import skip_or_fail

from benchmarks.files_programs import compare_programs, kill_supervisors, write_lmdb
from pario.commands.files import view
from pario.commands.mpiexec import find_mpiexec
from pario.errors import OptionError, ParioError
from pario.files import notify, numbers
from pario.files.crew import Crew, Duty
from pario.files.held import HeldFiles, Wanted
from pario.files.numbers import CALLS, NUMBERS
from pario.files.spots import Escaped, Prefixes, Spot, checked_prefix

LIMIT_S = 60

#: under the view: what Python's own functions find, compared with argv[2], a folder of real files
PYTHON = """
import errno, mmap, os, subprocess, sys, threading
view, real = sys.argv[1:]
def walk(top):
    return sorted((os.path.relpath(os.path.join(d, n), top), open(os.path.join(d, n), "rb").read())
                  for d, _, names in os.walk(top) for n in names)
assert walk(view) == walk(real)
os.chdir(view + "/a")
assert os.getcwd() == view + "/a" and os.path.samefile(".", view + "/a")
assert open("b/two", "rb").read() == open("../a/b/two", "rb").read() == b"2" * 5000
assert os.stat("../one").st_size == 4 and os.path.realpath("../one") == view + "/one"
fd = os.open(view, os.O_RDONLY)
assert open(os.open("one", os.O_RDONLY, dir_fd=fd), "rb").read() == b"one\\n" and os.stat("one", dir_fd=fd).st_size == 4
assert sorted(os.listdir(fd)) == ["a", "empty", "one"] == sorted(e.name for e in os.scandir(view))
os.fchdir(fd)
assert os.getcwd() == view
with open("one", "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as m:
    assert m[:] == b"one\\n"
    there, here = os.stat("one"), os.fstat(f.fileno())
    assert (there.st_ino, there.st_dev, there.st_size, there.st_mode, there.st_mtime) == (
        here.st_ino, here.st_dev, here.st_size, here.st_mode, here.st_mtime)
for number, call in [
    (errno.EROFS, lambda: open("one", "r+")), (errno.EROFS, lambda: open("new", "w")),
    (errno.EROFS, lambda: os.mkdir("new")), (errno.EROFS, lambda: os.unlink("one")),
    (errno.EROFS, lambda: os.chmod("one", 0)), (errno.EEXIST, lambda: os.mkdir("a")),
    (errno.EXDEV, lambda: os.rename("one", real + "/x")), (errno.EROFS, lambda: os.rename("one", "x")),
    (errno.ENOENT, lambda: os.stat("x")), (errno.ENOTDIR, lambda: os.stat("one/x")),
    (errno.ENOTDIR, lambda: os.listdir("one")),
    (errno.EISDIR, lambda: os.open("a", os.O_WRONLY)), (errno.EINVAL, lambda: os.readlink("one")),
    (errno.ENOTDIR, lambda: os.stat("one/")), (errno.EACCES, lambda: os.execv("one", ["one"])),
]:
    try:
        call()
    except OSError as e:
        assert e.errno == number, (number, e)
    else:
        raise AssertionError(number)
# Through what is open, by paths that go through the view, and by descriptors.
assert open("/proc/self/cwd/one", "rb").read() == open(f"/dev/fd/{fd}/a/../one", "rb").read() == b"one\\n"
assert open(view + "/a/b/../" + "../" * (view.count("/") + 1) + real[1:] + "/one", "rb").read() == b"one\\n"
assert os.readlink("/proc/self/cwd") == os.readlink(f"/proc/{os.getpid()}/fd/{fd}") == view
one = os.open("one", os.O_RDONLY)
assert os.readlink(f"/proc/self/fd/{one}") == view + "/one" and os.path.realpath(f"/dev/fd/{one}") == view + "/one"
for number, call in [
    (errno.EROFS, lambda: os.fchmod(one, 0)), (errno.EROFS, lambda: os.fchmod(fd, 0)),
    (errno.EROFS, lambda: os.utime(one, (1, 1))), (errno.EROFS, lambda: os.fchown(one, 0, 0)),
    (errno.EROFS, lambda: os.setxattr(one, "user.x", b"1")), (errno.EROFS, lambda: os.mkdir(f"/proc/self/fd/{fd}/new")),
    (errno.ENAMETOOLONG, lambda: os.stat("x" * 256)), (errno.EXDEV, lambda: os.rename(real + "/one", "new")),
]:
    try:
        call()
    except OSError as e:
        assert e.errno == number, (number, e)
    else:
        raise AssertionError(number)
assert os.access("one", os.R_OK) and not os.access("one", os.W_OK) and not os.access("one", os.X_OK)
# Out of the view by a relative path.
up = "../" * view.count("/") + real[1:]
assert open(up + "/one", "rb").read() == b"one\\n" and os.stat(up + "/one").st_size == 4
os.mkdir(up + "/made"); open(up + "/made/x", "w").close(); os.rename(up + "/made/x", up + "/made/y")
os.unlink(up + "/made/y"); os.rmdir(up + "/made")
assert subprocess.run(["cat", "one"], cwd=view, capture_output=True).stdout == b"one\\n"
wrong = []
def look():
    for _ in range(50):
        if open(view + "/a/b/two", "rb").read() != b"2" * 5000:
            wrong.append(1)
threads = [threading.Thread(target=look) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not wrong
os.chdir(up)
assert os.getcwd() == os.path.realpath(real)
print("all is well")
"""

#: under the view: pictures by class with four workers, as torchvision's ImageFolder reads them; an array; an HDF5 file
LIBRARIES = """
import multiprocessing, os, sys
import h5py, numpy
from PIL import Image
top = sys.argv[1]
def load(path):
    with open(path, "rb") as file:
        return int(numpy.asarray(Image.open(file).convert("RGB")).astype(int).sum())
if __name__ == "__main__":
    classes = sorted(entry.name for entry in os.scandir(top + "/train") if entry.is_dir())
    folders = [f"{top}/train/{name}" for name in classes]
    paths = [os.path.join(each, name) for each in folders for name in sorted(os.listdir(each))]
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(4) as pool:
            sums = pool.map(load, paths)
    array = numpy.load(top + "/array.npy", mmap_mode="r")
    private = numpy.load(top + "/array.npy", mmap_mode="c")
    private[0] = 5
    with h5py.File(top + "/set.h5") as file:
        print(len(classes), sum(sums), int(array.sum()), int(private.sum()), int(file["x"][:].sum()))
"""

#: two ranks under one view
RANKS = """
import hashlib, os, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
names = sorted(os.path.join(d, n) for d, _, all_ in os.walk(sys.argv[1]) for n in all_)
mine = [hashlib.md5(open(name, "rb").read()).hexdigest() for name in names[comm.rank :: comm.size]]
found = sorted(sum(comm.allgather(mine), []))
if comm.rank == 0:
    print(comm.size, *found)
"""

#: under the view: every name of an open record, and every call that would change it. argv[2] is a scratch folder
CHANGES = """
import ctypes, fcntl, mmap, os, struct, subprocess, sys
view, scratch = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
def raw(number, *words):
    done = libc.syscall(ctypes.c_long(number), *words)
    if done < 0:
        raise OSError(ctypes.get_errno(), "raw call")
os.stat(view + "/a/three")  # the supervisor holds it empty
fd, mine = os.open(view + "/one", os.O_RDONLY), os.getpid()
child = subprocess.Popen(["sleep", "100"], stdin=fd)
mapped = mmap.mmap(fd, 4, prot=mmap.PROT_READ)
os.dup2(fd, 0)
os.symlink(f"/proc/self/fd/{fd}", scratch + "/link")
os.symlink("link", scratch + "/again")
os.symlink("/proc/self/fd", scratch + "/folder")
names = [
    f"/proc/self/fd/{fd}", f"/proc/thread-self/fd/{fd}", f"/proc/{mine}/fd/{fd}", f"/proc/self/task/{mine}/fd/{fd}",
    f"/proc/{child.pid}/fd/0", f"/dev/fd/{fd}", "/dev/stdin", f"/proc/./self//fd/../fd/{fd}",
    f"/proc/self/root/proc/self/fd/{fd}", view + "/.." * view.count("/") + f"/proc/self/fd/{fd}",
    scratch + "/link", scratch + "/again", f"{scratch}/folder/{fd}", "../" * 20 + f"proc/self/fd/{fd}",
]
for mapping in open("/proc/self/maps"):
    if "memfd:" in mapping:
        names.append(f"/proc/self/map_files/{mapping.split()[0].lstrip('0')}")
try:
    theirs = [f"/proc/{os.getppid()}/fd/{each}" for each in os.listdir(f"/proc/{os.getppid()}/fd")]
    names += [each for each in theirs if os.readlink(each).startswith(("/memfd:" + view, view))]
except PermissionError:
    theirs = []
there = os.open("/proc/self/fd", os.O_RDONLY)
change = {
    "chmod": lambda name: os.chmod(name, 0o666), "chmod x": lambda name: os.chmod(name, 0o555),
    "chown": lambda name: os.chown(name, os.getuid(), os.getgid()), "utime": lambda name: os.utime(name, (7, 7)),
    "setxattr": lambda name: os.setxattr(name, "user.x", b"1"),
    "removexattr": lambda name: os.removexattr(name, "user.x"),
    "truncate": lambda name: os.truncate(name, 1), "write": lambda name: os.write(os.open(name, os.O_RDWR), b"x"),
    "append": lambda name: os.write(os.open(name, os.O_WRONLY | os.O_APPEND), b"x"),
    "cut": lambda name: os.open(name, os.O_WRONLY | os.O_TRUNC),
}
tries = [(f"{how} {name}", lambda act=act, name=name: act(name)) for how, act in change.items() for name in names]
generic = os.uname().machine != "x86_64"
CHOWNAT, UTIMENSAT = (54, 88) if generic else (260, 280)
value = ctypes.create_string_buffer(b"1")
attribute = struct.pack("QII", ctypes.addressof(value), 1, 0)
tries += {
    "fchmod": lambda: os.fchmod(fd, 0o666), "fchown": lambda: os.fchown(fd, 1, 1),
    "fsetxattr": lambda: os.setxattr(fd, "user.x", b"1"), "fremovexattr": lambda: os.removexattr(fd, "user.x"),
    "futimens": lambda: os.utime(fd, (1, 1)), "utimensat": lambda: os.utime(str(fd), (6, 6), dir_fd=there),
    "fchmodat": lambda: os.chmod(str(fd), 0o600, dir_fd=there),
    "fchownat": lambda: os.chown(str(fd), 1, 1, dir_fd=there),
    "flags": lambda: fcntl.ioctl(fd, 0x40086602, struct.pack("l", 0x40)),
    "project": lambda: fcntl.ioctl(fd, 0x401C5820, struct.pack("IIIII8x", 0x80, 0, 0, 0, 0)),
    "hint": lambda: fcntl.fcntl(fd, 1036, struct.pack("Q", 2)),
    "lease": lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "lease against all": lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK),
    "delegation": lambda: fcntl.fcntl(fd, 1040, struct.pack("IHH", 0, 0, 0)), "seal": lambda: fcntl.fcntl(fd, 1033, 1),
    "fchownat, empty": lambda: raw(CHOWNAT, fd, b"", 5, 5, 0x1000),
    "fchownat, none": lambda: raw(CHOWNAT, fd, None, 5, 5, 0x1000),
    "fchmodat2, empty": lambda: raw(452, fd, b"", 0o600, 0x1000),
    "fchmodat2, none": lambda: raw(452, fd, None, 0o600, 0x1000),
    "utimensat, empty": lambda: raw(UTIMENSAT, fd, b"", None, 0x1000),
    "utimensat, none": lambda: raw(UTIMENSAT, fd, None, None, 0),
    "setxattrat, empty": lambda: raw(463, fd, b"", 0x1000, b"user.x", attribute, 16),
    "setxattrat, none": lambda: raw(463, fd, None, 0x1000, b"user.x", attribute, 16),
    "file_setattr, empty": lambda: raw(469, fd, b"", bytes(24), 24, 0x1000),
    "file_setattr, none": lambda: raw(469, fd, None, bytes(24), 24, 0x1000),
    "link": lambda: os.link(f"/proc/self/fd/{fd}", scratch + "/made", follow_symlinks=True),
    "ftruncate": lambda: os.ftruncate(fd, 1), "fallocate": lambda: os.posix_fallocate(fd, 0, 9),
    "pwrite": lambda: os.pwrite(fd, b"x", 0), "mmap": lambda: mmap.mmap(fd, 4, prot=mmap.PROT_READ | mmap.PROT_WRITE),
}.items()
def seen():
    other = os.open(view + "/one", os.O_RDONLY)
    found = os.fstat(other), os.stat(view + "/a/three"), os.pread(other, 9, 0), fcntl.fcntl(other, 1035, bytes(8))
    marks = fcntl.ioctl(other, 0x80086601, bytes(8))
    os.close(other)
    status = [(s.st_mode, s.st_uid, s.st_gid, s.st_mtime_ns, s.st_size, s.st_ctime_ns) for s in found[:2]]
    return *status, *found[2:], marks
before, wrong = seen(), []
for name, act in tries:
    try:
        act()
        wrong.append(name)
    except OSError:
        pass
    if seen() != before:
        wrong.append("changed by " + name)
        before = seen()
child.kill()
os.utime(scratch + "/link", (1, 1), follow_symlinks=False)
os.chown(scratch + "/again", os.getuid(), os.getgid(), follow_symlinks=False)
os.unlink(scratch + "/link")
own = os.open(scratch + "/own", os.O_CREAT | os.O_RDWR)
for name in (f"/proc/self/fd/{own}", f"/dev/fd/{own}", scratch + f"/folder/{own}"):
    os.chmod(name, 0o600)
    os.utime(name, (1, 1))
    os.write(os.open(name, os.O_RDWR), b"x")
assert open(view + "/a/three", "rb").read() == bytes(range(256)) * 1000
print(len(tries), wrong)
"""

FILES = {"one": b"one\n", "empty": b"", "a/b/two": b"2" * 5000, "a/three": bytes(range(256)) * 1000}


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    try:
        notify.check_kernel()
    except ParioError as e:
        skip_or_fail(str(e))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """LMDB=FOLDER, that folder, and a folder of the same files"""
    top = tmp_path_factory.mktemp("view").resolve()
    write_lmdb(top / "set.lmdb", FILES)
    for name, data in FILES.items():
        (top / "real" / name).parent.mkdir(parents=True, exist_ok=True)
        (top / "real" / name).write_bytes(data)
    return f"{top}/set.lmdb={top}/data", top / "data", top / "real"


def under(shown: str, *command: str, **options: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pario", "files", "view", shown, "--", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, **options)  # type: ignore[call-overload]


def test_python_sees_files(shown: tuple[str, Path, Path]) -> None:
    done = under(shown[0], sys.executable, "-c", PYTHON, str(shown[1]), str(shown[2]))
    assert (done.returncode, done.stdout) == (0, "all is well\n"), done.stderr


def changes(shown: tuple[str, Path, Path], scratch: Path, *before: str, code: str = "") -> None:
    program = [sys.executable, "-c", CHANGES, str(shown[1]), str(scratch)]
    start = f"import runpy, sys\n{code}\nsys.argv[0] = 'pario'\nrunpy.run_module('pario', run_name='__main__')"
    words = [*before, sys.executable, "-c", start, "files", "view", shown[0], "--", *program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    tries, _, wrong = done.stdout.partition(" ")
    assert (wrong, int(tries or 0) >= 150) == ("[]\n", True), (done.stdout, done.stderr)


def test_no_name_of_a_record_changes_it(shown: tuple[str, Path, Path], tmp_path: Path) -> None:
    changes(shown, tmp_path)


@pytest.mark.full
def test_no_name_changes_it_on_older_kernels(shown: tuple[str, Path, Path], tmp_path: Path) -> None:
    """Before Linux 6.3 nothing kept chmod from making a memfd executable."""
    changes(shown, tmp_path, code="from pario.files import held; held._NOEXEC = 1 << 30")


def test_a_shell_and_its_programs(shown: tuple[str, Path, Path]) -> None:
    """Names, pipes, copies, exit status, signals and error texts."""
    pairing, view, real = shown
    script = f"""
        cd {view} && pwd && find . -type f | sort | xargs md5sum && cat a/three | tail -c 9 | wc -c
        cp -r {view} {real}-copy && diff -r {real} {real}-copy && echo same; tar cf - . | tar tf - | wc -l
        ls -lR | grep -c '^-r--r--r-- 1'; cat < nothing; exit 7"""
    done = under(pairing, "sh", "-c", script)
    sums = [f"{hashlib.md5(FILES[name]).hexdigest()}  ./{name}" for name in sorted(FILES)]
    assert done.stdout.splitlines() == [str(view), *sums, "9", "same", "7", "4"], done.stderr
    assert done.returncode == 7
    assert "nothing" in done.stderr


def test_wrong_arguments(shown: tuple[str, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairing, _, real = shown
    with pytest.raises(OptionError, match="exists and is no empty folder"):
        checked_prefix(str(real))
    with pytest.raises(OptionError, match="there is no folder"):
        checked_prefix(str(tmp_path / "x" / "y"))
    for prefix in ("/", "/proc/x", "/dev"):
        with pytest.raises(OptionError, match="cannot be at"):
            checked_prefix(prefix)
    (tmp_path / "setuid").touch()
    (tmp_path / "setuid").chmod(0o4755)
    monkeypatch.setattr(os, "geteuid", lambda: 77)
    for words, why in [
        (["true"], "LMDB=FOLDER"),
        ([pairing], "no program"),
        ([pairing, pairing + "/b", "true"], "lies in"),
        ([pairing, str(tmp_path / "setuid")], "no program under a view may gain privileges"),
    ]:
        with pytest.raises(OptionError, match=why):
            view.callback(words, False, "1GiB", None, None)
    for held in ("auto", "10%"):
        with pytest.raises(OptionError, match=r"--held .* is not a size"):
            view.callback([pairing, "true"], False, held, None, None)
    with pytest.raises(OptionError, match="--output DIR"):
        view.callback([pairing, "true"], False, "1GiB", None, str(tmp_path))
    outputs = str(tmp_path / "out"), str(tmp_path / "local")
    (tmp_path / "local").mkdir()
    with pytest.raises(OptionError, match="no program under a view may gain privileges"):
        view.callback([pairing, str(tmp_path / "setuid")], False, "1GiB", *outputs)
    assert os.listdir(tmp_path / "local") == []


@pytest.mark.full
def test_what_cannot_run_says_why(shown: tuple[str, Path, Path]) -> None:
    pairing, _, real = shown
    missing = under(pairing, "no-such-program")
    assert missing.returncode == 127
    assert "there is no program 'no-such-program'" in missing.stderr
    assert under(pairing, str(real)).returncode == 126
    nested = under(pairing, sys.executable, "-m", "pario", "files", "view", pairing + "2", "--", "true")
    assert nested.returncode == 1
    assert "Give all datasets to one view" in nested.stderr
    no_set = under(pairing.replace("set.lmdb", "none.lmdb"), "true")
    assert no_set.returncode == 1
    assert "none.lmdb" in no_set.stderr
    died = under(pairing, "sh", "-c", "kill -9 $$")
    assert died.returncode == 128 + 9
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"pario-view-{os.getuid()}-")]


#: under the view: two listings of one folder in turns; a writer comes meanwhile, whose LMDB is argv[2]
LISTINGS = """
import errno, os, sys
import lmdb
view, path = sys.argv[1:]
one, other = os.scandir(view + "/many"), os.scandir(view + "/many")
names = [[], []]
for _ in range(20000):
    for k, each in enumerate((one, other)):
        found = next(each, None)
        if found:
            names[k].append(found.name)
assert names[0] == names[1] and len(names[0]) == 20000 and names[0][7] == "00007%0A", len(names[0])
assert open(view + "/caf\u00e9", "rb").read() == b"1"
assert os.readlink(f"/proc/self/fd/{os.open(view + '/caf\u00e9', os.O_RDONLY)}") == view + "/caf\u00e9"
for k in range(3):
    with lmdb.open(path) as env, env.begin(write=True) as txn:
        txn.put(b"new", b"%d" % k * 100000)
try:
    open(view + "/large", "rb").close()
except OSError as e:
    assert e.errno == errno.ESTALE, e
else:
    raise AssertionError("a file that a writer may have changed")
print("all is well")
"""


@pytest.mark.full
@pytest.mark.parametrize("utf8", [True, False])
def test_large_folders_other_alphabets_and_writers(tmp_path: Path, utf8: bool) -> None:
    top = tmp_path.resolve()
    files = {f"many/{k:05d}\n": b"1" for k in range(20000)}
    write_lmdb(top / "set.lmdb", {**files, "caf\u00e9": b"1", "large": bytes(100_000)})
    # A supervisor whose own file names are ASCII.
    env = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX"}
    program = [sys.executable, "-X", "utf8", "-c", LISTINGS, f"{top}/data", f"{top}/set.lmdb"]
    done = under(f"{top}/set.lmdb={top}/data", *program, env=os.environ if utf8 else env)
    assert (done.returncode, done.stdout) == (0, "all is well\n"), done.stderr
    assert "SnapshotError" in done.stderr
    assert "programs get ESTALE" in done.stderr


#: under the view: processes that open, list and change folders die at random moments, and the supervisor loses nothing
DYING = """
import os, random, subprocess, sys, time
view = sys.argv[1]
WORK = '''
import os, sys, threading
def work():
    while True:
        for name in ("one", "a/three"):
            fd = os.open(sys.argv[1] + "/" + name, os.O_RDONLY); os.stat(sys.argv[1] + "/" + name); os.close(fd)
        os.listdir(sys.argv[1] + "/a"); os.chdir(sys.argv[1] + "/a/b")
for _ in range(4):
    threading.Thread(target=work).start()
'''
def open_files():
    return len(os.listdir(f"/proc/{os.getppid()}/fd"))
rng = random.Random(3)
before = open_files()
for _ in range(20):
    crew = [subprocess.Popen([sys.executable, "-S", "-c", WORK, view], stderr=subprocess.DEVNULL) for _ in range(2)]
    time.sleep(rng.random() / 4)
    for each in crew:
        each.kill()
    for each in crew:
        each.wait()
assert open(view + "/a/b/two", "rb").read() == b"2" * 5000
assert open_files() <= before + 4, (before, open_files())
print("all is well")
"""


@pytest.mark.full
def test_programs_that_die_leave_nothing_in_the_supervisor(shown: tuple[str, Path, Path]) -> None:
    done = under(shown[0], sys.executable, "-c", DYING, str(shown[1]))
    assert (done.returncode, done.stdout) == (0, "all is well\n"), done.stderr


@pytest.mark.full
def test_a_kernel_that_hands_no_descriptors_over(shown: tuple[str, Path, Path]) -> None:
    code = f"""
from pario.commands.files import view
from pario.files import notify
notify.Listener.can_hand = lambda self: False
view.callback([{shown[0]!r}, "sleep", "1000"], False, "1GiB", None, None)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "needs Linux 5.9" in done.stderr
    assert "pario files mount" in done.stderr


@pytest.mark.full
def test_signals_reach_the_program(shown: tuple[str, Path, Path]) -> None:
    words = [sys.executable, "-m", "pario", "files", "view", shown[0], "--", "sh", "-c"]
    words.append(f"trap 'cat {shown[1]}/one; exit 3' TERM; echo up; while :; do sleep 0.05; done")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        assert run.stdout.readline() == "up\n"
        run.send_signal(signal.SIGTERM)
        assert run.stdout.read() == "one\n"
        assert run.wait(LIMIT_S) == 3


@pytest.mark.full
def test_what_goes_on_behind(shown: tuple[str, Path, Path], tmp_path: Path) -> None:
    """The command returns with its program; what that left running still sees the files."""
    late, go = tmp_path / "late", tmp_path / "go"
    waits = f"while [ ! -e {go} ]; do sleep 0.1; done"
    done = under(shown[0], "sh", "-c", f"({waits}; cat {shown[1]}/one > {late}) >/dev/null 2>&1 & exit 5")
    assert done.returncode == 5
    go.touch()
    end = time.monotonic() + LIMIT_S
    while not (late.exists() and late.stat().st_size) and time.monotonic() < end:
        time.sleep(0.05)
    assert late.read_text() == "one\n"


def test_a_killed_supervisor_leaves_no_folder(shown: tuple[str, Path, Path]) -> None:
    words = [sys.executable, "-m", "pario", "files", "view", shown[0], "--", "sh", "-c", "echo up; read x"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout
        assert run.stdout.readline() == b"up\n"
        (supervisor,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        links = map(os.readlink, Path(f"/proc/{supervisor}/fd").iterdir())
        (lock,) = [each for each in links if "pario-view-" in each]
        assert os.path.exists(lock)
        os.kill(int(supervisor), signal.SIGKILL)
        _, said = run.communicate(timeout=LIMIT_S)
    assert b"the supervisor of the view ended with status -9" in said
    assert not os.path.exists(os.path.dirname(lock))


@pytest.mark.full
def test_libraries_and_workers(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    top = tmp_path.resolve()
    rng = np.random.default_rng(0)
    files, sums = {}, 0
    for k in range(40):
        pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        sums += int(pixels.sum())
        with io.BytesIO() as file:
            image.fromarray(pixels).save(file, "PNG")
            files[f"train/{k % 5}/{k}.png"] = file.getvalue()
    array = np.arange(50_000)
    with io.BytesIO() as file:
        np.save(file, array)
        files["array.npy"] = file.getvalue()
    with io.BytesIO() as file:
        with h5py.File(file, "w") as made:
            made["x"] = array[:100]
        files["set.h5"] = file.getvalue()
    write_lmdb(top / "set.lmdb", files)
    (top / "use.py").write_text(LIBRARIES)
    done = under(f"{top}/set.lmdb={top}/data", sys.executable, f"{top}/use.py", f"{top}/data")
    expected = [5, sums, int(array.sum()), int(array.sum()) + 5, 4950]
    assert done.stdout.split() == [str(each) for each in expected], done.stderr


@pytest.mark.full
def test_two_ranks(shown: tuple[str, Path, Path]) -> None:
    mpiexec, why = find_mpiexec()
    if why:
        skip_or_fail(why)
    done = under(shown[0], *mpiexec, "-n", "2", sys.executable, "-c", RANKS, str(shown[1]), stdin=subprocess.DEVNULL)
    expected = sorted(hashlib.md5(data).hexdigest() for data in FILES.values())
    assert done.stdout.split() == ["2", *expected], done.stderr


@pytest.mark.full
def test_a_static_program(tmp_path: Path) -> None:
    """glibc's ldconfig, which always is one, maps the file that it reads."""
    ldconfig, cache, top = shutil.which("ldconfig", path="/sbin:/usr/sbin"), "/etc/ld.so.cache", tmp_path.resolve()
    if ldconfig is None or not os.path.exists(cache):
        skip_or_fail("no ldconfig of glibc here")
        return
    linked = subprocess.run(["ldd", ldconfig], capture_output=True, text=True)
    assert "statically" in linked.stdout or "not a dynamic" in linked.stderr, linked
    write_lmdb(top / "set.lmdb", {"cache": Path(cache).read_bytes()})
    natively = subprocess.run([ldconfig, "-p", "-C", cache], capture_output=True, text=True, check=True).stdout
    done = under(f"{top}/set.lmdb={top}/data", ldconfig, "-p", "-C", f"{top}/data/cache")
    assert done.stdout == natively.replace(cache, f"{top}/data/cache"), done.stderr


@pytest.mark.full
def test_random_programs_do_not_notice() -> None:
    assert compare_programs(100, seed=1) == []


@pytest.mark.full
def test_killed_supervisors_leave_errors_and_no_hang() -> None:
    assert kill_supervisors(8, seed=2) == []


# -- parts -------------------------------------------------------------------------------------------------------------


def test_prefixes(tmp_path: Path) -> None:
    """Paths with dots, slashes and symbolic links, as the kernel reads them."""
    (tmp_path / "deep" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to("deep/real")
    shown = f"{tmp_path}/link/data"
    prefixes = Prefixes(["/view", shown], lambda spot: spot.path in ("", "a", "a/b"))
    for path, found in {
        "/view": Spot(0, ""),
        "/view/": Spot(0, "", True),
        "/view/a//b/./c": Spot(0, "a/b/c"),
        "/view/a/../x": Spot(0, "x"),
        "/view/..": Escaped(b"/"),
        "/view/a/../../etc/": Escaped(b"/etc/"),
        "/etc/../view2/..": None,
        "/view2": None,
        "/vie": None,
        "/view/a/b/../../../view/q/": Spot(0, "q", True),
        "/tmp/../view/x": Spot(0, "x"),
        f"{shown}/x": Spot(1, "x"),
        f"{tmp_path}/deep/real/data/x": Spot(1, "x"),
        f"{tmp_path}/link/../link/data/x": None,  # .. of what the link means
    }.items():
        assert prefixes.absolute(path.encode()) == found, path
    with pytest.raises(NotADirectoryError):
        prefixes.absolute(b"/view/file/../x")
    assert prefixes.relative(Spot(0, "a"), b"../x") == Spot(0, "x")
    assert prefixes.relative(Spot(0, "a"), b"../../usr/") == Escaped(b"/usr/", named=False)
    assert prefixes.full(Spot(1, "a/b")) == f"{shown}/a/b".encode()


class _Bytes:
    """A tree of one file, whose kernel copies nothing, or everything."""

    def __init__(self, data: bytes, sends: bool) -> None:
        self.data, self.sends = data, sends

    def send(self, node: None, fd: int) -> bool:
        return self.sends and os.write(fd, self.data) == len(self.data)

    def read_into(self, node: None, out: memoryview) -> None:
        out[:] = self.data


class _Broken(_Bytes):
    def read_into(self, node: None, out: memoryview) -> None:
        raise OSError(errno.EIO, "storage")


def test_held_files_are_sealed_and_bounded() -> None:
    crew = Crew()
    held = HeldFiles(100_000, 5, crew)
    rng = random.Random(0)
    kept = []
    with crew.lock:
        for k in range(12):
            data = rng.randbytes(30_000 + k)
            wanted = Wanted(k, b"/data/%d" % k if k % 2 else b"/" + b"x" * 300, len(data), 5_000_000_000)
            before = os.fstat(held.get(wanted).fd) if k % 3 else None
            fd = held.open(wanted, _Bytes(data, sends=k % 4 < 2), None, os.O_RDONLY)
            assert held.nbytes <= 100_000
            after = os.fstat(fd)
            assert (after.st_size, after.st_mtime) == (len(data), 5.0)
            if before is not None:
                assert (before.st_ino, before.st_size, before.st_mtime) == (after.st_ino, len(data), 5.0)
            kept.append((fd, data))
        for fd, data in kept:
            assert os.pread(fd, 1 << 20, 0) == data
            for change in (lambda fd=fd: os.write(fd, b"x"), lambda fd=fd: os.ftruncate(fd, 0)):
                with pytest.raises(OSError):
                    change()
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            with pytest.raises(OSError):
                os.pwrite(again, b"x", 0)
            os.close(again)
            os.close(fd)
        for source in (_Broken(b"x" * 10, False), _Bytes(b"short", True)):
            with pytest.raises(OSError):
                held.open(Wanted("bad", b"/bad", 10, 0), source, None, os.O_RDONLY)
        held.close()
    assert held.nbytes == 0


def test_open_files_do_not_take_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is given up first; then opening fails, before the kernel kills anybody."""
    crew = Crew()
    held = HeldFiles(1 << 30, 100, crew)
    free = [3 << 30]
    monkeypatch.setattr("pario.files.held.memory", lambda: (4 << 30, free[0]))
    data = bytes(70 << 20)
    with crew.lock:
        os.close(held.open(Wanted("first", b"/first", len(data), 1_000_000_000), _Bytes(data, True), None, os.O_RDONLY))
        free[0] = 100 << 20
        with pytest.raises(OSError, match="leaves 104,857,600 bytes") as failed:
            held.open(Wanted("second", b"/second", len(data), 1_000_000_000), _Bytes(data, True), None, os.O_RDONLY)
        assert failed.value.errno == errno.ENOMEM
        assert held.nbytes == 0
        os.close(held.open(Wanted("small", b"/small", 5, 1_000_000_000), _Bytes(b"small", True), None, os.O_RDONLY))
        held.close()


def test_a_file_that_is_read_is_waited_for_and_stops_nobody() -> None:
    """Two ask for one file: it is read once, both get it, and others are answered meanwhile."""
    crew = Crew()
    held = HeldFiles(1 << 20, 100, crew)
    begun, go_on, reads = threading.Event(), threading.Event(), []

    class Slow(_Bytes):
        def read_into(self, node: None, out: memoryview) -> None:
            reads.append(1)
            begun.set()
            assert go_on.wait(LIMIT_S)
            super().read_into(node, out)

    got = []

    def ask() -> None:
        with crew.lock:
            fd = held.open(Wanted("slow", b"/slow", 7, 1_000_000_000), Slow(b"content", False), None, os.O_RDONLY)
        got.append(os.pread(fd, 100, 0))
        os.close(fd)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    threads[0].start()
    assert begun.wait(LIMIT_S)
    threads[1].start()
    with crew.lock:
        for k in range(200):  # more than are kept: the one that is read stays
            os.close(held.open(Wanted(k, b"/k", 2, 1_000_000_000), _Bytes(b"ok", k % 2 == 0), None, os.O_RDONLY))
    go_on.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert (got, reads) == ([b"content"] * 2, [1])
    with crew.lock:
        held.close()


def test_threads_come_as_calls_wait_and_rest_again() -> None:
    crew = Crew()
    first = threading.Lock()
    came = threading.Event()

    def serve(duty: Duty) -> None:
        if not first.acquire(blocking=False):
            came.set()
            while True:  # until it rests
                duty.begin(lambda: False)
                duty.end()
        end = time.monotonic() + LIMIT_S
        while not came.is_set() and time.monotonic() < end:
            duty.begin(lambda: True)
            duty.end()
        while crew.resting < 7 and time.monotonic() < end:
            time.sleep(1e-3)
        assert (came.is_set(), crew.resting) == (True, 7)

    crew.work(serve)

    def fails(duty: Duty) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        Crew().work(fails)


def test_numbers_are_those_of_the_headers() -> None:
    """Where the C library's headers are."""
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no kernel headers of x86_64")
    known = dict(line.split()[1:3] for line in header.read_text().splitlines() if line.startswith("#define __NR_"))
    for name, entry in CALLS.items():
        if f"__NR_{name}" in known:
            assert known[f"__NR_{name}"] == str(entry.x86_64), name


def test_a_kernel_without_notifications(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(notify, "raw_call", refuses)
    with pytest.raises(ParioError, match=r"seccomp user notification.*mount.*fsspec.*unpack"):
        notify.check_kernel()
    monkeypatch.setattr(numbers, "ARCHITECTURE", "sparc64")
    with pytest.raises(ParioError, match="x86_64 and aarch64"):
        notify.check_kernel()


def test_the_filter_is_a_program_for_the_kernel() -> None:
    code = notify.filter_program(NUMBERS.values())
    assert len(code) % 8 == 0
    assert len(code) // 8 < 256, "jumps have 8 bits"
