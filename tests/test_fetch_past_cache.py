"""Where the page cache is left out, and that the records are the same."""

from __future__ import annotations

import errno
from itertools import pairwise

import pytest

import pario
from pario.errors import ReadError
from pario.fetch import past_cache as module
from pario.fetch.direct import DirectFetcher
from pario.fetch.past_cache import past_cache
from pario.fetch.posix import PosixFetcher


@pytest.fixture
def cold(caffe_datum, monkeypatch):
    """A file that looks large, cold, and as if it were on a fast disk of this node."""
    monkeypatch.setattr(module, "_LEAST_BYTES", 1)
    monkeypatch.setattr(module, "_BYTES", 4096)
    monkeypatch.setattr(module, "_FAST", 1e9)
    monkeypatch.setattr(PosixFetcher, "read_ahead_bytes", 1 << 20)
    monkeypatch.setattr(PosixFetcher, "cached_share", lambda *_: 0.0)
    return caffe_datum


def bypasses(made, shuffle="block", **options) -> bool:
    """Whether a Loader does, which must deliver everything."""
    given = pario.Options(**options)
    with pario.Loader(made.path, 16, shuffle=shuffle, comm="self", db=made.db, options=given) as loader:
        found = []
        for batch in loader:
            data, ends = batch["data"], batch["offsets"]
            found += [data[a:b].tobytes() for a, b in pairwise(ends.tolist())]
        fetcher = loader._life.reader.file.pool.fetcher
        assert sorted(found) == sorted(value for _, value in made.truth)
    return isinstance(fetcher, DirectFetcher)


def test_a_cold_file_on_a_fast_disk_is_read_past_the_page_cache(cold) -> None:
    assert bypasses(cold)


def test_small_records_in_random_order_come_through_it(cold, monkeypatch) -> None:
    """Each brings a page, which others need later."""
    assert not bypasses(cold, "global")
    monkeypatch.setattr("pario.supply.choose._SINGLE_BYTES", 1)
    assert bypasses(cold, "global")


@pytest.mark.parametrize("options", [{"fetch": "posix"}, {"own_rows": "always"}, {"tiers": (pario.Tier("memory"),)}])
def test_not_if_something_else_was_asked_for(cold, options) -> None:
    assert not bypasses(cold, **options)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (PosixFetcher, "cached_share", lambda *_: 0.5),  # it is in memory
        (PosixFetcher, "cached_share", lambda *_: None),  # nobody knows
        (PosixFetcher, "read_ahead_bytes", 0),  # other nodes see it, too
        (module, "_LEAST_BYTES", 1 << 60),
        (module, "_FAST", 0.0),
    ],
)
def test_not_elsewhere(cold, monkeypatch, where, name, value) -> None:
    monkeypatch.setattr(where, name, value)
    assert not bypasses(cold)


def test_where_direct_reads_are_refused(cold, monkeypatch) -> None:
    """When the file is opened, or by the first read: both leave the file as it was."""

    def refuses(*_: object) -> None:
        raise ReadError("Invalid argument", path=cold.file)

    def no_memory(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no memfd")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "memfd_create", no_memory)
        assert not bypasses(cold)
    for name in ("read", "__init__"):
        monkeypatch.setattr(DirectFetcher, name, refuses)
        assert not bypasses(cold)


@pytest.mark.parametrize(("disk_s", "fast"), [(0.7e-3, True), (4e-3, False)])
def test_how_fast_a_disk_must_be(cold, monkeypatch, disk_s, fast) -> None:
    """8 MiB are copied in 2 ms here, and a quarter of them comes from the disk in so many seconds."""
    took = iter([disk_s] * module._TRIES + [2e-3] * module._TRIES)
    monkeypatch.setattr(module, "_FAST", 4.0)
    monkeypatch.setattr(module, "_seconds", lambda work: (work(), next(took))[1])
    store = PosixFetcher(cold.file)
    found = past_cache(store)
    assert isinstance(found, DirectFetcher) is fast
    for each in filter(None, (store, found)):
        each.close()
