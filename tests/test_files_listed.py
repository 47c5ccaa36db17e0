"""A packed folder or tar seen as files is the folder that it was, told by the system, tar and git: links, empty
folders, modes, times, names of one file. Links that somebody forged lead nowhere."""

from __future__ import annotations

import errno
import glob
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from pack_sources import FOLDERS, TARS, packed
from required import skip_or_fail

from pario.codec.packing import Packing
from pario.errors import ParioError
from pario.files import notify
from pario.files.fsspec import RecordFileSystem
from pario.files.tree import Node, Tree

LIMIT_S = 60
TEXT: dict[str, Any] = {"text": True, "errors": "surrogateescape"}
KINDS = {"file": stat.S_IFREG, "folder": stat.S_IFDIR, "link": stat.S_IFLNK}


def linked(folder: Path) -> None:
    """Links of links, to folders, by way of "..", round and round, out of it and by absolute paths."""
    FOLDERS["tree"](str(folder))
    (folder / "blobs").mkdir()
    (folder / "snapshots").mkdir()
    for i in range(3):
        (folder / f"blobs/{i}").write_text(f"blob {i}\n")
        (folder / f"snapshots/{i}.txt").symlink_to(f"../blobs/{i}")
    for name, target in (
        *(("latest", "snapshots"), ("chain", "latest/1.txt"), ("dots", "latest/../blobs"), ("loop", "loop")),
        *(("up", "../../.."), ("absolute", str(folder / "blobs/1")), ("passwd", "/etc/passwd")),
    ):
        (folder / name).symlink_to(target)
    (folder / "100%").write_text("its own name\n")


PATHS = [
    *("chain", "latest/0.txt", "dots/2", "dots", "snapshots/1.txt", "to a folder/er", "deep/link", "latest/../blobs/1"),
    *("dangling", "loop", "deep.txt", "nowhere/x", "latest"),
]
OUT = ["up/x", "up", "absolute", "passwd", "latest/../../x"]


def walk(tree: Tree, path: str = "") -> Iterator[tuple[str, Node]]:
    yield path, tree.find(path)
    for name, node in tree.names(path):
        below = f"{path}/{name}" if path else name
        if node.kind == "folder":
            yield from walk(tree, below)
        else:
            assert tree.find(below) == node
            yield below, node


def compare(tree: Tree, real: Path, prefix: str = "") -> int:
    """All names, and what lstat says of each."""
    found = dict(walk(tree, prefix))
    names = {str(real), *(os.path.join(base, name) for base, a, b in os.walk(real) for name in (*a, *b))}
    assert {os.path.join(real, name.removeprefix(prefix).lstrip("/")).rstrip("/") for name in found} == names
    numbers: dict[int, int] = {}
    for name, node in found.items():
        at = os.path.join(real, name.removeprefix(prefix).lstrip("/"))
        there = os.lstat(at.rstrip("/"))
        mode = KINDS[node.kind] | (0 if node.mode is None else node.mode)
        assert (mode, node.mtime_ns) == (there.st_mode, there.st_mtime_ns), name
        if node.kind != "folder":
            assert (node.size, node.links) == (there.st_size, there.st_nlink), name
            assert numbers.setdefault(node.number, there.st_ino) == there.st_ino
        if node.kind == "link":
            assert node.target == os.readlink(os.fsencode(at))
        if node.kind == "file":
            assert tree.read(node) == Path(at).read_bytes()
            assert tree.key(node)
    assert len(numbers) == len({os.lstat(name).st_ino for name in names if not stat.S_ISDIR(os.lstat(name).st_mode)})
    return len(found)


def test_a_packed_folder_is_what_it_was(tmp_path: Path) -> None:
    linked(tmp_path / "real")
    packed([str(tmp_path / "real")], str(tmp_path / "set.lmdb"), links="keep")
    with Tree({"": tmp_path / "set.lmdb"}) as tree:
        assert compare(tree, tmp_path / "real") > 70
        for path in PATHS:
            resolved = os.path.realpath(tmp_path / "real" / path)
            try:
                with open(os.open(resolved, os.O_PATH)):
                    pass
            except OSError as e:
                if e.errno == errno.ELOOP or path == "loop":
                    with pytest.raises(OSError, match="symbolic links"):
                        tree.followed(path)
                else:
                    assert os.path.join(tmp_path, "real", tree.followed(path)) == resolved
            else:
                assert os.path.join(tmp_path, "real", tree.followed(path)) == resolved
        for path in OUT:
            with pytest.raises(FileNotFoundError):
                tree.followed(path)
        assert tree.followed("absolute", at=str(tmp_path / "real")) == "blobs/1"
        assert tree.followed("chain", last=False) == "chain"
        names = [name for name, _ in tree.names("")]
        for name, node in tree.names(""):
            assert [each for each, _ in tree.names("", node)] == names[names.index(name) :]


