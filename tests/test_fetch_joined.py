"""Records that lie in one of several LMDBs: joined addresses bring the same bytes as each file by itself."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

import pario
from pario.control.agent import Agent
from pario.control.line import Who
from pario.control.wire import Address
from pario.fetch.base import Form
from pario.fetch.joined import JoinedFetcher
from pario.fetch.limited import open_limited
from pario.fetch.pool import ReadPool
from pario.fetch.resolve import FETCHERS
from pario.plan.coalesce import coalesce
from pario.records import EXTENT

SETS = ("variable_sizes", "small_records", "caffe_datum")


@pytest.mark.parametrize("how", ["posix", "direct"])
def test_records_of_several_files(dataset, how):
    """One array of 16-byte extents, one plan, one pool; records in any order, and each file's own checks."""
    made = [dataset(name) for name in SETS]
    with ExitStack() as stack:
        readers = [stack.enter_context(pario.Reader(one.path, comm="self", save_index=False)) for one in made]
        try:
            fetcher = JoinedFetcher([FETCHERS[how](one.file) for one in made])
        except pario.OptionError:
            pytest.skip("this file system has no O_DIRECT")
        stack.callback(fetcher.close)
        extents = np.concatenate([reader.index.extents for reader in readers])
        extents["offset"] += np.repeat(fetcher.bases, [len(reader) for reader in readers])
        assert extents.dtype == EXTENT
        truth = [value for one in made for _, value in one.truth]
        pool = ReadPool(fetcher, 2)
        stack.callback(pool.close)
        for ids in (np.random.default_rng(1).permutation(len(truth))[:600], np.arange(1100, 1300)):
            wanted, number = extents[ids], fetcher.file_of(extents["offset"][ids])
            own = wanted["offset"] - fetcher.bases[number]
            begins, lengths = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
            for k, reader in enumerate(readers):
                mine = number == k
                begins[mine], lengths[mine] = reader.checked.spans(own[mine], wanted["nbytes"][mine])
            begins += fetcher.bases[number]
            plan = coalesce(
                begins,
                lengths,
                align=fetcher.align,
                gap_bytes=16 << 10,
                read_bytes=1 << 20,
                file_bytes=fetcher.nbytes,
            )
            memory = np.empty(plan.nbytes + fetcher.align, np.uint8)
            data = memory[-memory.ctypes.data % fetcher.align :][: plan.nbytes]
            pool.read(plan.reads, data, plan.starts)
            starts = plan.record_starts + wanted["offset"] - begins
            for k, reader in enumerate(readers):
                mine = number == k
                reader.checked.records(data, starts[mine], own[mine], wanted["nbytes"][mine], ids[mine])
            for start, nbytes, i in zip(starts, wanted["nbytes"], ids, strict=True):
                assert data[start : start + nbytes].tobytes() == truth[i]


@pytest.fixture
def raw(tmp_path):
    """(a fetcher of three files, what lies at each address)"""
    sizes = (100_000, 70_000, 200_000)
    for number, size in enumerate(sizes):
        np.random.default_rng(number).integers(1, 256, size, dtype=np.uint8).tofile(tmp_path / str(number))
    fetcher = JoinedFetcher([FETCHERS["posix"](str(tmp_path / str(number))) for number in range(len(sizes))])
    space = np.zeros(fetcher.nbytes, np.uint8)
    for number, base in enumerate(fetcher.bases.tolist()):
        content = np.fromfile(tmp_path / str(number), np.uint8)
        space[base : base + len(content)] = content
    yield fetcher, space, sizes
    fetcher.close()


def addresses(fetcher, sizes, rng, count, room):
    """Random ones, each with `room` bytes behind it in its file."""
    numbers = rng.integers(0, len(sizes), count)
    return fetcher.bases[numbers] + rng.integers(0, np.array(sizes)[numbers] - room)


