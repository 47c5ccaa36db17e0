"""pario:// for fsspec: fsspec's own abstract tests of reading, and what its users call, against py-lmdb."""

from __future__ import annotations

import datetime
import errno
import hashlib
import multiprocessing
import os
import pickle
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

try:
    import fsspec
except ImportError:
    pytest.skip("fsspec is not installed", allow_module_level=True)

from fsspec.tests.abstract import AbstractFixtures
from fsspec.tests.abstract.get import AbstractGetTests
from packed_sets import pack_copy, values_like_text, write

from pario.errors import OptionError
from pario.files.fsspec import RecordFileSystem

fsspec.register_implementation("pario", RecordFileSystem, clobber=True)  # as the entry point does where it is installed

_BIG = 17 << 20  # more than is read when a file is opened


class _Maker:
    """What fsspec's scenarios call to make their files: they become records."""

    def __init__(self) -> None:
        self.items: dict[bytes, bytes] = {}

    def touch(self, path: str) -> None:
        self.pipe(path, b"")

    def makedirs(self, path: str) -> None: ...

    def pipe(self, path: str, value: bytes) -> None:
        self.items[path.encode()] = value


class _Growing(RecordFileSystem):
    """What a test makes by `touch` becomes a record of set.lmdb, until the first read opens it."""

    def mkdir(self, path: str, **_: Any) -> None: ...

    def touch(self, path: str, **_: Any) -> None:
        lmdb_path, _, key = path.partition("/set.lmdb/")
        write(Path(lmdb_path) / "set.lmdb", [(key.encode(), b"")])


class TestGet(AbstractGetTests, AbstractFixtures):
    """fsspec's own tests of `get`: files, folders, lists and patterns, to folders that exist and that do not."""

    @pytest.fixture
    def fs(self) -> Any:
        return _Growing(skip_instance_cache=True)

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        return str(tmp_path / "set.lmdb")

    def _made(self, scenario: Callable[..., str], fs_path: str) -> str:
        maker = _Maker()
        source = scenario(maker, lambda *parts: "/".join(parts), "base")
        write(Path(fs_path), sorted(maker.items.items()))
        return f"{fs_path}/{source}"

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self, fs_path: str) -> str:
        return self._made(self._bulk_operations_scenario_0, fs_path)

    @pytest.fixture
    def fs_glob_edge_cases_files(self, fs_path: str) -> str:
        return self._made(self._glob_edge_cases_files, fs_path)

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self, fs_path: str) -> str:
        return self._made(self._dir_and_file_with_same_name_prefix, fs_path)

    @pytest.fixture
    def fs_10_files_with_hashed_names(self, fs_path: str) -> str:
        return self._made(self._10_files_with_hashed_names, fs_path)


ITEMS = [
    *((b"n/%02d" % i, bytes([i]) * (700 * i)) for i in range(12)),
    (b"n/deep/er/x", b"deep"),
    (b"t.csv", b"a,b\n1,2\n3,4\n"),
    (b"\xff\0", b"binary"),
]