@pytest.mark.parametrize("kind", sorted(TARS))
def test_a_packed_tar_is_what_it_extracts_to(kind: str, tmp_path: Path) -> None:
    TARS[kind](str(tmp_path / "source"))
    (source,) = glob.glob(str(tmp_path / "source*"))
    real = tmp_path / "real"
    real.mkdir()
    subprocess.run(["tar", "xpf", source, "-C", real], check=True, timeout=LIMIT_S)
    packed([source], str(tmp_path / "set.lmdb"))
    with tarfile.open(source) as tar, Tree({"": tmp_path / "set.lmdb"}) as tree:
        for name in {"", *(str(each.relative_to(real).parent) for each in real.rglob("*"))} - set(tar.getnames()):
            node = tree.find("" if name == "." else name)  # folders that the tar does not name
            os.chmod(real / name, node.mode or 0)
        for base, _, _ in os.walk(real, topdown=False):
            name = os.path.relpath(base, real)
            os.utime(base, ns=2 * (tree.find("" if name == "." else name).mtime_ns,))
        assert compare(tree, real) > 40


def test_several_sources_are_folders(tmp_path: Path) -> None:
    linked(tmp_path / "images")
    TARS["gnu"](str(tmp_path / "more"))
    packed([str(tmp_path / "images"), str(tmp_path / "more.tar")], str(tmp_path / "set.lmdb"), links="keep")
    with Tree({"": tmp_path / "set.lmdb"}) as tree:
        assert [name for name, _ in tree.names("")] == ["images", "more"]
        assert compare(tree, tmp_path / "images", "images") > 70
        assert tree.find("more/link").target == b"z"
        assert tree.find(tree.followed("more/link")) == tree.find("more/z")
        assert tree.find("more/hard").number == tree.find("more/folder/3.json").number


def test_a_tar_with_paths_that_lead_elsewhere_has_its_keys(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("../x", "/y", "a/../b"):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b"abc"))
    packed([str(tmp_path / "a.tar")], str(tmp_path / "set.lmdb"))
    with Tree({"": tmp_path / "set.lmdb"}) as tree:
        files = [path for path, node in walk(tree) if node.kind == "file"]
        assert files == ["%2E%2E/x", "%/y", "a/%2E%2E/b"]
        assert [tree.read(path) for path in files] == 3 * [b"abc"]


def forge(path: Path, **changed: bytes) -> None:
    """Replace parts of the reserved entry."""
    with lmdb.open(str(path), subdir=False, map_size=1 << 26) as env, env.begin(write=True) as txn:
        cursor = txn.cursor()
        assert cursor.last()
        packing = Packing.from_entry(cursor.value())
        packing.parts |= changed
        txn.put(cursor.key(), packing.entry())


def test_damaged_parts_are_errors_or_ignored(tmp_path: Path) -> None:
    FOLDERS["tree"](str(tmp_path / "real"))
    packed([str(tmp_path / "real")], str(tmp_path / "set.lmdb"))
    forge(tmp_path / "set.lmdb", tree=b"junk")
    with pytest.raises(ParioError, match="names of the folder is damaged"):
        Tree({"": tmp_path / "set.lmdb"})
    TARS["gnu"](str(tmp_path / "a"))
    packed([str(tmp_path / "a.tar")], str(tmp_path / "tar.lmdb"))
    for bad in (b"junk", b""):
        forge(tmp_path / "tar.lmdb", tar=bad)
        with Tree({"": tmp_path / "tar.lmdb"}) as tree:
            assert tree.find("twice").mode is None, "by the keys alone"
            assert tree.read("twice") == b"the second"


