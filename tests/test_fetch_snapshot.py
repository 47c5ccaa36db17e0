"""Which state is read, and when it may still be trusted: commits of a real writer beside us."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import lmdb
import pytest
from lmdb_cases import FORMATS, opened

from pario.errors import CorruptedError, SnapshotError
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import check_snapshot, read_snapshot


def commit(env: lmdb.Environment, size: int = 100) -> None:
    with env.begin(write=True) as txn:
        txn.put(b"key", os.urandom(size))


@pytest.mark.parametrize("version", FORMATS)
def test_what_py_lmdb_says(tmp_path: Path, version: int) -> None:
    with opened(tmp_path, version) as env:
        for commits in range(1, 6):
            commit(env)
            stat, info = env.stat(), env.info()
            fetcher = PosixFetcher(os.fspath(tmp_path / "data.mdb"))
            snapshot = read_snapshot(fetcher)
            fetcher.close()
            assert snapshot.txnid == info["last_txnid"] == commits
            assert snapshot.last_pgno == info["last_pgno"]
            assert snapshot.mapsize == info["map_size"]
            assert snapshot.page_size == stat["psize"]
            main = snapshot.main
            assert [
                main.md_depth,
                main.md_branch_pages,
                main.md_leaf_pages,
                main.md_overflow_pages,
                main.md_entries,
            ] == [stat[name] for name in ("depth", "branch_pages", "leaf_pages", "overflow_pages", "entries")]
            assert (snapshot.version, snapshot.word, snapshot.byteorder, snapshot.native) == (
                version,
                8,
                "little",
                True,
            )
            assert pickle.loads(pickle.dumps(snapshot)) == snapshot


@pytest.mark.parametrize("last", [1 << 63, 1 << 52, 0])
def test_a_last_page_that_no_file_has(tmp_path: Path, last: int) -> None:
    """2**52 pages of 4,096 bytes end at an offset beyond 63 bits."""
    with opened(tmp_path, 1) as env:
        commit(env)
    path = tmp_path / "data.mdb"
    raw = bytearray(path.read_bytes())
    for page in (0, 1):
        at = page * 4096 + 16 + 120  # behind the page's header; mm_last_pg behind magic, sizes and two trees
        assert int.from_bytes(raw[at : at + 8], "little") < 100
        raw[at : at + 8] = last.to_bytes(8, "little")
    path.write_bytes(raw)
    fetcher = PosixFetcher(os.fspath(path))
    with pytest.raises(CorruptedError, match=f"the last page in use cannot be {last}"):
        read_snapshot(fetcher)
    fetcher.close()


def test_one_read_is_enough_only_for_a_snapshot_that_is_known(tmp_path: Path) -> None:
    """Two equal reads tell a meta page that a writer is writing; of a known one that is not asked."""
    with opened(tmp_path, 1) as env:
        commit(env)
    fetcher = PosixFetcher(os.fspath(tmp_path / "data.mdb"))
    pread, reads = fetcher.pread, []

    def counted(offset: int, nbytes: int) -> bytes:
        reads.append((offset, nbytes))
        return pread(offset, nbytes)

    fetcher.pread = counted  # type: ignore[method-assign]
    found = []
    for believe in (None, lambda snapshot: False, lambda snapshot: snapshot.txnid == 1):
        reads.clear()
        found.append((read_snapshot(fetcher, believe), len(reads)))
    fetcher.close()
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[0][1] == found[1][1] == found[2][1] + 1


@pytest.mark.parametrize("version", FORMATS)
def test_one_commit_is_harmless_two_are_not(tmp_path: Path, version: int) -> None:
    with opened(tmp_path, version) as env:
        for _ in range(4):
            commit(env)
        fetcher = PosixFetcher(os.fspath(tmp_path / "data.mdb"))
        snapshot = read_snapshot(fetcher)
        check_snapshot(fetcher, snapshot)
        commit(env)
        check_snapshot(fetcher, snapshot)
        commit(env)
        what = "writers committed .* we read transaction 4, the meta pages now say 6 and 5"
        with pytest.raises(SnapshotError, match=what) as caught:
            check_snapshot(fetcher, snapshot)
        assert caught.value.path == fetcher.path
        assert "mdb_copy" in str(caught.value)
        check_snapshot(fetcher, read_snapshot(fetcher))
        fetcher.close()


def test_the_rule_holds_against_a_real_writer(tmp_path: Path) -> None:
    """As long as the check passes, no page of the snapshot has changed; some do change soon after it fails."""
    path = os.fspath(tmp_path / "data.mdb")
    with opened(tmp_path, 1) as env:
        with env.begin(write=True) as txn:
            for i in range(500):
                txn.put(b"%04d" % i, b"first" * 100)
        for k in range(3):  # some free pages
            with env.begin(write=True) as txn:
                for i in range(k, 500, 7):
                    txn.put(b"%04d" % i, os.urandom(500))
        fetcher = PosixFetcher(path)
        snapshot = read_snapshot(fetcher)
        before = Path(path).read_bytes()
        from lmdb_cases import located

        pages = {int(offset) // 4096 for offset in located(path).extents["offset"]}  # type: ignore[index]
        changed_after = 0
        for k in range(6):
            with env.begin(write=True) as txn:
                for i in range(k, 500, 5):
                    txn.put(b"%04d" % i, os.urandom(500))
            after = Path(path).read_bytes()
            changed = [p for p in pages if before[p * 4096 : p * 4096 + 4096] != after[p * 4096 : p * 4096 + 4096]]
            try:
                check_snapshot(fetcher, snapshot)
            except SnapshotError:
                changed_after += len(changed)
            else:
                assert not changed
        assert changed_after > 0
        fetcher.close()


def test_replaced_in_place(tmp_path: Path) -> None:
    with opened(tmp_path / "old", 1) as env:
        commit(env)
    with opened(tmp_path / "new", 1) as env:
        for _ in range(5):
            commit(env)
    path = os.fspath(tmp_path / "new" / "data.mdb")
    fetcher = PosixFetcher(path)
    snapshot = read_snapshot(fetcher)
    shutil.copyfile(tmp_path / "old" / "data.mdb", path)  # into the same inode
    with pytest.raises(SnapshotError, match="replaced"):
        check_snapshot(fetcher, snapshot)
    os.truncate(path, 4096)
    with pytest.raises(SnapshotError, match="cut off"):
        check_snapshot(fetcher, snapshot)
    fetcher.close()


@pytest.mark.parametrize("later", [0, 1], ids=["same transaction", "next transaction"])
@pytest.mark.parametrize("version", FORMATS)
def test_another_file_written_over_this_one(tmp_path: Path, version: int, later: int) -> None:
    """Its transaction numbers tell nothing; the meta page as a whole does."""
    for name, commits, size in (("old", 3 + later, 100), ("new", 3, 300_000)):
        with opened(tmp_path / name, version) as env:
            for _ in range(commits):
                commit(env, size)
    path = os.fspath(tmp_path / "new" / "data.mdb")
    fetcher = PosixFetcher(path)
    snapshot = read_snapshot(fetcher)
    check_snapshot(fetcher, snapshot)
    whole = (tmp_path / "old" / "data.mdb").read_bytes()
    with open(path, "r+b") as file:  # into the same inode, nothing cut off
        file.write(whole)
    with pytest.raises(SnapshotError, match="another file was written over this one"):
        check_snapshot(fetcher, snapshot)
    fetcher.close()


def test_grown_between_open_and_first_read(tmp_path: Path) -> None:
    with opened(tmp_path, 1) as env:
        commit(env)
        fetcher = PosixFetcher(os.fspath(tmp_path / "data.mdb"))
        commit(env, size=1_000_000)
        with pytest.raises(SnapshotError, match="grew"):
            read_snapshot(fetcher)
        fetcher.close()


class Restless:
    """A file whose meta pages change between any two reads, for some reads."""

    def __init__(self, fetcher: PosixFetcher, reads: int) -> None:
        self.path, self.nbytes, self.align = fetcher.path, fetcher.nbytes, 1
        self._fetcher, self._left = fetcher, reads

    def pread(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(self._fetcher.pread(offset, nbytes))
        if nbytes > 4096 and self._left > 0:
            self._left -= 1
            data[4000] = self._left & 255  # an unused byte of a meta page
        return bytes(data)


def test_read_until_two_reads_agree(tmp_path: Path) -> None:
    with opened(tmp_path, 1) as env:
        commit(env)
    fetcher = PosixFetcher(os.fspath(tmp_path / "data.mdb"))
    assert read_snapshot(Restless(fetcher, 5)) == read_snapshot(fetcher)  # type: ignore[arg-type]
    with pytest.raises(SnapshotError, match="changed during each"):
        read_snapshot(Restless(fetcher, 1000))  # type: ignore[arg-type]
    fetcher.close()
