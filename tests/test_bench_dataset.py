"""`bench PATH` without its command: what is measured of one dataset."""

from __future__ import annotations

from pathlib import Path

import lmdb
import numpy as np
import pytest
from cold_file import why_not_cold
from datasets import Made

from pario.bench.dataset import PHASES, DatasetBench, cached_share, page_bytes
from pario.decode.datum import Datum
from pario.errors import MissingError
from pario.options import Options


@pytest.mark.full
def test_epochs_of_a_workload(caffe_datum: Made) -> None:
    n = len(caffe_datum.truth)
    how = {"shuffle": "block", "decoder": Datum(), "options": Options(inflight=2)}
    batches: list[int] = []
    with DatasetBench(caffe_datum.path, n // 10 + 1, **how) as bench:
        assert bench.batches == 10
        epochs = [bench.epoch(lambda: batches.append(1)) for _ in range(2)]
        report = bench.report()
        result = bench.result(report)
    assert len(batches) == 20
    nbytes = sum(len(value) for _, value in caffe_datum.truth)
    assert [(epoch.records, epoch.bytes) for epoch in epochs] == [(n, nbytes)] * 2
    assert all(epoch.seconds > 0 for epoch in epochs)
    assert [epoch["seconds"] for epoch in result["epochs"]] == [epoch.seconds for epoch in epochs]
    assert (result["records"], result["value_bytes"], result["decoder"]) == (n, nbytes, repr(Datum()))
    assert set(result["rank_seconds"]) == set(PHASES) <= report.total.keys()


def test_a_training_step_takes_its_time(caffe_datum: Made) -> None:
    with DatasetBench(caffe_datum.path, len(caffe_datum.truth), step_ms=30.0) as bench:
        assert bench.epoch(lambda: None).seconds >= 0.03


def test_what_is_missing_is_said_by_the_loader(tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        DatasetBench(str(tmp_path / "nothing"), 64, cold=True)


@pytest.mark.parametrize("cold", [True, False])
def test_a_cold_run_begins_without_the_page_cache(tmp_path: Path, cold: bool) -> None:
    with lmdb.open(str(tmp_path), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for k in range(500):
            txn.put(b"%04d" % k, bytes(3000))
    file = tmp_path / "data.mdb"
    if why := why_not_cold(str(file)):
        pytest.skip(why)
    file.write_bytes(file.read_bytes())  # waits to be written, too
    with DatasetBench(str(tmp_path), 64, cold=cold) as bench:
        bench.epoch(lambda: None)
        share = bench.result(bench.report())["cached_before"]
    if share is None:
        pytest.skip("this file system does not tell")
    assert share <= 0.001 if cold else share == 1.0


@pytest.mark.parametrize(
    ("extents", "pages"),
    [
        ([(100, 50), (150, 50)], 1),  # two values inside one leaf page
        ([(4096 - 10, 20)], 2),
        ([(4096 + 16, 2 * 4096)], 3),
        ([(4096 + 16, 4096 - 16)], 1),  # to the end of its page
        ([(16, 0)], 1),
        ([(16, 10), (2 * 4096 + 16, 10)], 2),
    ],
)
def test_pages_of_records(extents: list[tuple[int, int]], pages: int) -> None:
    made = np.array(extents, [("offset", np.int64), ("nbytes", np.int64)])
    assert page_bytes(made, 4096) == pages * 4096


def test_the_page_cache_is_seen(caffe_datum: Made) -> None:
    path = caffe_datum.file
    Path(path).read_bytes()
    share = cached_share(path)
    if share is None:
        pytest.skip("this file system has no RWF_NOWAIT")
    assert share == 1.0
    assert cached_share(path + ".not") is None
