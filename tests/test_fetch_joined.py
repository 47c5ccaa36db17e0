"""Records that lie in one of several LMDBs: joined addresses bring the same bytes as each file by itself."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

import pario
from pario.fetch.joined import JoinedFetcher
from pario.fetch.limited import open_limited
from pario.fetch.pool import ReadPool
from pario.fetch.resolve import FETCHERS
from pario.plan.coalesce import coalesce
from pario.plane.agent import Agent
from pario.plane.session import Who
from pario.plane.words import PlaneAddress
from pario.records import EXTENT, Records

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
                reader.checked.records(Records(ids[mine], data, starts[mine], wanted["nbytes"][mine]), own[mine])
            for start, nbytes, i in zip(starts, wanted["nbytes"], ids, strict=True):
                assert data[start : start + nbytes].tobytes() == truth[i]


def test_behind_the_control_plane(tmp_path):
    """Each file is asked for at the gate, which reads at once would pass."""
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 9000)
    agent = Agent(PlaneAddress("127.0.0.1", 1), Who("me", None, "a", "a", "n"))
    files = [open_limited(partial(FETCHERS["posix"], str(tmp_path / name)), agent) for name in "ab"]
    fetcher = JoinedFetcher(files)
    assert fetcher.limited
    reads = np.array([(0, 10), (int(fetcher.bases[1]), 10)], EXTENT)
    assert not fetcher.read_now(reads, np.zeros(20, np.uint8), np.array([0, 10])).any()
    assert [file.path for file in fetcher.files] == [str(tmp_path / name) for name in "ab"]
    assert fetcher.pread(int(fetcher.bases[1]), 3) == b"bbb"
    fetcher.close()


def test_a_file_that_grew_stays_in_its_room(tmp_path):
    """The addresses follow from the sizes that all ranks know, and bytes behind them are not read."""
    for name, size in (("a", 70_000), ("b", 9000)):
        (tmp_path / name).write_bytes(name.encode() * size)
    files = [FETCHERS["posix"](str(tmp_path / name)) for name in "ab"]
    fetcher = JoinedFetcher(files, [9000, 9000])
    assert fetcher.bases.tolist() == [0, 1 << 20]
    reads = np.array([(8000, (1 << 20) - 8000 + 10)], EXTENT)
    out = np.zeros(1 << 20, np.uint8)
    fetcher.read(reads, out, np.zeros(1, np.int64))
    assert out[:1000].tobytes() == b"a" * 1000
    assert not out[1000 : (1 << 20) - 8000].any()
    assert out[(1 << 20) - 8000 :][:10].tobytes() == b"b" * 10
    fetcher.close()
