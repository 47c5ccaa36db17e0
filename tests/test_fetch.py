"""One contract, every fetcher. The oracle is the file's content as the test wrote it."""

import ctypes
import errno
import mmap
import os
import threading
import time
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from cold_file import why_not_cold

from benchmarks.cache import cached_bytes, drop_file
from pario import options
from pario.errors import ClosedError, MissingError, OptionError, ReadError
from pario.fetch.direct import DirectFetcher
from pario.fetch.joined import JoinedFetcher
from pario.fetch.limited import open_limited
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.fetch.resolve import FETCHERS, resolve
from pario.plane.agent import Agent
from pario.plane.session import Who
from pario.plane.words import PlaneAddress
from pario.records import EXTENT
from pario.tiers.grid import Grid
from pario.tiers.memory import MemoryTier
from pario.tiers.staged import StagedFetcher

#: of files that are no LMDBs
SNAPSHOTS: list[Any] = [SimpleNamespace(page_size=0, stamp=b"")]

SIZE = 3_000_001  # not a multiple of anything


@pytest.fixture(scope="module")
def content():
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture(scope="module")
def path(content, tmp_path_factory):
    file = tmp_path_factory.mktemp("fetch") / "data.mdb"
    content.tofile(file)
    return str(file)


#: of SIZE bytes, what lies in each of three joined files, which begin at multiples of 1 MiB
CUTS = [0, 1 << 20, 2 << 20, SIZE]


@pytest.fixture(scope="module")
def paths(content, tmp_path_factory):
    """The same content in three files."""
    folder = tmp_path_factory.mktemp("joined")
    files = [folder / f"{k}.mdb" for k in range(3)]
    for file, (first, stop) in zip(files, pairwise(CUTS), strict=True):
        content[first:stop].tofile(file)
    return [str(file) for file in files]


#: over each of two fetchers
OVER = ("joined", "staged", "limited")


@pytest.fixture(params=[*FETCHERS, *OVER, *(f"{name}, direct" for name in OVER)])
def fetcher(request, path, paths, monkeypatch):
    try:
        if request.param.startswith("staged"):
            monkeypatch.setattr("pario.fetch.snapshot.check_snapshot", lambda *_: None)  # these files are no LMDBs
            tiers = [MemoryTier.made(Grid(SIZE, 256 << 10), 1 << 20)]  # for a third of it
            store = FETCHERS["direct" if "direct" in request.param else "posix"](path)
            one = StagedFetcher(store, SNAPSHOTS, tiers, grid=tiers[0].grid, read_bytes=64 << 10, count=lambda *_: None)
        elif request.param.startswith("limited"):
            kind = FETCHERS["direct" if "direct" in request.param else "posix"]
            one = open_limited(lambda: kind(path), Agent(PlaneAddress("127.0.0.1", 1), Who("me", None, "a", "a", "n")))
        elif request.param.startswith("joined"):
            one = JoinedFetcher([FETCHERS["direct" if "direct" in request.param else "posix"](file) for file in paths])
        else:
            one = FETCHERS[request.param](path)
    except OptionError:
        pytest.skip("this file system has no O_DIRECT")
    yield one
    one.close()


def aligned(nbytes):
    memory = np.full(nbytes + 4096, 0xEE, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + nbytes]


