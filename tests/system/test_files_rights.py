"""Nobody gains rights by a view that root started. Programs give up some of theirs, each in another way, and then try
to reach what only root may, by every call that takes a path and by every way out of the view. The oracle is what lies
there afterwards, and the supervisor's equals, who succeed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from required import skip_or_fail

import pario
from benchmarks.files_programs import write_lmdb
from pario.errors import ParioError
from pario.files.notify import check_kernel

LIMIT_S = 100

#: What runs under the view, as root: argv is the view's folder, a folder that only root may enter, an empty folder for
#: chroot, and how to give up rights. Prints the calls that worked.
ATTACK = """
import ctypes, os, resource, socket, stat, struct, subprocess, sys, threading
view, secret, jail, how = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)

def raw(number, *words):
    done = libc.syscall(ctypes.c_long(number), *words)
    if done < 0:
        raise OSError(ctypes.get_errno(), "raw call")
    return done

def number(**by_machine):
    return by_machine[os.uname().machine]

def change_into(path):
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path)
        assert os.listdir("."), "it is there"
        os.stat("key")
    finally:
        os.fchdir(here)
        os.close(here)

def read(path):
    with open(path, "rb") as file:
        assert file.read() == b"secret"

def create(path):
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))

def open_how(path):
    os.close(raw(437, -100, os.fsencode(path), struct.pack("QQQ", 0, 0, 0), 24))

def watch(path):
    raw(number(x86_64=254, aarch64=27), raw(number(x86_64=294, aarch64=26), 0), os.fsencode(path), 0x2)

def handle(path):
    raw(number(x86_64=303, aarch64=264), -100, os.fsencode(path), struct.pack("Ii", 128, 0) + bytes(128),
        ctypes.byref(ctypes.c_int()), 0)

def plug(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)

def rename_and_back(path):
    os.rename(path, path + "2")
    os.rename(path + "2", path)

OPERATIONS = {  # what each does to a path below the secret folder
    "read": ("key", read), "open to write": ("key", lambda p: open(p, "r+b").close()),
    "open to append": ("key", lambda p: open(p, "ab").close()),
    "open and cut": ("cut", lambda p: open(p, "wb").close()),
    "create": ("new1", create), "open a folder": ("", lambda p: os.close(os.open(p, os.O_RDONLY | os.O_DIRECTORY))),
    "temporary file": ("", lambda p: os.close(os.open(p, os.O_TMPFILE | os.O_WRONLY))),
    "openat2": ("key", open_how), "stat": ("key", os.stat), "lstat": ("link", os.lstat),
    "list": ("", os.listdir), "access": ("key", lambda p: os.access(p, os.R_OK) or 1 / 0),
    "access, effective": ("key", lambda p: os.access(p, os.R_OK, effective_ids=True) or 1 / 0),
    "readlink": ("link", os.readlink), "statfs": ("key", os.statvfs), "chdir": ("", change_into),
    "chmod": ("key", lambda p: os.chmod(p, 0o666)), "chmod of the folder": ("", lambda p: os.chmod(p, 0o777)),
    "chown": ("key", lambda p: os.chown(p, 65534, 65534)),
    "lchown": ("link", lambda p: os.lchown(p, 65534, 65534)), "utime": ("key", lambda p: os.utime(p, (5, 5))),
    "utime now": ("key", os.utime), "truncate": ("cut", lambda p: os.truncate(p, 1)),
    "mkdir": ("new2", os.mkdir), "fifo": ("new3", os.mkfifo),
    "device": ("new4", lambda p: os.mknod(p, stat.S_IFCHR | 0o666, os.makedev(1, 3))),
    "symlink": ("new5", lambda p: os.symlink("key", p)), "rename": ("gone2", rename_and_back),
    "link": ("key", lambda p: os.link(p, os.path.dirname(p) + "/new6")),
    "unlink": ("gone", os.unlink), "rmdir": ("empty", os.rmdir),
    "setxattr": ("key", lambda p: os.setxattr(p, "user.x", b"1")),
    "getxattr": ("key", lambda p: os.getxattr(p, "user.a")),
    "listxattr": ("key", os.listxattr), "removexattr": ("key", lambda p: os.removexattr(p, "user.a")),
    "execute": ("program", lambda p: subprocess.run([p], check=True)),
    "watch": ("key", watch), "handle": ("key", handle), "socket": ("new7", plug),
}