def test_folders_deeper_than_pythons_stack_are_found(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/f").write_bytes(b"content")
    packed([str(tmp_path / "real")], str(tmp_path / "set.lmdb"))
    paths = ["/".join("d" * k) for k in range(1500)]
    rows = [*((path, 0o40755, 0, 0, 0, None) for path in paths), ("f", 0o100644, 0, 0, 0, None)]
    whole = json.dumps({"rows": rows, "users": {}, "groups": {}}).encode()
    forge(tmp_path / "set.lmdb", tree=zlib.compress(whole))
    fs = RecordFileSystem(fo=str(tmp_path / "set.lmdb"), skip_instance_cache=True)
    assert fs.find("", withdirs=True) == [*paths[1:], "f"]
    assert fs.find("", withdirs=True, maxdepth=2) == ["d", "d/d", "f"]


def test_urls(tmp_path: Path) -> None:
    linked(tmp_path / "real")
    packed([str(tmp_path / "real")], str(tmp_path / "set.lmdb"), links="keep")
    fs = RecordFileSystem(fo=str(tmp_path / "set.lmdb"), skip_instance_cache=True)
    assert fs.cat_file("chain") == fs.cat_file("dots/1") == b"blob 1\n"
    kinds = {each["name"]: (each["type"], each.get("destination")) for each in fs.ls("")}
    assert kinds["latest"] == ("directory", "snapshots")
    assert kinds["chain"] == ("file", "latest/1.txt")
    assert kinds["passwd"] == ("other", "/etc/passwd")
    assert kinds["nothing in it"] == ("directory", None)
    assert fs.info("run.sh")["mode"] == 0o755
    assert fs.isdir("latest")
    assert fs.isfile("chain")
    assert not fs.isfile("passwd")
    for path in OUT:
        with pytest.raises(FileNotFoundError):
            fs.cat_file(path)
    found = fs.find("")
    assert "chain" in found
    assert "latest/1.txt" not in found
    assert "latest" not in found


# -- under a view ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """LMDB=FOLDER, that folder, and the real one"""
    try:
        notify.check_kernel()
    except ParioError as e:
        skip_or_fail(str(e))
    top = tmp_path_factory.mktemp("listed").resolve()
    (top / "view").mkdir()
    linked(top / "real")
    packed([str(top / "real")], str(top / "set.lmdb"), links="keep")
    return f"{top}/set.lmdb={top}/data", top / "data", top / "real"


def under(shown: str, *command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pario", "view", shown, "--", *command]
    return subprocess.run(words, capture_output=True, timeout=LIMIT_S, **TEXT)


#: what the system says of every name below argv[1], and of paths through links
LOOK = """
import errno, os, sys
top, paths = sys.argv[1], sys.argv[2:]
os.chdir(top)
def told(call, *arguments, **more):
    try:
        s = call(*arguments, **more)
    except OSError as e:
        return errno.errorcode[e.errno]
    if not isinstance(s, os.stat_result):
        return s
    return oct(s.st_mode), s.st_mtime_ns, os.path.isdir(arguments[0]) or (s.st_nlink, s.st_size)
def content(path, flags=0, **more):
    fd = os.open(path, flags, **more)
    try:
        return [oct(os.fstat(fd).st_mode), os.fstat(fd).st_mtime_ns, os.path.isdir(path) or os.read(fd, 1 << 20)]
    finally:
        os.close(fd)
def place(path):
    os.chdir(path)
    try:
        return os.getcwd().replace(top, "@")
    finally:
        os.chdir(top)
def look(path):
    calls = [told(os.lstat, path), told(os.stat, path), told(os.readlink, path), told(content, path)]
    calls += [told(content, path, os.O_NOFOLLOW), told(content, path, os.O_DIRECTORY), told(os.lstat, path + "/")]
    calls += [told(os.access, path, os.R_OK), told(place, path), told(os.listdir, path) and sorted(os.listdir(path))
              if os.path.isdir(path) else None, told(lambda: os.path.realpath(path).replace(top, "@"))]
    return path, calls
for base, folders, files in os.walk(b"."):
    for name in sorted(folders + files):
        path = os.fsdecode(os.path.join(base, name))
        if path not in ("./up", "./absolute", "./passwd"):
            print(ascii(look(path)))
for path in paths:
    print(ascii(look(path)))
fd = os.open("latest", os.O_RDONLY)
print(told(content, "../chain", dir_fd=fd), told(os.stat, "1.txt", dir_fd=fd), told(os.readlink, "1.txt", dir_fd=fd))
print(sorted((e.name, e.is_symlink(), e.is_dir(), e.is_file()) for e in os.scandir(".") if e.name not in
             ("up", "absolute", "passwd", "loop")))
one, other = os.stat("run.sh"), os.fstat(os.open("deep/same", os.O_RDONLY))
print((one.st_ino, one.st_dev) == (other.st_ino, other.st_dev))
"""


def test_the_system_says_the_same_of_every_name(shown: tuple[str, Path, Path]) -> None:
    pairing, view, real = shown
    done = under(pairing, sys.executable, "-c", LOOK, str(view), *PATHS)
    truth = subprocess.run([sys.executable, "-c", LOOK, str(real), *PATHS], capture_output=True, check=True, **TEXT)
    assert sorted(done.stdout.splitlines()) == sorted(truth.stdout.splitlines()), done.stderr
    assert len(truth.stdout.splitlines()) > 70


ESCAPES = """
import ctypes, os, sys
view, real = sys.argv[1:]
got = []
libc = ctypes.CDLL(None, use_errno=True)
class How(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in ("flags", "mode", "resolve")]
def openat2(path):
    how = How(0, 0, 0)
    return libc.syscall(437, -100, path.encode(), ctypes.byref(how), 24) >= 0
os.chdir(view)
for path in ("passwd", "up", "up/tmp", "up/../etc/passwd", "absolute", "latest/../up", "passwd/", "up/.", "up/.."):
    for at in (path, view + "/" + path, view + "/latest/../" + path, "/proc/self/cwd/" + path):
        for call in (lambda p: os.close(os.open(p, os.O_RDONLY)), os.stat, os.chdir, os.listdir, os.mkdir, os.unlink,
                     lambda p: os.truncate(p, 0), lambda p: os.chmod(p, 0o644), lambda p: os.utime(p), os.statvfs,
                     lambda p: os.execv(p, [p]), lambda p: os.rename(p, view + "-x"),
                     lambda p: os.getxattr(p, "user.x"), lambda p: os.close(os.open(p, os.O_RDWR | os.O_CREAT))):
            try:
                call(at)
                got.append((at, call))
            except OSError:
                pass
            os.chdir(view)
        if openat2(at):
            got.append((at, "openat2"))
print(len(got), got[:3], os.path.islink("passwd"), os.path.lexists("up"), os.path.exists("up"))
"""


def test_no_link_is_followed_out_of_a_view(shown: tuple[str, Path, Path]) -> None:
    """Of a file that somebody else packed, under a supervisor that may do more than the program."""
    done = under(shown[0], sys.executable, "-c", ESCAPES, str(shown[1]), str(shown[2]))
    assert done.stdout == "0 [] True True False\n", (done.stdout, done.stderr)


PROGRAMS = """
cd $1 && export LC_ALL=C
find . -name up -prune -o -printf '%p %M %T@ %l %y\\n' | sort
find . -type d -empty | sort; find -L snapshots latest dots -type f | sort; find . -samefile run.sh | sort
ls -F; ls -lL latest/ | wc -l; ls -d latest; ls latest; readlink -f chain dots/1 | sed "s#$1#@#"
cat chain dots/2 latest/../blobs/0; cat loop; cat '100%'; test -e dangling; echo $?; test -L dangling; echo $?
(cd latest && pwd -P && cd .. && pwd) | sed "s#$1#@#"
cp -a deep closed run.sh $2 && find $2 -mindepth 1 -printf '%P %M %T@ %l\\n' | sort; chmod -R u+w $2/*; rm -r $2/*
tar cf - --sort=name --exclude=up deep snapshots latest closed | tar tvf - --full-time | grep -v run.sh
tar chf - --sort=name snapshots | tar xOf - | sort
git -C repo --no-optional-locks status --short; git -C repo log --oneline; git -C repo fsck
make -s -n -C repo; sh repo/go; git clone -q repo $2/clone && cat $2/clone/go; rm -rf $2/clone
"""


def test_programs_see_the_folder_that_it_was(tmp_path: Path, shown: tuple[str, Path, Path]) -> None:
    """git, make, tar, cp, find and shells: git needs empty folders, and looks at modes and times."""
    real = tmp_path / "real"
    linked(real)
    make = """cd $1 && git init -q repo && cd repo && printf 'all: a\\na: b.c\\n\\techo would compile\\n' > Makefile &&
        touch b.c && printf '#!/bin/sh\\necho ran\\n' > run && chmod 755 run && ln -s run go && git add -A &&
        git -c user.name=a -c user.email=a@b commit -qm one && git gc -q"""
    subprocess.run(["sh", "-ec", make, "sh", str(real)], check=True, timeout=LIMIT_S)
    packed([str(real)], str(tmp_path / "set.lmdb"), links="keep")
    (tmp_path / "scratch").mkdir()
    words = ["sh", "-c", PROGRAMS, "sh"]
    truth = subprocess.run([*words, str(real), str(tmp_path / "scratch")], capture_output=True, **TEXT)
    done = under(f"{tmp_path}/set.lmdb={tmp_path}/data", *words, str(tmp_path / "data"), str(tmp_path / "scratch"))
    assert done.stdout.splitlines() == truth.stdout.splitlines(), done.stderr
    assert [line.replace(f"{tmp_path}/data", "@") for line in done.stderr.splitlines() if "pario" not in line] == [
        line.replace(str(real), "@") for line in truth.stderr.splitlines()
    ]
