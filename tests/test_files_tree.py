"""The tree of files of an LMDB: every record once, under the name that its key asks for, with py-lmdb's bytes."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from pathlib import Path

import lmdb
import pytest
from datasets import MAKERS, truth_of
from file_trees import awkward_keys, expected_folders, walk
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_sets import pack_copy, values_like_text, write

from pario.errors import ClosedError, CorruptedError, DatabaseError, MissingError, OptionError, SnapshotError
from pario.files.names import is_plain
from pario.files.tree import Node, Tree


def bytes_of(tree: Tree, node: Node) -> bytes:
    out = bytearray(node.size)
    tree.read_into(node, out)
    return bytes(out)


def _same(path: Path, truth: list[tuple[bytes, bytes]], **options: bool) -> dict[str, Node]:
    with Tree({"": path}, **options) as tree:
        files = dict(walk(tree))
        assert {tree.key(name): bytes_of(tree, node) for name, node in files.items()} == dict(truth)
        assert len(files) == len(truth)
        if not any(b"%db" in key for key, _ in truth):
            assert [tree.key(name) for name in files] == [key for key, _ in truth]
        numbers = {node.number for node in files.values()}
        assert len(numbers) == len(truth)
        for key, _ in truth:
            if key.isascii() and is_plain(key.decode()) and key not in expected_folders([k for k, _ in truth]):
                assert options or tree.key(key.decode()) == key  # the name is the key
    return files


@pytest.mark.parametrize(
    "kind", ["one_giant", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("format_3", "deletions"))]
)
def test_every_record_is_a_file(tmp_path: Path, kind: str) -> None:
    made = MAKERS[kind](tmp_path / "set")
    _same(Path(made.path), made.truth)


numbers = st.lists(st.lists(st.integers(0, 24), min_size=1, max_size=7), min_size=1, max_size=40)


def _check_awkward(numbers: list[list[int]], folder: Path, extensions: bool) -> None:
    items = [(key, b"\xff\xd8\xff" * (i % 2) + key) for i, key in enumerate(awkward_keys(numbers))]
    path = folder / hashlib.md5(repr(numbers).encode()).hexdigest()
    with lmdb.open(str(path), map_size=1 << 22, sync=False) as env, env.begin(write=True) as txn:
        for key, value in items:
            txn.put(key, value)
    options = {"extensions": True} if extensions else {}
    _same(path, items, **options)
    _same(pack_copy(folder / f"{path.name}-blocks", items, counts=(3, 1, 9)), items, **options)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(numbers, st.booleans())
def test_awkward_keys(tmp_path_factory: pytest.TempPathFactory, numbers: list[list[int]], extensions: bool) -> None:
    _check_awkward(numbers, tmp_path_factory.mktemp("keys"), extensions)


@pytest.mark.full
def test_many_awkward_keys(tmp_path: Path) -> None:
    rng = random.Random(7)
    for _ in range(100):
        many = rng.choice([1, 5, 40, 400])
        numbers = [[rng.randrange(25) for _ in range(rng.randrange(1, 8))] for _ in range(many)]
        _check_awkward(numbers, tmp_path, rng.random() < 0.3)


def test_records_beside_folders_of_their_name(tmp_path: Path) -> None:
    items = [(b"a", b"1"), (b"a-", b"2"), (b"a/", b"3"), (b"a//x", b"4"), (b"a/b", b"5"), (b"/r", b"6"), (b"b", b"7")]
    files = _same(write(tmp_path / "set", items), sorted(items))
    assert list(files) == ["%/r", "a%", "a-", "a/%%", "a/%/x", "a/b", "b"]


def test_named_databases_are_folders(tmp_path: Path) -> None:
    for lib_version in (0, 1):
        path = tmp_path / str(lib_version)
        with lmdb.open(str(path), map_size=1 << 24, max_dbs=9, lib_version=lib_version) as env:
            images, below, whole = (env.open_db(name) for name in (b"images", b"x/y", b"ints"))
            numbers = env.open_db(b"numbers", integerkey=True)
            backwards = env.open_db(b"backwards", reverse_key=True)
            env.open_db(b"empty")
            with env.begin(write=True) as txn:
                txn.put(b"images/deep", b"0")
                txn.put(b"1/2", b"1", db=images)
                txn.put(b"z", b"2", db=below)
                txn.put(b"w", b"3", db=whole)
                for i in (2, 300, 1 << 40):
                    txn.put(i.to_bytes(8, "little"), b"%d" % i, db=numbers)
                for key in (b"a/1", b"b/1"):
                    txn.put(key, key, db=backwards)
        with Tree({"": path}) as tree:
            files = {name: bytes_of(tree, node) for name, node in walk(tree)}
            assert files == {
                **{"images/deep": b"0", "images%db/1/2": b"1", "x/y/z": b"2", "ints/w": b"3"},
                **{"numbers/2": b"2", "numbers/300": b"300", f"numbers/{1 << 40}": b"%d" % (1 << 40)},
                **{"backwards/a%2F1": b"a/1", "backwards/b%2F1": b"b/1"},
            }
            assert [name for name, _ in tree.names("numbers")] == ["2", "300", str(1 << 40)]
            assert list(tree.names("empty")) == []
            for missing in ("numbers/02", "numbers/1", "numbers/x", f"numbers/{1 << 70}", "images/1/2", "ints%db"):
                with pytest.raises(FileNotFoundError):
                    tree.find(missing)


def test_a_listing_goes_on_from_anything_in_it(tmp_path: Path) -> None:
    """Records, folders, named databases, one that cannot be entered, numbers, keys without an order of names."""
    path = tmp_path / "set"
    with lmdb.open(str(path), map_size=1 << 24, max_dbs=9) as env:
        dbs = [env.open_db(b"db"), env.open_db(b"twice", dupsort=True), env.open_db(b"zz/db")]
        dbs += [env.open_db(b"back", reverse_key=True), env.open_db(b"numbers", integerkey=True)]
        with env.begin(write=True) as txn:
            for key in (b"a", b"a-", b"a/1", b"a/2", b"b\n", b"b" + b"x" * 300, b"u\xff", b"zz/a", b"zzz"):
                txn.put(key, b"1")
            for i in range(600):
                txn.put(b"many/%d" % i, b"1")
                txn.put(b"%d/x" % i, b"1", db=dbs[3])
                txn.put(i.to_bytes(8, "little"), b"1", db=dbs[4])
    with Tree({"": path}) as tree:
        for folder in ("", "a", "many", "zz", "back", "numbers"):
            whole = list(tree.names(folder))
            for k in range(0, len(whole), 1 if len(whole) < 50 else 37):
                assert list(tree.names(folder, whole[k][1])) == whole[k:], (folder, k)
    with Tree({"x": path, "y": path}) as tree:
        whole = list(tree.names(""))
        assert list(tree.names("", whole[1][1])) == whole[1:]


def test_duplicates_have_one_clear_error(tmp_path: Path) -> None:
    made = MAKERS["dupsort"](tmp_path / "dups")
    with lmdb.open(made.path, max_dbs=9) as env, env.begin(write=True) as txn:
        txn.put(b"beside", b"x")
    assert made.db is not None
    name = made.db.decode()
    with Tree({"": made.path}) as tree:
        assert {name, "beside"} <= {name for name, _ in tree.names("")}
        for act in (tree.names, tree.find):
            with pytest.raises(DatabaseError, match="several values per key") as caught:
                act(name if act == tree.names else f"{name}/x")
            assert "pario.lmdb" in (caught.value.hint or "")


@pytest.mark.parametrize("packed", ["one", "named"])
def test_packed_records_are_what_was_packed(tmp_path: Path, packed: str) -> None:
    items = [(b"k/%03d" % i, value) for i, value in enumerate(values_like_text(120, most=30000))]
    db = b"named" if packed == "named" else None
    path = pack_copy(tmp_path / "set", items, db=db)
    with Tree({"": path}) as tree:
        files = dict(walk(tree))
        above = "named/" if db else ""
        assert {name: bytes_of(tree, node) for name, node in files.items()} == {
            above + key.decode(): value for key, value in items
        }
        assert tree.read(f"{above}k/007", 10, 20) == items[7][1][10:30]


def test_several_datasets(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [(b"x", b"1")])
    with Tree({"b": one, "a": one / "data.mdb"}) as tree:
        assert [name for name, _ in tree.names("")] == ["a", "b"]
        assert {name: bytes_of(tree, node) for name, node in walk(tree)} == {"a/x": b"1", "b/x": b"1"}
        assert len({tree.find(path).number for path in ("", "a", "b", "a/x", "b/x")}) == 5
        for missing in ("c", "a/", "c/x"):
            with pytest.raises(FileNotFoundError):
                tree.find(missing)
    for bad in ("", ".", "..", "a/b", "a\0", "x" * 256, "\ud800"):
        with pytest.raises(OptionError):
            Tree({bad: one, "good": one})
    with pytest.raises(OptionError):
        Tree({})
    with pytest.raises(MissingError):
        Tree({"": tmp_path / "nowhere"})


def test_what_is_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "set", [(b"a", b"1"), (b"d/e", b"2"), (b"d", b"3")])
    with Tree({"": path}) as tree:
        for missing in ("b", "d/", "/a", "a/", "./a", "d/.", "d//e", "A", "d%/x", "a%", "d%%", "%61", "d/e%", "\ud800"):
            with pytest.raises((FileNotFoundError, NotADirectoryError)):
                tree.find(missing)
        for wrong in ("a/x", "a/x/y", "d%/e", "d/e/f"):
            with pytest.raises(NotADirectoryError):
                tree.find(wrong)
        with pytest.raises(NotADirectoryError):
            tree.names("a")
        with pytest.raises(IsADirectoryError):
            tree.read("d")
        for size in (0, 2):
            with pytest.raises(ValueError, match="for a record of 1"):
                tree.read_into("a", bytearray(size))
        with pytest.raises(ValueError, match="read-only"):
            tree.read_into("a", b"x")
    with pytest.raises(ClosedError):
        tree.find("a")


def test_empty(tmp_path: Path) -> None:
    with Tree({"": MAKERS["empty"](tmp_path / "set").path}) as tree:
        assert list(tree.names("")) == []
        assert tree.find("").size == 0


def test_pieces(tmp_path: Path) -> None:
    values = {b"big": os.urandom(300_000), b"small": b"0123456789", b"none": b""}
    with Tree({"": write(tmp_path / "set", sorted(values.items()))}) as tree:
        for key, value in values.items():
            for offset in (0, 1, 4, 100_000, 299_999, 300_000, 400_000):
                for nbytes in (-1, 0, 1, 5, 65536, 1 << 30):
                    stop = None if nbytes < 0 else offset + nbytes
                    assert tree.read(key.decode(), offset, nbytes) == value[offset:stop]


def test_a_writer_is_noticed(tmp_path: Path) -> None:
    items = [(b"%04d" % i, os.urandom(5000)) for i in range(300)]
    path = write(tmp_path / "set", items)
    with Tree({"": path}) as tree, lmdb.open(str(path), map_size=1 << 30) as env:
        assert tree.read("0007") == items[7][1]
        node = tree.find("0008")
        for i in range(4):
            with env.begin(write=True) as txn:
                txn.put(b"%04d" % i, b"new")
        with pytest.raises(SnapshotError, match="open it again"):
            tree.read_into(node, bytearray(node.size))
    with Tree({"": path}) as tree:
        assert tree.read("0000") == b"new"


def test_damage_is_an_error(tmp_path: Path) -> None:
    items = [(b"%04d" % i, bytes([i % 256]) * 9000) for i in range(500)]
    data = (write(tmp_path / "set", items) / "data.mdb").read_bytes()
    rng = random.Random(3)
    wrong = errors = 0
    # Pages with headers. Bytes in the middle of a value are as good as any others, without checksums.
    headed = [p for p in range(2, len(data) >> 12) if int.from_bytes(data[p << 12 : (p << 12) + 8], "little") == p]
    for page in rng.sample(headed, 20):
        at = page << 12
        cut = rng.random() < 0.2
        (tmp_path / "bad").write_bytes(data[:at] + (b"" if cut else rng.randbytes(16) + data[at + 16 :]))
        try:
            with Tree({"": tmp_path / "bad"}) as tree:
                for _name, node in tree.names(""):
                    wrong += bytes_of(tree, node) != dict(items)[tree.key(node)]
        except (CorruptedError, OSError):
            errors += 1
    assert not wrong
    assert errors > 10


def test_several_threads(tmp_path: Path) -> None:
    items = {b"%05d" % i: os.urandom(i % 4000) for i in range(4000)}
    wrong: list[bytes] = []
    with Tree({"": write(tmp_path / "set", sorted(items.items()))}) as tree:

        def read(seed: int) -> None:
            rng = random.Random(seed)
            for key in rng.choices(list(items), k=500):
                if tree.read(key.decode()) != items[key]:
                    wrong.append(key)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not wrong


@pytest.mark.full
@pytest.mark.parametrize("kind", ["variable_sizes", "random_insertion", "named_databases", "small_records"])
def test_more_kinds(tmp_path: Path, kind: str) -> None:
    made = MAKERS[kind](tmp_path / "set")
    with Tree({"": made.path}) as tree:
        above = "" if made.db is None else made.db.decode() + "/"
        files = {name: bytes_of(tree, node) for name, node in walk(tree) if name.startswith(above)}
        assert list(files.values()) == [value for _, value in truth_of(made.path, made.db)]