def attack():
    os.chdir("/")
    ups = "../" * view.count("/")
    folder = os.open(view + "/a", os.O_RDONLY | os.O_DIRECTORY) if how not in PLACES else at_first
    worked = []
    for kind in ("absolute", "relative", "descriptor", "cwd", "mixed"):
        if kind == "relative":
            os.fchdir(folder)
        begin = {
            "absolute": view + "/" + ups, "relative": "../" + ups, "descriptor": f"/proc/self/fd/{folder}/../" + ups,
            "cwd": "/proc/self/cwd/../" + ups, "mixed": view + "/a/../" + ups,
        }[kind]
        for name, (below, act) in OPERATIONS.items():
            if name == "socket" and how in MAY_BIND:
                continue
            try:
                act(begin + secret[1:] + ("/" + below if below else ""))
            except (OSError, ZeroDivisionError, subprocess.SubprocessError):
                continue
            worked.append(f"{name}, {kind}")
    if how in PLACES and how not in MAY_LEAVE:  # a descriptor of a folder outside would lead out
        for name, act in (("folder", lambda: os.open(view, os.O_RDONLY)), ("chdir", lambda: os.chdir(view + "/a"))):
            try:
                act()
            except PermissionError:
                continue
            worked.append(name)
    if how not in ("equals", "own mounts"):
        assert open(view + "/one", "rb").read() == b"one\\n"
    return worked

def nobody(groups=()):
    os.setgroups(groups)
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)

def no_capabilities():
    # version 3, this thread; nothing effective, permitted or inheritable
    raw(number(x86_64=126, aarch64=91), struct.pack("Ii", 0x20080522, 0), bytes(24))

def own_mounts():
    if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
        raise OSError(ctypes.get_errno(), "unshare")
    if libc.mount(b"tmpfs", os.fsencode(secret), b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "mount")

def own_user_namespace():
    if libc.unshare(0x10000000):
        raise OSError(ctypes.get_errno(), "unshare")

def a_filter():
    "One that allows everything; it might have been another."
    code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000), 8)
    if libc.prctl(22, 2, ctypes.byref(ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(code))))):
        raise OSError(ctypes.get_errno(), "prctl")

def landlock():
    "Nothing may be read or written."
    rules = raw(444, struct.pack("Q", 0x1FFF), 8, 0)
    raw(446, rules, 0)

def in_a_thread(change):
    "One thread changes its ids, the others of its process do not."
    def run():
        change()
        done.extend(attack())
    done = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert os.stat(view + "/../" + os.path.relpath(secret, os.path.dirname(view)) + "/key").st_size == 6
    return done

SETRESUID = number(x86_64=117, aarch64=147)
ONE_THREAD = {
    "a thread": lambda: raw(SETRESUID, 65534, 65534, 65534),
    "a thread's effective user": lambda: raw(SETRESUID, -1, 65534, -1),
    "a thread's real user": lambda: raw(SETRESUID, 65534, -1, -1),
    "a thread's file system user": lambda: raw(number(x86_64=122, aarch64=151), 65534),
    "a thread's file system group": lambda: raw(number(x86_64=123, aarch64=152), 65534),
    "a thread's groups": lambda: raw(number(x86_64=116, aarch64=159), 1, struct.pack("I", 77)),
    "a thread's capabilities": no_capabilities,
}
WAYS = {
    "equals": lambda: None, "nobody": nobody, "nobody, in root's group": lambda: nobody([0]),
    "no capabilities": no_capabilities, "own user namespace": own_user_namespace,
    "chroot": lambda: (os.chroot(jail), os.chdir("/")), "chroot and nobody": lambda: (os.chroot(jail), nobody()),
    "chroot to the same root": lambda: os.chroot(jail),
    "chroot, no capabilities": lambda: (os.chroot(jail), no_capabilities()), "a filter": a_filter, "landlock": landlock,
    "own mounts": own_mounts, "own mounts and nobody": lambda: (own_mounts(), nobody()),
}
PLACES = [name for name in WAYS if "chroot" in name or "mounts" in name]
#: the kernel knows no view where a socket is bound: root may do that
MAY_BIND = [
    "chroot", "chroot to the same root", "own mounts", "a filter", "a thread's real user",
    "a thread's file system group", "a thread's groups",
]
#: root leaves such places as it likes
MAY_LEAVE = ["chroot", "chroot to the same root", "own mounts"]
at_first = os.open(view + "/a", os.O_RDONLY | os.O_DIRECTORY)
if how in ONE_THREAD:
    worked = in_a_thread(ONE_THREAD[how])
else:
    WAYS[how]()
    worked = attack()
