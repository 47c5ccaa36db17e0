"""Packing of published files and of files of other machines, as root, and on a file system that fills up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from pack_sources import lmdb_truth, packed, tree_truth, unpacked
from required import skip_or_fail
from shared_data import files, need
from tars import SAFE
from test_foreign_files import hashed, parse

from pario.errors import EncryptedError, FileError

WILD = files("wild", "*")
FOREIGN = files("foreign", "*.tar.xz")

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("path", WILD, ids=lambda path: path.name or "none")
def test_published_files_come_back(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(path)
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    middle, back = str(tmp_path / "packed"), str(tmp_path / "back")
    packed([os.fspath(path)], middle)
    unpacked(middle, back)
    assert lmdb_truth(back) == lmdb_truth(os.fspath(path))


@pytest.mark.parametrize("path", FOREIGN, ids=lambda path: path.name or "none")
def test_files_of_other_machines_come_back_or_are_refused(path: Path, tmp_path: Path) -> None:
    """Their tars come back in any case. Databases that py-lmdb cannot write are left out and named, the others come
    back as liblmdb itself read them there."""
    need(path)
    packed([os.fspath(path)], str(tmp_path / "tar.lmdb"))
    unpacked(str(tmp_path / "tar.lmdb"), str(tmp_path / "back.tar"))
    with tarfile.open(path) as theirs, tarfile.open(tmp_path / "back.tar") as mine:
        assert mine.getnames() == theirs.getnames()
        theirs.extractall(tmp_path / "files", **SAFE)
    (data,) = (tmp_path / "files").rglob("data.mdb")
    said: list[str] = []
    if "encrypt" in path.name:
        with pytest.raises(EncryptedError):
            packed([str(data)], str(tmp_path / "packed"))
        return
    packed([str(data)], str(tmp_path / "packed"), said)
    left_out = [line for line in said if "left out" in line]
    unpacked(str(tmp_path / "packed"), str(tmp_path / "back"))
    back = lmdb_truth(str(tmp_path / "back"))
    compared = 0
    for line in parse((data.parent / "expected.txt").read_text()):
        if line.name == "(main)" or any(f"{line.name!r}," in said for said in left_out):
            continue
        assert len(back[line.name.encode()][1]) == line.entries
        if line.listed == line.entries:
            assert hashed(back[line.name.encode()][1]) == line.hash
            compared += 1
    assert compared > 3


needs_root = pytest.mark.skipif(
    os.environ.get("PARIO_REQUIRE_SYSTEM") != "1", reason="needs root: set PARIO_REQUIRE_SYSTEM=1"
)


@needs_root
def test_owners_survive_for_root(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, uid, mode in (("mine", 0, 0o644), ("theirs", 12345, 0o4755)):
        (source / name).write_text(name)
        os.chown(source / name, uid, uid)
        (source / name).chmod(mode)
    os.symlink("mine", source / "link")
    os.chown(source / "link", 23456, 34567, follow_symlinks=False)
    packed([str(source)], str(tmp_path / "packed"))
    unpacked(str(tmp_path / "packed"), str(tmp_path / "back"))
    assert tree_truth(str(tmp_path / "back")) == tree_truth(str(source))
    for name in ("mine", "theirs", "link"):
        one, other = os.lstat(source / name), os.lstat(tmp_path / "back" / name)
        assert (one.st_uid, one.st_gid) == (other.st_uid, other.st_gid)


@needs_root
def test_folders_that_may_not_be_written_come_back_without_root() -> None:
    """And what a killed run has left of them does not stay in the way."""
    setpriv = shutil.which("setpriv") or skip_or_fail("no setpriv to become another user")
    reads = "+dac_read_search"  # of this interpreter, wherever root has put it
    ids = ["--reuid=12345", "--regid=12345", "--clear-groups", f"--inh-caps={reads}", f"--ambient-caps={reads}"]
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        for name in ("one", "two"):
            (place / name / "deep").mkdir(parents=True)
            (place / name / "deep/file").write_bytes(b"content")
        left = place / "back.part/made/deep"
        left.mkdir(parents=True)
        (left / "file").write_bytes(b"content")
        for path in (*(place / name / "deep" for name in ("one", "two")), left):
            path.chmod(0o555)
            path.parent.chmod(0o555)
        for path in (place, *place.rglob("*")):
            os.chown(path, 12345, 12345)
        truth = {name: tree_truth(str(place / name)) for name in ("one", "two")}
        env_ = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(place)}
        env_["PARIO_NUMBA_CACHE"] = str(place / "kernels")  # one that is this user's own
        both = [str(place / name) for name in truth]
        for given, back in ((both[:1], "back"), (both, "both")):
            for command in (["pack", *given, str(place / f"{back}.lmdb")], ["unpack", f"{back}.lmdb", back]):
                argv = [str(setpriv), *ids, sys.executable, "-m", "pario", "data", *command]
                done = subprocess.run(
                    argv, capture_output=True, text=True, timeout=300, env=env_, check=False, cwd=place
                )
                assert done.returncode == 0, done.stderr
        assert tree_truth(str(place / "back")) == truth["one"]
        assert {name: tree_truth(str(place / "both" / name)) for name in truth} == truth
        assert not (place / "back.part").exists()
    finally:
        shutil.rmtree(place)


@needs_root
def test_nobody_elses_partial_file_is_used(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "packed.part").mkdir(mode=0o700)
    os.chown(tmp_path / "packed.part", 12345, 12345)
    with pytest.raises(FileError, match="is not yours"):
        packed([str(tmp_path / "source")], str(tmp_path / "packed"))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 16 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@needs_root
@pytest.mark.parametrize("room", [2, 9])
def test_a_full_disk_loses_nothing(room: int, small: Path, tmp_path: Path) -> None:
    """One clear error; with more room the same command goes on."""
    source, target = str(tmp_path / "source"), small / "packed"
    rng = np.random.default_rng(1)
    with lmdb.open(source, map_size=64 << 20, sync=False) as env, env.begin(write=True) as txn:
        for i in range(4000):
            txn.put(b"%06d" % i, rng.bytes(2500))
    fill = small / "fill"
    fill.write_bytes(bytes((16 - room) << 20))
    begin = "import sys; from pario.packing import writer; writer.COMMIT_BYTES = 1 << 20; from pario.cli import main; "
    argv = [sys.executable, "-c", begin + "sys.exit(main(sys.argv[1:]))", "data", "pack"]
    argv += [source, str(target), "--codec", "raw"]
    env_ = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.run(argv, capture_output=True, text=True, timeout=100, env=env_, check=False)
    assert first.returncode == 1
    assert len(first.stderr.splitlines()) == 1, first.stderr
    assert "no space is left" in first.stderr
    assert "Traceback" not in first.stderr
    assert not target.exists()
    fill.unlink()
    again = subprocess.run(argv, capture_output=True, text=True, timeout=100, env=env_, check=False)
    assert again.returncode == 0, again.stderr
    assert "going on" in again.stderr
    unpacked(str(target / "data.mdb"), str(tmp_path / "back"))
    assert lmdb_truth(str(tmp_path / "back")) == lmdb_truth(source)