def test_ranges_of_several_files(raw):
    fetcher, space, sizes = raw
    rng = np.random.default_rng(4)
    begins, nbytes = addresses(fetcher, sizes, rng, 60, 900), rng.integers(0, 900, 60)
    out = np.empty(int(nbytes.sum()) + 60 * 100, np.uint8)
    starts, reads, total = fetcher.rows.read_ranges(begins, nbytes, 100, out)
    assert 3 <= reads <= 60
    for begin, size, start in zip(begins, nbytes, starts, strict=True):
        assert np.array_equal(out[start : start + size], space[begin : begin + size])
    assert fetcher.rows.read_ranges(begins, nbytes, 100, out[: total - 1]) is None
    assert fetcher.rows.read_ranges(begins, nbytes, 100, out[:total]) is not None
    assert fetcher.rows.read_ranges(begins[:0], nbytes[:0], 100, out)[1:] == (0, 0)


@pytest.mark.parametrize("row", [500, -1])
def test_rows_of_several_files(raw, row):
    fetcher, space, sizes = raw
    rng = np.random.default_rng(5)
    lead, head, tail = 16, 7, 64
    for begins in (addresses(fetcher, sizes, rng, 40, 600), np.sort(addresses(fetcher, sizes, rng, 40, 600))):
        nbytes = head + 500 + rng.integers(0, tail, 40)
        edges = np.zeros((40, 90), np.uint8)
        out = np.zeros(int((nbytes - head).sum()) if row < 0 else 40 * row, np.uint8)
        form = Form(lead, head, row, tail)
        reads, total = fetcher.rows.read_split(begins, nbytes, form, 0, edges, out)
        assert reads <= 40
        assert total >= int(nbytes.sum()) - 40 * 600
        at = 0
        for i, (begin, many) in enumerate(zip(begins, nbytes, strict=True)):
            whole = space[begin : begin + lead + many]
            size = many - head if row < 0 else row
            assert np.array_equal(out[at : at + size], whole[lead + head :][:size])
            rest = np.concatenate([whole[: lead + head], whole[lead + head + size :]])
            assert np.array_equal(edges[i, : len(rest)], rest)
            at += size
        with pytest.raises(IndexError):
            fetcher.rows.read_split(begins, nbytes, form, 0, edges, out[:-1])
        with pytest.raises(IndexError):
            fetcher.rows.read_split(begins, nbytes, form, 0, edges[:-1], out)
    wrong = np.full(40, 3)
    assert fetcher.rows.read_split(begins, wrong, form, 0, edges, out) is None


def test_rows_only_where_all_files_have_them(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 9000)
    (tmp_path / "b").write_bytes(b"y" * 9000)
    mixed = JoinedFetcher([FETCHERS["posix"](str(tmp_path / "a")), FETCHERS["mapped"](str(tmp_path / "b"))])
    assert mixed.rows is None
    mixed.close()


def test_behind_the_control_plane(tmp_path):
    """Each file is asked for at the gate; rows from the page cache would pass it."""
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 9000)
    agent = Agent(Address("127.0.0.1", 1), Who("me", None, "a", "a", "n"))
    files = [open_limited(partial(FETCHERS["posix"], str(tmp_path / name)), agent) for name in "ab"]
    fetcher = JoinedFetcher(files)
    assert fetcher.rows is None
    assert [file.path for file in fetcher.files] == [str(tmp_path / name) for name in "ab"]
    assert fetcher.pread(int(fetcher.bases[1]), 3) == b"bbb"
    fetcher.close()


def test_a_file_that_grew_stays_in_its_room(tmp_path):
    """The addresses follow from the sizes that all ranks know, and bytes behind them are not read."""
    for name, size in (("a", 70_000), ("b", 9000)):
        (tmp_path / name).write_bytes(name.encode() * size)
    files = [FETCHERS["posix"](str(tmp_path / name)) for name in "ab"]
    fetcher = JoinedFetcher(files, [9000, 9000])
    assert fetcher.bases.tolist() == [0, 64 << 10]
    reads = np.array([(8000, (64 << 10) - 8000 + 10)], EXTENT)
    out = np.zeros(64 << 10, np.uint8)
    fetcher.read(reads, out, np.zeros(1, np.int64))
    assert out[:1000].tobytes() == b"a" * 1000
    assert not out[1000 : (64 << 10) - 8000].any()
    assert out[(64 << 10) - 8000 :][:10].tobytes() == b"b" * 10
    fetcher.close()