os.write(1, "\\n".join(worked).encode())
"""

WAYS = [
    *("nobody", "nobody, in root's group", "no capabilities", "own user namespace"),
    *("chroot", "chroot and nobody", "own mounts", "own mounts and nobody", "chroot to the same root"),
    *("chroot, no capabilities", "a filter", "landlock"),
    *("a thread", "a thread's effective user", "a thread's real user", "a thread's file system user"),
    *("a thread's file system group", "a thread's groups", "a thread's capabilities"),
]


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    try:
        check_kernel()
    except ParioError as e:
        skip_or_fail(str(e))
    if os.geteuid():
        skip_or_fail("only root can give up root's rights")


def snapshot(folder: Path) -> list[tuple[object, ...]]:
    found = []
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        mine = os.listxattr(path, follow_symlinks=False)
        found.append((str(path), status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, data, mine))
    return found


def prepare(top: Path) -> Path:
    """A view's dataset, and a folder that only its owner may enter, who is not root where capabilities are given up."""
    top.chmod(0o755)
    write_lmdb(top / "set.lmdb", {"one": b"one\n", "a/two": b"2" * 5000})
    secret = top / "secret"
    secret.mkdir()
    (top / "jail").mkdir()
    for name in ("key", "gone", "gone2"):
        (secret / name).write_bytes(b"secret")
    (secret / "cut").write_bytes(b"secret")
    os.setxattr(secret / "key", "user.a", b"1")
    (secret / "link").symlink_to("key")
    (secret / "empty").mkdir()
    (secret / "program").write_text("#!/bin/sh\nexit 0\n")
    for path in [*secret.iterdir(), secret]:
        os.chown(path, 12345, 12345, follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(0o700)
    return secret


@pytest.fixture
def top() -> Path:
    """A folder that others may enter, as pytest's own may not."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="pario-rights-") as name:
        Path(name).chmod(0o755)
        yield Path(name).resolve()


def under(
    top: Path, *command: str, before: tuple[str, ...] = (), python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    words = [*before, python, "-m", "pario", "files", "view", f"{top}/set.lmdb={top}/data", "--", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, cwd="/")


def in_reach(top: Path) -> tuple[str, ...]:
    """Puts this Python and pario before the command to come, where another user may also find them who has no way into
    the folders in which they lie."""
    binds = ""
    for name, place in (("python", sys.prefix), ("pario", Path(pario.__file__).parent)):
        (top / "reach" / name).mkdir(parents=True)
        binds += f"mount --bind {place} {top}/reach/{name}; "
    script = f"{binds} export PYTHONPATH={top}/reach PARIO_NUMBA_CACHE={top}/kernels; exec \"$@\""
    return "unshare", "--mount", "sh", "-ec", script, "sh"


def attacked(top: Path, how: str) -> tuple[list[str], bool, str]:
    """The calls that worked, whether anything is different afterwards, and what the supervisor said."""
    secret = prepare(top)
    before = snapshot(secret)
    words = [sys.executable, "-c", ATTACK, f"{top}/data", str(secret), f"{top}/jail", how]
    mounts = 'mount --bind / "$0" && exec "$@"'  # seen by nobody who will delete the folder
    same = how == "chroot to the same root"
    before_it = ("unshare", "--mount", "sh", "-c", mounts, f"{top}/jail") if same else ()
    done = under(top, *words, before=before_it)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n") if done.stdout else [], snapshot(secret) != before, done.stderr


def test_equals_of_the_supervisor_reach_it(top: Path) -> None:
    """So the others would, if they were let."""
    worked, changed, _ = attacked(top, "equals")
    assert changed
    assert len(worked) >= 100, worked


@pytest.mark.parametrize("how", WAYS)
def test_nobody_gains_rights(top: Path, how: str) -> None:
    worked, changed, said = attacked(top, how)
    assert (worked, changed) == ([], False)
    assert "other rights, another root or other mounts than the view" in said


#: under the view, as root, which starts a process of nobody: argv is the view's folder, the outputs' and a setuid cat
OTHERS = """
import os, subprocess, sys
view, outputs, cat = sys.argv[1:]
mine = os.open(view + "/one", os.O_RDONLY)
open(outputs + "/root", "w").close()
assert os.readlink(f"/proc/{os.getpid()}/fd/{mine}") == view + "/one"
boss = os.getpid()
if not os.fork():
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    tries = {
        "create": lambda: open(outputs + "/nobody", "x"), "append": lambda: open(outputs + "/root", "a"),
        "read": lambda: open(outputs + "/old"), "read through a link": lambda: open(outputs + "/link"),
        "mkdir": lambda: os.mkdir(outputs + "/folder"), "rename": lambda: os.rename(outputs + "/root", outputs + "/x"),
        "unlink": lambda: os.unlink(outputs + "/root"), "chmod": lambda: os.chmod(outputs + "/root", 0o666),
        "stat": lambda: os.stat(outputs + "/old"), "list": lambda: os.listdir(outputs),
        "descriptors of others": lambda: os.readlink(f"/proc/{boss}/fd/{mine}"),
        "setuid": lambda: subprocess.run([cat, outputs + "/../secret"], check=True, capture_output=True),
    }
    worked = []
    for name, act in tries.items():
        try:
            act()
            worked.append(name)
        except (OSError, subprocess.SubprocessError):
            pass
    print(len(tries), worked, open(view + "/one").read(), end="", flush=True)
    os._exit(0)
os.wait()
"""


def test_others_get_no_outputs_and_setuid_programs_nothing(top: Path) -> None:
    write_lmdb(top / "set.lmdb", {"one": b"one\n"})
    for name in ("local", "out"):
        (top / name).mkdir()
    (top / "secret").write_text("secret")
    (top / "secret").chmod(0o600)
    (top / "out" / "old").write_text("secret")
    (top / "out" / "old").chmod(0o600)
    (top / "out" / "link").symlink_to("../secret")
    cat = shutil.copy(shutil.which("cat") or "", top / "cat")
    os.chmod(cat, 0o4755)
    own = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", cat, f"{top}/secret"]
    assert subprocess.run(own, capture_output=True, text=True).stdout == "secret", "it could, outside"
    words = [sys.executable, "-m", "pario", "files", "view", f"{top}/set.lmdb={top}/data", "--output", f"{top}/out"]
    words += ["--local", f"{top}/local", "--", sys.executable, "-c", OTHERS, f"{top}/data", f"{top}/out", cat]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.returncode) == ("12 [] one\n", 0), done.stderr
    assert sorted(os.listdir(top / "out")) == ["link", "old", "root"]


def test_a_user_of_his_own_reaches_what_is_his(top: Path) -> None:
    """Whoever starts the view and gives up nothing goes in and out as before; in a user namespace of his own he does
    not."""
    write_lmdb(top / "set.lmdb", {"a/one": b"one\n"})
    (top / "his").write_text("his\n")
    for path in (top, *top.rglob("*")):
        os.chown(path, 12345, 12345)
    script = f"cd {top}/data/a; cat ../../his; cat ../../data/a/one; unshare --user cat ../../his"
    user = ("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")
    done = under(top, "sh", "-c", script, before=(*in_reach(top), *user), python=f"{top}/reach/python/bin/python")
    assert done.stdout.split() == ["his", "one"], done.stderr
    assert "Permission denied" in done.stderr


#: under the view, as root: threads of root and of nobody ask for the same file at the same time, and one of nobody's
#: changes the path meanwhile
RACE = """
import ctypes, os, sys, threading
view, secret = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
SETRESUID, OPENAT = (147, 56) if os.uname().machine == "aarch64" else (117, 257)
out = os.fsencode(f"{view}/a/../../secret/key")
inside = os.fsencode(f"{view}/one").ljust(len(out), b"\\0")
buffer = ctypes.create_string_buffer(out, len(out) + 1)
found = {"root": [0, 0], "nobody": [0, 0], "racer": [0, 0]}
over = threading.Event()
def ask(who, path):
    if who != "root":
        assert libc.syscall(SETRESUID, 65534, 65534, 65534) == 0
    for _ in range(400):
        fd = libc.syscall(OPENAT, -100, path, 0)
        found[who][fd >= 0 and os.pread(fd, 6, 0) == b"secret"] += 1
        if fd >= 0:
            os.close(fd)
def turn():
    while not over.is_set():
        ctypes.memmove(buffer, inside, len(inside))
        ctypes.memmove(buffer, out, len(out))
turner = threading.Thread(target=turn)
turner.start()
threads = [threading.Thread(target=ask, args=each) for each in (("root", out), ("nobody", out), ("racer", buffer))]
[each.start() for each in threads], [each.join() for each in threads]
over.set()
turner.join()
print(found)
"""


def test_threads_with_other_rights_at_the_same_time(top: Path) -> None:
    secret = prepare(top)
    done = under(top, sys.executable, "-c", RACE, f"{top}/data", str(secret))
    expected = {"root": [0, 400], "nobody": [400, 0], "racer": [400, 0]}
    assert done.stdout == f"{expected}\n", (done.stdout, done.stderr)


def test_another_namespaces_processes_say_nothing(top: Path) -> None:
    """Rights are read in /proc, which must show the processes that the supervisor serves."""
    write_lmdb(top / "set.lmdb", {"one": b"one\n"})
    done = under(top, "cat", f"{top}/data/one", before=("unshare", "--pid", "--fork"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "/proc shows the processes of another namespace" in done.stderr
    done = under(top, "cat", f"{top}/data/one", before=("unshare", "--pid", "--fork", "--mount-proc"))
    assert (done.returncode, done.stdout) == (0, "one\n"), done.stderr
