"""What reaches the device: an epoch reads the records' pages once, an index the tree's, whoever asks for them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks import cache, data, measure
from benchmarks.stores import throttled
from benchmarks.stores.throttled import Disk, Group

RECORDS = {"3k": 15_000, "197k": 300}  # some 60 MB each


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, data.DataSet]:
    folder = tmp_path_factory.mktemp("sets")
    return {which: data.make(folder, which, records, log=False) for which, records in RECORDS.items()}


def run(path: str, shuffle: str, *more: str, group: Group | None = None, ranks: int = 1, nodes: int = 1) -> None:
    words = [path, "--shuffle", shuffle, "--batch", "64", *more]
    ended = measure.launch("benchmarks.worker_pario", words, ranks=ranks, nodes=nodes, group=group, timeout_s=120)
    delivered = sum(epoch["records"] for rank in ended["ranks"] for epoch in rank.get("epochs", []))
    if "--index-only" not in more:
        assert delivered == int(Path(path).name.rsplit("-", 1)[1])


@pytest.mark.parametrize("shuffle", ["none", "block"])
@pytest.mark.parametrize("which", ["3k", "197k"])
@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (3, 1), (4, 2)])
def test_an_epoch_reads_each_page_once(
    which: str, shuffle: str, ranks: int, nodes: int, sets: dict[str, data.DataSet], disk: Disk
) -> None:
    held = sets[which]
    path = disk.copy(held.path)
    run(path, shuffle, "--index-only")
    cache.drop_file(f"{path}/data.mdb")
    with Group(disk.device) as group:
        run(path, shuffle, group=group, ranks=ranks, nodes=nodes)
        # 52 pages more, whatever the size: two meta pages, one record for the decoder to look at, what comes with them.
        assert group.bytes_read() <= 1.02 * held.record_bytes + 52 * held.page_size
        assert group.bytes_read() >= held.record_bytes  # or else the file was not cold, and this test worth nothing


@pytest.mark.parametrize(("which", "ranks"), [("3k", 1), ("3k", 3), ("197k", 1)])
def test_the_index_reads_the_tree_only(which: str, ranks: int, sets: dict[str, data.DataSet], disk: Disk) -> None:
    held = sets[which]
    path = disk.copy(held.path)
    with Group(disk.device) as group:
        run(path, "none", "--index-only", group=group, ranks=ranks)
        # The two meta pages and a page of the file system's own are no matter of the tree's size.
        assert group.bytes_read() <= 1.2 * held.tree_pages * held.page_size + 4 * held.page_size
        assert group.bytes_read() >= held.tree_pages * held.page_size


def test_a_slow_store_is_slow(sets: dict[str, data.DataSet], disk: Disk) -> None:
    """The cap holds: what is measured on the slow store was not served by a cache."""
    held = sets["197k"]
    path = disk.copy(held.path)
    with Group(disk.device, 40_000_000) as group:
        begin = time.monotonic()
        run(path, "none", group=group)
        assert time.monotonic() - begin > 0.8 * held.record_bytes / 40_000_000


def test_the_counter_counts(sets: dict[str, data.DataSet], disk: Disk) -> None:
    """The measure itself: a file of known size, read by dd, once from the device and once from the page cache."""
    path = disk.copy(sets["3k"].path) + "/data.mdb"
    size = sets["3k"].file_bytes
    words = ["dd", f"if={path}", "of=/dev/null", "bs=1M", "status=none"]
    with Group(disk.device) as group:
        throttled._run(*group.command(words))
        assert size <= group.bytes_read() <= 1.01 * size
        assert cache.cached_bytes(path) in (None, -(-size // 4096) * 4096)
        throttled._run(*group.command(words))
        assert group.bytes_read() <= 1.01 * size
        cache.drop_file(path)
        assert cache.cached_bytes(path) in (None, 0)
        throttled._run(*group.command(words))
        assert group.bytes_read() >= 2 * size
