"""One contract, every fetcher. The oracle is the file's content as the test wrote it."""

import errno
import os
import threading
from itertools import pairwise

import numpy as np
import pytest

from pario import options
from pario.control.agent import Agent
from pario.control.line import Who
from pario.control.wire import Address
from pario.errors import ClosedError, MissingError, OptionError, ReadError
from pario.fetch.base import Form
from pario.fetch.direct import DirectFetcher
from pario.fetch.joined import JoinedFetcher
from pario.fetch.limited import open_limited
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.fetch.resolve import FETCHERS, resolve
from pario.kernels.reads import read_split
from pario.plan.coalesce import coalesce
from pario.records import EXTENT
from pario.stage.grid import Grid
from pario.stage.memory import MemoryTier
from pario.stage.staged import StagedFetcher

SIZE = 3_000_001  # not a multiple of anything


@pytest.fixture(scope="module")
def content():
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture(scope="module")
def path(content, tmp_path_factory):
    file = tmp_path_factory.mktemp("fetch") / "data.mdb"
    content.tofile(file)
    return str(file)


#: of SIZE bytes, what lies in each of three joined files; one of them is as short as can be
CUTS = [0, 1 << 20, (1 << 20) + (64 << 10), SIZE]


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
            monkeypatch.setattr("pario.stage.staged.check_snapshot", lambda *_: None)  # these files are no LMDBs
            tiers = [MemoryTier.made(Grid(SIZE, 256 << 10), 1 << 20)]  # for a third of it
            store = FETCHERS["direct" if "direct" in request.param else "posix"](path)
            one = StagedFetcher(store, None, tiers, grid=tiers[0].grid, read_bytes=64 << 10, count=lambda *_: None)
        elif request.param.startswith("limited"):
            kind = FETCHERS["direct" if "direct" in request.param else "posix"]
            one = open_limited(lambda: kind(path), Agent(Address("127.0.0.1", 1), Who("me", None, "a", "a", "n")))
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
    assert fetcher.read_ahead_bytes >= 0
    pages = np.arange(0, SIZE, 4096)
    fetcher.advise(pages, np.full(len(pages), 100), 0)
    share = fetcher.cached_share(pages)
    assert share is None or 0 <= share <= 1
    assert fetcher.rows is None or fetcher.align == 1


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
    sizes = [70_000, 5_000, 200_000]
    for k, size in enumerate(sizes):
        content[1000 * k :][:size].tofile(tmp_path / f"{k}")
    one = JoinedFetcher([PosixFetcher(str(tmp_path / f"{k}")) for k in range(3)])
    assert one.bases.tolist() == [0, 128 << 10, 192 << 10]
    assert one.nbytes == (192 << 10) + 200_000
    assert one.file_of(np.array([0, 69_999, 128 << 10, (192 << 10) - 1, 192 << 10])).tolist() == [0, 0, 1, 1, 2]
    wanted = np.full(one.nbytes, 0xEE, np.uint8)
    for k, (base, size) in enumerate(zip(one.bases, sizes, strict=True)):
        wanted[base : base + size] = content[1000 * k :][:size]
    for reads in (
        [(0, one.nbytes)],
        [(69_990, 100_000), (50, 60), (140_000, 70_000)],
        [(100_000, 200_000), (0, 0), (300_000, 10)],
        [(130_000, 2_000)],
    ):
        wide = np.array(reads, EXTENT)
        starts = np.cumsum(wide["nbytes"]) - wide["nbytes"]
        out = aligned(int(wide["nbytes"].sum()))
        one.read(wide, out, starts)
        assert np.array_equal(out, np.concatenate([wanted[at : at + nbytes] for at, nbytes in reads]))
    os.truncate(tmp_path / "1", 4_000)
    with pytest.raises(ReadError, match="ended early") as caught:
        one.read(np.array([(135_000, 1_000)], EXTENT), aligned(4096), np.array([0]))
    assert (caught.value.path, caught.value.offset) == (str(tmp_path / "1"), 4_000)
    one.close()


def test_the_table_has_what_options_allow():
    assert set(FETCHERS) == {*options.FETCHERS, "mapped"}


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


def test_the_share_of_a_file_that_is_in_memory(path, monkeypatch):
    """As the kernel says it: a read that does not wait brings bytes, or would have to wait, or is not known."""
    one, asked, offsets = PosixFetcher(path), [], np.arange(0, 40 * 4096, 4096)

    def preadv(fd, buffers, offset, flags):
        assert flags == os.RWF_NOWAIT
        asked.append(offset)
        if offset % 8192:
            raise BlockingIOError
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", preadv)
    assert one.cached_share(offsets) == 0.5
    assert asked == offsets.tolist()
    asked.clear()
    assert one.cached_share(offsets, 0.9) < 0.9
    assert len(asked) == 10  # five of forty are missing: that is enough to know

    def unknown(*_):
        raise OSError(errno.EOPNOTSUPP, "no such flag")

    monkeypatch.setattr(os, "preadv", unknown)
    assert one.cached_share(offsets) is None
    one.close()


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


