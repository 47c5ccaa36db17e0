"""Records that lie in one of several LMDBs: joined addresses bring the same bytes as each file by itself."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

import pario
from pario.fetch.joined import JoinedFetcher
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
