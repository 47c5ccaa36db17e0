"""Records as files in a mounted folder, read by programs that know nothing of LMDBs; and of published LMDBs."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import lmdb
import pytest
from required import skip_or_fail
from shared_data import files, need
from test_foreign_files import parse, unpacked

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from file_trees import walk
from pack_sources import packed
from packed_sets import pack_copy, write
from test_files_listed import LOOK, PATHS, linked

from pario.errors import DatabaseError, EncryptedError, OptionError
from pario.files.fuse import check
from pario.files.tree import Tree
from pario.format.layout import MDB_DUPSORT

__all__ = ["unpacked"]  # the fixture

Mount = Callable[..., "subprocess.Popen[str]"]
LIMIT_S = 60
ITEMS = sorted(
    [
        *((b"n/%03d" % i, os.urandom(i * 997)) for i in range(200)),
        *((b"a", b"1"), (b"a/b", b"2"), (b"%", b"3"), (b"\xff\n", b"4"), (b"z" * 400, b"5")),
        (b"big", os.urandom(9 << 20)),
    ]
)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """mount(lmdb, ..., folder): a process that serves it, and ends with the test."""
    started: list[tuple[subprocess.Popen[str], str]] = []

    def start(*words: object) -> subprocess.Popen[str]:
        folder = str(words[-1])
        os.makedirs(folder, exist_ok=True)
        try:
            check(folder)
        except OptionError as reason:
            skip_or_fail(str(reason))
        command = [sys.executable, "-m", "pario", "files", "mount", *map(str, words)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append((process, folder))
        assert process.stdout is not None
        assert "mounted at" in process.stdout.readline()
        return process

    yield start
    for process, folder in started:
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            subprocess.run(["umount", "--lazy", folder], check=False)


def shell(command: str, folder: Path) -> str:
    words = ["sh", "-ec", command]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_programs_read_it(tmp_path: Path, mount: Mount, kind: str) -> None:
    path = (write if kind == "plain" else pack_copy)(tmp_path / "set", ITEMS)
    folder = tmp_path / "m"
    mount(path, folder)
    wanted = sorted(hashlib.md5(value).hexdigest() for _, value in ITEMS)
    sums = shell("find . -type f -print0 | xargs -0 md5sum --zero | tr '\\0' '\\n' | cut -c1-32", folder)
    assert sorted(sums.split()) == wanted
    assert int(shell("find . -type f -printf '%s\\n' | awk '{n += $1} END {print n}'", folder)) == sum(
        len(value) for _, value in ITEMS
    )
    shell(f"cp -r . {tmp_path}/copy; tar cf {tmp_path}/all.tar .; ls -lR; diff -r . {tmp_path}/copy", folder)
    assert len(set(shell("find . -printf '%i\\n'", folder).split())) == len(ITEMS) + 3  # the root, a and n
    assert shell("cat %25 'a%' a/b", folder) == "312"
    for writing in ("touch x", "echo 1 > a%", "rm big", "mkdir d", "mv big c", "chmod 777 big"):
        with pytest.raises(subprocess.CalledProcessError):
            shell(writing, folder)
    with open(folder / "big", "rb") as file:
        file.seek(5 << 20)
        assert file.read(10) == dict(ITEMS)[b"big"][5 << 20 : (5 << 20) + 10]
    assert not (folder / "big" / "x").exists()
    assert not (folder / "no").exists()


def test_a_packed_folder_is_what_it_was(tmp_path: Path, mount: Mount) -> None:
    """And its scripts can be run, and names of one file are one file: numbers of listings are those of files."""
    real, there = tmp_path / "real", tmp_path / "mnt"
    linked(real)
    packed([str(real)], str(tmp_path / "set.lmdb"), links="keep")
    mount(tmp_path / "set.lmdb", there)
    said = []
    for top in (real, there):
        done = subprocess.run([sys.executable, "-c", LOOK, top, *PATHS], capture_output=True, text=True, check=True)
        said.append(sorted(done.stdout.splitlines()))
    assert said[1] == said[0]
    shell("./run.sh && tar cf - deep run.sh | tar tvf - | grep -q 'run.sh link to deep/same'", there)
    assert all(entry.inode() == os.lstat(entry).st_ino for entry in os.scandir(there))


def test_a_large_folder_is_listed_in_pieces(tmp_path: Path, mount: Mount) -> None:
    """From wherever the kernel goes on, and by several readers at once."""
    names = [f"{k:05d}-{'n' * (k % 90)}" for k in range(4000)]
    folder = tmp_path / "m"
    mount(write(tmp_path / "set", [(name.encode(), b"1") for name in names]), folder)
    with os.scandir(folder) as one, os.scandir(folder) as other:
        found = [(a.name, b.name) for a, b in zip(one, other, strict=True)]
    assert found == [(name, name) for name in names]
    back = "import os; fd = os.open('.', 0); first = os.listdir(fd); print(first == os.listdir(fd), len(first))"
    assert shell(f'{sys.executable} -c "{back}"', folder).split() == ["True", "4000"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_clean(tmp_path: Path, mount: Mount, number: int) -> None:
    folder = tmp_path / "m"
    process = mount(write(tmp_path / "set", ITEMS[:5]), folder)
    held = os.open(next(folder.iterdir()), os.O_RDONLY)
    process.send_signal(number)
    assert process.wait(10) == 0
    with suppress(OSError):  # whoever still reads is told that the mount is gone
        os.close(held)
    assert not os.path.ismount(folder)
    assert list(folder.iterdir()) == []


def test_several_and_extensions(tmp_path: Path, mount: Mount) -> None:
    write(tmp_path / "one", [(b"x", b"\xff\xd8\xff")])
    write(tmp_path / "two", [(b"y", b"2")])
    mount("--extensions", f"first={tmp_path / 'one'}", tmp_path / "two", tmp_path / "m")
    assert shell("find . -type f | sort", tmp_path / "m").split() == ["./first/x.jpg", "./two/y"]


def test_idle_costs_nothing(tmp_path: Path, mount: Mount) -> None:
    process = mount(write(tmp_path / "set", ITEMS), tmp_path / "m")
    shell("find . | wc -l", tmp_path / "m")

    def spent() -> int:
        words = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(words[11]) + int(words[12])

    before = spent()
    time.sleep(5)
    assert spent() - before < 5 * os.sysconf("SC_CLK_TCK") * 0.01


def test_bad_input(tmp_path: Path) -> None:
    path = write(tmp_path / "set", ITEMS[:5])
    (tmp_path / "full" / "x").mkdir(parents=True)
    for words, said in (
        ((path, tmp_path / "nowhere"), "there is no folder"),
        ((path, tmp_path / "full"), "not empty"),
        ((path, path, tmp_path / "full" / "x"), "two LMDBs"),
        ((tmp_path / "full", tmp_path / "full" / "x"), "no data.mdb"),
    ):
        command = [sys.executable, "-m", "pario", "files", "mount", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 1
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


# -- published files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", files("wild", "*"), ids=lambda path: path.name or "none")
def test_published_files(path: Path) -> None:
    need(path)
    with lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False) as env, env.begin() as txn:
        truth = dict(txn.cursor())
    with Tree({"": path}) as tree:
        assert {tree.key(name): tree.read(node) for name, node in walk(tree)} == truth


def test_files_of_other_machines(unpacked: Path) -> None:
    if "encrypt" in unpacked.name:
        with pytest.raises(EncryptedError):
            Tree({"": unpacked})
        return
    lines = {line.name: line for line in parse((unpacked / "expected.txt").read_text())}
    with Tree({"": unpacked}) as tree:
        for name in lines:
            if name != "(main)":
                if lines[name].flags & MDB_DUPSORT:
                    with pytest.raises(DatabaseError, match="several values per key"):
                        tree.names(name)
                    continue
                found = list(walk(tree, name))
                assert len(found) == lines[name].listed
                assert all(len(tree.read(node)) == node.size for _, node in found)
