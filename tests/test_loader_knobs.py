"""What is delivered never depends on the knobs, which change at random while epochs run; and they are published. The
oracle is py-lmdb's content, as the set's maker wrote it down."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
from restless_knobs import restless

import pario
from pario.options import KNOBS

SMALL = {"slot_bytes": 64 << 10, "slots": 4, "block_bytes": 16 << 10, "mix_blocks": 4}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    return restless(monkeypatch)


@pytest.mark.parametrize(
    "shuffle", [False, *(pytest.param(order, marks=pytest.mark.full) for order in ("global", "block"))]
)
def test_the_records_are_the_same(dataset, shuffle, said) -> None:
    made = dataset("variable_sizes")
    options = pario.Options(inflight=(1, 20), **SMALL)
    expected = [value for _, value in made.truth]
    orders = []
    with pario.Loader(made.path, 3, shuffle=shuffle, db=made.db, recipe="ring", options=options) as loader:
        for _ in range(2):
            seen = []
            for batch in loader:
                data, offsets = batch["data"].tobytes(), batch["offsets"].tolist()
                values = [data[first:stop] for first, stop in pairwise(offsets)]
                assert values == [expected[i] for i in batch.ids.tolist()]
                seen += batch.ids.tolist()
            orders.append(seen)
        found = loader.stats()["knobs"]
        assert found["inflight"]["reason"] == "at random"
    assert len(set(said["inflight"])) > 2
    pinned = pario.Options(inflight=4, **SMALL)
    with pario.Loader(made.path, 3, shuffle=shuffle, db=made.db, recipe="ring", options=pinned) as loader:
        assert orders == [[i for batch in loader for i in batch.ids.tolist()] for _ in range(2)]


def test_batches_decoded_ahead_are_the_same(dataset, said) -> None:
    made = dataset("variable_sizes")
    expected = [value for _, value in made.truth]
    options = pario.Options(decode_threads=(1, 6), **SMALL)
    with pario.Loader(made.path, 3, len, db=made.db, recipe="ring", options=options) as loader:
        for _ in range(3):
            lengths = [int(n) for batch in loader for n in next(iter(batch.values()))]
            assert lengths == [len(value) for value in expected]
        found = loader.stats()["knobs"]
    assert set(found) == set(KNOBS)
    for name in ("decode_threads", "decode_ahead"):
        assert len(set(said[name])) > 2
        assert found[name]["reason"] == "at random"
        assert found[name]["least"] <= found[name]["value"] <= found[name]["most"]


def test_they_are_in_the_report_the_metrics_and_the_log(caffe_datum, tmp_path, caplog, said) -> None:
    options = pario.Options(metrics_file=str(tmp_path / "x.prom"), decode_threads=2, **SMALL)
    with (
        caplog.at_level(logging.DEBUG, "pario"),
        pario.Loader(caffe_datum.path, 16, len, recipe="ring", options=options) as loader,
    ):
        for _ in loader:
            pass
        report = loader.report()
    text = str(report)
    assert "\n  inflight is " in text
    assert "\n  decode_ahead is " in text
    assert "decode_threads is" not in text  # pinned
    assert report.ranks[0].knobs["decode_threads"] == {
        "value": 2, "reason": "set by the user", "least": 2, "most": 2, "pinned": True
    }  # fmt: skip
    metrics = (tmp_path / "x.prom").read_text()
    for name in KNOBS:
        assert f'name="{name}"' in metrics
    assert any(line.getMessage().startswith("reads in flight: ") for line in caplog.records)