@pytest.fixture(scope="module", params=["plain", "packed"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("made") / "set.lmdb"
    items = sorted(ITEMS)
    return str(write(path, items) if request.param == "plain" else pack_copy(path, items))


@pytest.fixture
def fs() -> RecordFileSystem:
    return RecordFileSystem(skip_instance_cache=True)


def test_all_bytes_by_every_way(fs: RecordFileSystem, made: str) -> None:
    wanted = {f"{made}/{key.decode()}": value for key, value in ITEMS if key.isascii()}
    wanted[f"{made}/%FF%00"] = b"binary"
    found = fs.find(made, detail=True)
    assert {name: info["size"] for name, info in found.items()} == {name: len(v) for name, v in wanted.items()}
    assert fs.cat(list(wanted)) == wanted
    for name, value in wanted.items():
        with fs.open(name) as file:
            assert hashlib.md5(file.read()).digest() == hashlib.md5(value).digest()
        assert fs.info(name) == found[name]
        assert fs.tail(name, 3) == value[-3:]
        assert fs.cat_file(name, 5, -5) == value[5:-5]
    keys = {info["key"] for info in found.values()}
    assert keys == {key for key, _ in ITEMS}


def test_folders(fs: RecordFileSystem, made: str) -> None:
    assert fs.ls(made, detail=False) == [f"{made}/n", f"{made}/t.csv", f"{made}/%FF%00"]
    assert fs.isdir(made)
    assert fs.isdir(f"pario://{made}/n/deep/")
    assert not fs.isfile(f"{made}/n")
    assert fs.find(f"{made}/n", maxdepth=2) == sorted(f"{made}/n/{i:02d}" for i in range(12))
    assert f"{made}/n/deep" in fs.find(made, withdirs=True)
    assert fs.glob(f"{made}/n/0*") == [f"{made}/n/0{i}" for i in range(10)]
    assert fs.du(made) == sum(len(value) for _, value in ITEMS)
    assert [name for _, _, files in fs.walk(made) for name in files][-1] == "x"
    assert fs.find(made, prefix="t") == [f"{made}/t.csv"]


@pytest.mark.parametrize("nanoseconds", [1_795_737_291_143_391_999, 1_795_737_291_143_391_500, 5 * 10**9])
def test_modified_is_exact(fs: RecordFileSystem, tmp_path: Path, nanoseconds: int) -> None:
    path = write(tmp_path / "set.lmdb", ITEMS[:1])
    os.utime(f"{path}/data.mdb", ns=(nanoseconds, nanoseconds))
    modified = fs.modified(str(path))
    assert modified.utcoffset() == datetime.timedelta(0)
    assert modified.replace(microsecond=0).timestamp() == nanoseconds // 10**9
    assert modified.microsecond == nanoseconds % 10**9 // 1000


def test_what_is_not_there(fs: RecordFileSystem, made: str) -> None:
    for missing in (f"{made}/no", f"{made}/t.csv/x", f"{made}/n/00/x", f"{made}x/a", os.path.dirname(made)):
        assert not fs.exists(missing)
        with pytest.raises(FileNotFoundError):
            fs.cat_file(missing)
    with pytest.raises(IsADirectoryError):
        fs.open(f"{made}/n")
    with pytest.raises(OptionError, match="memory://"):
        fsspec.open(f"pario://x::memory://{made}").open()


@pytest.mark.parametrize("act", ["mkdir", "makedirs", "rm", "rm_file", "touch", "pipe_file", "rmdir", "mv", "cp_file"])
def test_nothing_is_written(fs: RecordFileSystem, made: str, act: str) -> None:
    with pytest.raises(OSError, match="only read") as caught:
        getattr(fs, act)(f"{made}/new", *([b""] if act in ("pipe_file", "mv", "cp_file") else []))
    assert caught.value.errno == errno.EROFS
    with pytest.raises(OSError, match="only read"):
        fs.open(f"{made}/t.csv", "wb")


def test_ranges(fs: RecordFileSystem, made: str) -> None:
    value = dict(ITEMS)[b"n/11"]
    paths = [f"{made}/n/11"] * 5 + [f"{made}/nothing"]
    starts, ends = [0, 5, 6000, None, -9, 0], [10, 8, 6001, 4, None, 1]
    *found, missing = fs.cat_ranges(paths, starts, ends)
    assert found == [value[a:b] for a, b in zip(starts, ends, strict=True)][:5]
    assert isinstance(missing, FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths, 0, 1, on_error="raise")
    with pytest.raises(ValueError, match="6 paths"):
        fs.cat_ranges(paths, [0], 1)
    assert fs.cat_ranges([], [], []) == []


def test_large_files_come_in_pieces(fs: RecordFileSystem, tmp_path: Path) -> None:
    value = zlib.compress(b"") + os.urandom(_BIG)
    path = write(tmp_path / "big", [(b"x", value)])
    with fs.open(f"{path}/x", block_size=1 << 20) as file:
        assert file.read(10) == value[:10]
        file.seek(_BIG - 100)
        assert file.read() == value[_BIG - 100 :]


def test_chained_and_by_fo(made: str) -> None:
    with fsspec.open(f"pario://n/01::{made}") as file:
        assert file.read() == dict(ITEMS)[b"n/01"]
    inside = fsspec.filesystem("pario", fo=made)
    assert inside.ls("", detail=False) == ["n", "t.csv", "%FF%00"]
    assert inside.find("/n/deep") == ["n/deep/er/x"]


def _size(fs: RecordFileSystem, path: str) -> int:
    return len(fs.cat_file(path))


def test_pickled_forked_and_threaded(fs: RecordFileSystem, made: str) -> None:
    path, nbytes = f"{made}/n/07", len(dict(ITEMS)[b"n/07"])
    assert fs.cat_file(path)
    assert pickle.loads(pickle.dumps(fs)).size(path) == nbytes
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(_size, (fs, path)).get(30) == nbytes
    wrong: list[int] = []

    def read() -> None:
        for i in range(12):
            if fs.cat_file(f"{made}/n/{i:02d}") != dict(ITEMS)[b"n/%02d" % i]:
                wrong.append(i)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def test_names_with_extensions(tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n...."
    items = [(b"a", png), (b"b", png), (b"b.png", b"text"), (b"c.PNG", png), (b"d", b"GIF89a")]
    path = write(tmp_path / "images", items)
    inside = RecordFileSystem(fo=str(path), extensions=True, skip_instance_cache=True)
    assert inside.ls("", detail=False) == ["a.png", "b", "b.png", "c.PNG", "d.gif"]
    assert inside.cat_file("a.png") == png
    assert inside.cat_file("b.png") == b"text"
    assert not inside.exists("a")


@pytest.mark.full
def test_what_reads_urls(tmp_path: Path) -> None:
    """pandas, zarr and PIL, where they are installed."""
    values = values_like_text(50)
    items = [(b"t/%02d.csv" % i, b"a\n" + b"%d\n" % len(value)) for i, value in enumerate(values)]
    pandas = pytest.importorskip("pandas")
    path = write(tmp_path / "tables", items)
    assert pandas.read_csv(f"pario://{path}/t/07.csv")["a"].tolist() == [len(values[7])]
    assert pandas.read_csv(f"pario://t/08.csv::{path}")["a"].tolist() == [len(values[8])]
    image = pytest.importorskip("PIL.Image")
    picture = image.new("RGB", (5, 4), (1, 2, 3))
    picture.save(tmp_path / "x.png")
    with fsspec.open(f"pario://{write(tmp_path / 'images', [(b'x', (tmp_path / 'x.png').read_bytes())])}/x") as file:
        assert image.open(file).getpixel((4, 3)) == (1, 2, 3)
    zarr = pytest.importorskip("zarr")
    zarr.create_array(str(tmp_path / "z"), data=__import__("numpy").arange(1000).reshape(50, 20), chunks=(7, 6))
    parts = [part for part in (tmp_path / "z").rglob("*") if part.is_file()]
    files = [(str(part.relative_to(tmp_path / "z")).encode(), part.read_bytes()) for part in parts]
    opened = zarr.open_array(f"pario://{write(tmp_path / 'z.lmdb', sorted(files))}/", mode="r")
    assert opened[49, 19] == 999
    assert opened[:].sum() == 499500