def some_reads(rng, align, count):
    first = rng.integers(0, SIZE // align, count)
    blocks = rng.integers(1, max(2, 40_000 // align), count)
    reads = np.zeros(count, EXTENT)
    reads["offset"] = first * align
    reads["nbytes"] = np.minimum(blocks * align, (SIZE - reads["offset"] + align - 1) // align * align)
    starts = np.concatenate(([0], np.cumsum(-(-reads["nbytes"] // align) * align)))
    return reads, starts[:-1], int(starts[-1])


@pytest.mark.parametrize("inflight", [1, 4])
@pytest.mark.parametrize("count", [1, 2, 300])
def test_every_byte_arrives(fetcher, content, inflight, count):
    reads, starts, total = some_reads(np.random.default_rng(count), fetcher.align, count)
    out = aligned(total)
    pool = ReadPool(fetcher, inflight)
    pool.read(reads, out, starts)
    pool.close()
    for (offset, nbytes), start in zip(reads.tolist(), starts.tolist(), strict=True):
        wanted = content[offset : offset + nbytes]
        assert np.array_equal(out[start : start + len(wanted)], wanted)


def test_what_need_not_be_waited_for_arrives_and_the_rest_is_told(fetcher, content):
    reads, starts, total = some_reads(np.random.default_rng(7), fetcher.align, 200)
    out = aligned(total)
    there = fetcher.read_now(reads, out, starts)
    assert there.dtype == bool
    assert len(there) == len(reads)
    for k in np.flatnonzero(there):
        (offset, nbytes), start = reads[k], starts[k]
        assert np.array_equal(out[start : start + nbytes], content[offset : offset + nbytes])


def test_a_read_that_does_not_wait_fetches_nothing(path):
    """RWF_NOWAIT alone starts read-ahead: a fill that asked so read a cold disk twice."""
    why = why_not_cold(path) or ("" if cached_bytes(path) == 0 else "the kernel has no cachestat")
    if why:
        pytest.skip(why)
    fetcher = PosixFetcher(path)
    reads = np.array([(k << 20, 1 << 20) for k in range(2)], EXTENT)
    assert not fetcher.read_now(reads, np.zeros(2 << 20, np.uint8), np.array([0, 1 << 20])).any()
    fetcher.close()
    time.sleep(0.1)
    assert (cached_bytes(path) or 0) <= 1 << 16  # a page, by which the fetcher learns whether the file system tells


def test_the_page_cache_need_not_be_waited_for(path, paths, content, tmp_path, monkeypatch):
    """Of what it has, every byte arrives at once: also across a file system that does not tell."""
    for fetcher in (PosixFetcher(path), JoinedFetcher([PosixFetcher(file) for file in paths])):
        for file in fetcher.files:
            with open(file.path, "rb") as opened:
                opened.read()  # it is there
        reads = np.array([(5, 4000), (0, 0), (SIZE - 10, 10), (1 << 20, 100), ((1 << 20) - 8, 16)], EXTENT)
        starts = np.cumsum(reads["nbytes"]) - reads["nbytes"]
        out = np.zeros(int(reads["nbytes"].sum()), np.uint8)
        there = fetcher.read_now(reads, out, starts)
        # What lies in two files is read by others.
        assert there[[0, 2, 3]].all()
        assert there[4] == (len(fetcher.files) == 1)
        for (offset, nbytes), start in zip(reads[there].tolist(), starts[there].tolist(), strict=True):
            assert np.array_equal(out[start : start + nbytes], content[offset : offset + nbytes])
        beyond = fetcher.read_now(np.array([(SIZE - 10, 11)], EXTENT), out, np.zeros(1, np.int64))
        assert not beyond.any()
        fetcher.close()

    def refused(*_):
        raise OSError(errno.EOPNOTSUPP, "no such flag")

    monkeypatch.setattr(os, "preadv", refused)
    untold = PosixFetcher(path)
    assert untold.read_now(reads, out, starts).all()
    assert np.array_equal(out[4000:4010], content[-10:])
    untold.close()


def test_nothing_outside_the_reads_is_written(fetcher):
    reads = np.array([(0, fetcher.align * 2)], EXTENT)
    out = aligned(fetcher.align * 6 + 8192)
    fetcher.read(reads, out, np.array([fetcher.align * 2]))
    assert (out[: fetcher.align * 2] == 0xEE).all()
    assert (out[fetcher.align * 4 :] == 0xEE).all()


def test_no_read_at_all(fetcher):
    pool = ReadPool(fetcher, 2)
    pool.read(np.zeros(0, EXTENT), aligned(4096), np.zeros(0, np.int64))
    called = threading.Event()
    pool.submit(np.zeros(0, EXTENT), aligned(4096), np.zeros(0, np.int64), lambda error, seconds: called.set())
    assert called.wait(10)
    pool.close()


def test_a_buffer_that_is_too_small_is_refused(fetcher):
    with pytest.raises(IndexError, match="buffer of"):
        fetcher.read(np.array([(0, 8192)], EXTENT), aligned(4096), np.array([0]))


def test_another_file_under_the_old_name(tmp_path):
    """Of the same size, as a copy is; and none."""
    path = tmp_path / "f"
    path.write_bytes(bytes(100))
    file = PosixFetcher(str(path))
    (tmp_path / "other").write_bytes(bytes(100))
    (tmp_path / "other").rename(path)
    assert file.is_replaced()
    path.unlink()
    assert file.is_replaced()
    file.close()


def test_what_is_open(fetcher, path, paths, content):
    opened = [path] if len(fetcher.files) == 1 else paths
    assert (fetcher.path, fetcher.nbytes) == (", ".join(opened), SIZE)
    for file, name in zip(fetcher.files, opened, strict=True):
        assert file.path == name
        assert os.path.samestat(file.status(), os.stat(name))
        assert os.path.samestat(os.fstat(file.fileno()), os.stat(name))
        assert not file.is_replaced()
    assert fetcher.pread(SIZE - 10, 100) == content[-10:].tobytes()
    assert fetcher.pread(SIZE, 1) == b""


def test_capabilities_may_be_asked_of_every_fetcher(fetcher):
    assert fetcher.align & (fetcher.align - 1) == 0
    share = fetcher.cached_share(0, SIZE)
    assert share is None or 0 <= share <= 1
    assert isinstance(fetcher.limited, bool)
    assert isinstance(fetcher.watched, bool)


def test_a_closed_file_says_so(fetcher):
    fetcher.close()
    fetcher.close()
    for call in (
        lambda: fetcher.pread(0, 1),
        lambda: fetcher.read(np.array([(0, 4096)], EXTENT), aligned(4096), np.array([0])),
        *(file.fileno for file in fetcher.files),
        *(file.is_replaced for file in fetcher.files),
    ):
        with pytest.raises(ClosedError):
            call()


def test_a_read_over_the_end_of_a_joined_file(tmp_path, content):
    """Between two files there is nothing to be read, and nothing is written; an error names file and offset."""
    MiB = 1 << 20
    sizes = [70_000, 5_000, 200_000]
    for k, size in enumerate(sizes):
        content[1000 * k :][:size].tofile(tmp_path / f"{k}")
    one = JoinedFetcher([PosixFetcher(str(tmp_path / f"{k}")) for k in range(3)])
    assert one.bases.tolist() == [0, MiB, 2 * MiB]
    assert one.nbytes == 2 * MiB + 200_000
    assert one.file_of(np.array([0, 69_999, MiB, 2 * MiB - 1, 2 * MiB])).tolist() == [0, 0, 1, 1, 2]
    wanted = np.full(one.nbytes, 0xEE, np.uint8)
    for k, (base, size) in enumerate(zip(one.bases, sizes, strict=True)):
        wanted[base : base + size] = content[1000 * k :][:size]
    for reads in (
        [(0, one.nbytes)],
        [(69_990, 100_000), (50, 60), (MiB + 4_500, MiB + 100_000)],
        [(MiB - 10, MiB + 100_000), (0, 0), (2 * MiB + 100_000, 10)],
        [(MiB + 1_000, 2_000)],
    ):
        wide = np.array(reads, EXTENT)
        starts = np.cumsum(wide["nbytes"]) - wide["nbytes"]
        out = aligned(int(wide["nbytes"].sum()))
        one.read(wide, out, starts)
        assert np.array_equal(out, np.concatenate([wanted[at : at + nbytes] for at, nbytes in reads]))
    os.truncate(tmp_path / "1", 4_000)
    with pytest.raises(ReadError, match="ended early") as caught:
        one.read(np.array([(MiB + 3_500, 1_000)], EXTENT), aligned(4096), np.array([0]))
    assert (caught.value.path, caught.value.offset) == (str(tmp_path / "1"), 4_000)
    one.close()


def test_the_table_has_what_options_allow():
    assert set(FETCHERS) == set(get_args(options.Fetch))


def test_a_truncated_file_names_path_and_offset(content, tmp_path):
    file = tmp_path / "short.mdb"
    content[:10_000].tofile(file)
    one = PosixFetcher(str(file))
    os.truncate(file, 5_000)
    reads = np.array([(0, 4_000), (4_000, 4_000)], EXTENT)
    pool = ReadPool(one, 2)
    with pytest.raises(ReadError, match=r"1,000 of 4,000") as caught:
        pool.read(reads, aligned(8192), np.array([0, 4_000]))
    assert caught.value.path == str(file)
    assert caught.value.offset == 5_000
    pool.close()
    one.close()


def test_an_error_of_the_storage_names_itself(path):
    one = PosixFetcher(path)
    real, one._read_fd = one._read_fd, os.open("/", os.O_RDONLY)  # a directory: EISDIR
    with pytest.raises(ReadError, match="Is a directory"):
        one.read(np.array([(0, 100)], EXTENT), aligned(4096), np.array([0]))
    os.close(one._read_fd)
    one._read_fd = real
    one.close()
    with pytest.raises(ClosedError):
        one.pread(0, 1)


def test_a_closed_pool_takes_nothing(path):
    """A loader that was dropped while its feed hands over a group: no thread starts once more."""
    one = PosixFetcher(path)
    reads, starts = np.array([(0, 100), (200, 100)], EXTENT), np.array([0, 100])
    for used in (False, True):
        pool = ReadPool(one, 2)
        if used:
            pool.read(reads, aligned(4096), starts)
        assert pool.close()
        before = threading.active_count()
        with pytest.raises(ClosedError):
            pool.submit(reads, aligned(4096), starts, lambda error, seconds: None)
        with pytest.raises(ClosedError):
            pool.read(reads, aligned(4096), starts)
        assert threading.active_count() == before
        assert pool.close()
    one.close()


def test_a_read_that_does_not_end_keeps_nobody(path):
    let_go = threading.Event()

    class Stalled(PosixFetcher):
        def read(self, reads, out, starts):
            let_go.wait(30)

    one = Stalled(path)
    pool = ReadPool(one, 2)
    done = threading.Event()
    pool.submit(np.array([(0, 100)], EXTENT), aligned(4096), np.array([0]), lambda error, seconds: done.set())
    assert not pool.close(0.1)
    let_go.set()
    assert done.wait(10)  # it was under way, and ends in order
    one.close()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EINVAL, OptionError), (errno.ENOTSUP, OptionError), (errno.EIO, OSError)]
)
def test_a_file_system_without_direct_reads(path, monkeypatch, number, kind):
    """It says so, and how to go on; another error stays what it is. No file stays open."""
    opened, there = os.open, len(os.listdir("/proc/self/fd"))

    def refuse(name, flags, *more, **options):
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return opened(name, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(kind, match="posix" if kind is OptionError else os.strerror(number)):
        DirectFetcher(path)
    assert len(os.listdir("/proc/self/fd")) == there


def test_the_share_of_a_file_that_is_in_memory(tmp_path):
    """As an oracle says it: mincore of a map. A part that is not there is none."""
    path = tmp_path / "cold"
    path.write_bytes(bytes(8 << 20))
    why = why_not_cold(str(path))
    if why:
        pytest.skip(why)
    drop_file(str(path))
    with closing(PosixFetcher(str(path))) as one:
        assert one.cached_share(0, 8 << 20) < 0.01
        one.read(np.array([(1 << 20, 2 << 20)], EXTENT), np.empty(2 << 20, np.uint8), np.zeros(1, np.int64))
        there = in_memory(str(path))
        assert there.mean() == pytest.approx(one.cached_share(0, 8 << 20))
        assert one.cached_share(1 << 20, 2 << 20) == 1.0 == there[256:768].mean()
        assert one.cached_share((1 << 20) + 5000, 1) == 1.0
        assert one.cached_share(7 << 20, 1 << 20) == there[7 * 256 :].mean() == 0
    with pytest.raises(ClosedError):
        one.cached_share(0, 1)


def in_memory(path):
    """bool[pages], by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as held:
        found = np.empty(-(-len(held) // 4096), np.uint8)
        address = np.frombuffer(held, np.uint8).ctypes.data
        where = ctypes.c_void_p(address), ctypes.c_size_t(len(held)), found.ctypes.data_as(ctypes.c_void_p)
        assert libc.mincore(*where) == 0
        return found & 1 == 1


def test_what_somebody_waits_for_is_read_first(path):
    one = PosixFetcher(path)
    order, go, begun = [], threading.Event(), threading.Event()

    def read(reads, out, starts):
        order.append(int(reads["offset"][0]))
        begun.set()
        go.wait(20)

    one.read = read
    pool, out = ReadPool(one, 1), np.empty(10, np.uint8)
    for offset in (1, 2, 3):
        pool.submit(np.array([(offset, 1)], EXTENT), out, np.zeros(1, np.int64), lambda *_: None, urgent=offset == 3)
        assert begun.wait(20)
    go.set()
    assert pool.close(20)
    assert order == [1, 3, 2]
    one.close()


def test_metadata_in_short_reads(path, content, monkeypatch):
    one = PosixFetcher(path)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, offset: real(fd, min(nbytes, 7), offset))
    assert one.pread(1000, 100) == content[1000:1100].tobytes()
    assert one.pread(SIZE - 10, 100) == content[-10:].tobytes()
    one.close()


def test_resolve(tmp_path):
    folder = tmp_path / "set.lmdb"
    folder.mkdir()
    with pytest.raises(MissingError, match=r"no data\.mdb; it is empty"):
        resolve(folder)
    (folder / "other.bin").touch()
    with pytest.raises(MissingError, match=r"it holds other\.bin"):
        resolve(folder)
    (folder / "data.mdb").touch()
    assert resolve(folder) == resolve(folder / "data.mdb") == str(folder / "data.mdb")
    with pytest.raises(FileNotFoundError, match="no such file"):
        resolve(tmp_path / "nowhere" / "set.lmdb")
    with pytest.raises(MissingError, match="not a regular file"):
        resolve("/dev/null")