@pytest.mark.parametrize("row", [900, -1], ids=["rows", "packed"])
def test_values_read_apart(tmp_path, row):
    data = np.random.default_rng(1).integers(0, 256, 400_000, dtype=np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    fetcher = PosixFetcher(str(tmp_path / "f"))
    rng = np.random.default_rng(3)
    lead, head, tail = 16, 7, 64
    for begins in (
        np.array([39_000, 0, 17]),
        np.arange(0, 380_000, 1100),  # one behind the other: more parts than one call may have
        np.cumsum(rng.integers(987, 1400, 200)),  # some with a gap that is too wide
        rng.integers(0, 390_000, 50),
    ):
        nbytes = head + 900 + rng.integers(0, tail + 1, len(begins))
        edges = np.zeros((len(begins), 90), np.uint8)
        out = np.zeros(int((nbytes - head).sum()) if row < 0 else len(begins) * row, np.uint8)
        reads, total = fetcher.rows.read_split(begins, nbytes, Form(lead, head, row, tail), 120, edges, out)
        gaps = begins[1:] - begins[:-1] - lead - nbytes[:-1]
        assert 1 + ((gaps < 0) | (gaps > 120)).sum() <= reads <= len(begins)
        assert 0 <= total - (lead + nbytes).sum() <= gaps[(gaps > 0) & (gaps <= 120)].sum()
        at = 0
        for i, (begin, many) in enumerate(zip(begins, nbytes, strict=True)):
            whole = data[begin : begin + lead + many]
            size = many - head if row < 0 else row
            assert np.array_equal(out[at : at + size], whole[lead + head :][:size])
            rest = np.concatenate([whole[: lead + head], whole[lead + head + size :]])
            assert np.array_equal(edges[i, : len(rest)], rest)
            at += size
        assert at == len(out)
    assert len(begins) > 1
    with pytest.raises(IndexError):
        fetcher.rows.read_split(begins, nbytes, Form(lead, head, row, tail), 120, edges, out[:-1])
    with pytest.raises(IndexError):
        fetcher.rows.read_split(begins, nbytes, Form(lead, 90, row, tail), 120, edges, out)
    if row > 0:  # a value with too little or too much behind its row
        for wrong in (head + row - 1, head + row + tail + 1):
            wrongs = np.array([wrong])
            assert fetcher.rows.read_split(begins[:1], wrongs, Form(lead, head, row, tail), 120, edges, out) is None
    with pytest.raises(ReadError, match="ended early"):
        fetcher.rows.read_split(np.array([399_500]), nbytes[:1], Form(lead, head, row, tail), 120, edges, out)
    fetcher.close()


def test_one_call_has_no_more_parts_than_its_table(tmp_path):
    data = np.random.default_rng(1).integers(0, 256, 10_000, dtype=np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    table = np.full((16, 2), 77, np.uint64)
    begins, out = np.arange(0, 1000, 100), np.zeros(1000, np.uint8)
    edges, trash = np.zeros((10, 8), np.uint8), np.zeros(8, np.uint8)
    with open(tmp_path / "f", "rb") as file:
        many = (file.fileno(), begins, np.full(10, 100), (0, 0, -1, 0), 8, edges, out, table[:8], trash)
        many += (np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, bool))  # no checksums
        assert read_split(*many) == (-1, 0, 0, 5, 1000)  # two values of 3 parts each, and the gap between them
    assert np.array_equal(out, data[:1000])
    assert (table[8:] == 77).all()


def test_ranges_in_any_order(tmp_path):
    data = np.random.default_rng(2).integers(0, 256, 300_000, dtype=np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    fetcher = PosixFetcher(str(tmp_path / "f"))
    rng = np.random.default_rng(5)
    for begins in (
        np.arange(0, 90_000, 1000),  # ascending, close together
        np.arange(0, 90_000, 1000)[::-1].copy(),  # small values in a page
        rng.integers(0, 299_000, 50),  # anywhere, also the same twice
        np.array([0, 0, 200_000, 90, 299_999], np.int64),
    ):
        nbytes = np.minimum(rng.integers(0, 900, len(begins)), 300_000 - begins)
        out = np.empty(int(nbytes.sum()) + len(begins) * 100, np.uint8)
        starts, reads, total = fetcher.rows.read_ranges(begins, nbytes, 100, out)
        assert 1 <= reads <= len(begins)
        assert total <= out.nbytes
        for begin, size, start in zip(begins, nbytes, starts, strict=True):
            assert np.array_equal(out[start : start + size], data[begin : begin + size])
        assert fetcher.rows.read_ranges(begins, nbytes, 100, out[: total - 1]) is None
        assert fetcher.rows.read_ranges(begins, nbytes, 100, out[:total]) is not None
    with pytest.raises(ReadError, match="ended early"):
        fetcher.rows.read_ranges(np.array([299_990]), np.array([11]), 100, out)
    fetcher.close()


def test_one_rule_for_gaps(tmp_path):
    """A page between two ranges is read along, two are not, and no more than the gap that is allowed."""
    (tmp_path / "f").write_bytes(bytes(100_000))
    fetcher = PosixFetcher(str(tmp_path / "f"))
    out, vector = np.empty(100_000, np.uint8), np.empty((2, 64), np.uint8)
    for first, second, gap, reads in (
        (100, 200, 0, 2),
        (100, 200, 100, 1),
        (4000, 8192, 1 << 14, 1),  # a page, and what is left of another
        (1, 12_287, 1 << 14, 1),  # the longest
        (1, 12_288, 1 << 14, 2),  # two pages
        (1, 12_287, 12_285, 2),
    ):
        begins, nbytes = np.array([0, second]), np.array([first, 10])
        assert fetcher.rows.read_ranges(begins, nbytes, gap, out)[1] == reads
        assert fetcher.rows.read_ranges(begins[::-1].copy(), nbytes[::-1].copy(), gap, out)[1] == reads
        assert fetcher.rows.read_split(begins, nbytes, Form(0, 0, -1, 0), gap, vector, out)[0] == reads
        plan = coalesce(begins, nbytes, align=1, gap_bytes=gap, read_bytes=1 << 20, file_bytes=100_000)
        assert len(plan.reads) == reads
    fetcher.close()
