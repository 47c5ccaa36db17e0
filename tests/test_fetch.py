"""One contract, every fetcher. The oracle is the file's content as the test wrote it."""

import os
import threading

import numpy as np
import pytest

from pario.errors import ClosedError, MissingError, OptionError, ReadError
from pario.fetch.base import ReadPool, resolve
from pario.fetch.direct import DirectFetcher
from pario.fetch.mapped import MappedFetcher
from pario.fetch.posix import PosixFetcher
from pario.records import EXTENT

SIZE = 3_000_001  # not a multiple of anything


@pytest.fixture(scope="module")
def content():
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture(scope="module")
def path(content, tmp_path_factory):
    file = tmp_path_factory.mktemp("fetch") / "data.mdb"
    content.tofile(file)
    return str(file)


@pytest.fixture(params=[PosixFetcher, DirectFetcher, MappedFetcher], ids=["posix", "direct", "mapped"])
def fetcher(request, path):
    try:
        one = request.param(path)
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
