"""What is delivered never depends on the knobs, which change at random while epochs run; and they are published. The
oracle is py-lmdb's content, as the set's maker wrote it down."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
from restless_knobs import restless

import pario
from pario.options import KNOBS

SMALL = {"slot_bytes": 64 << 10, "slots": 4, "block_bytes": 16 << 10, "mix_blocks": 4, "own_rows": "never"}


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
    with pario.Loader(made.path, 3, shuffle=shuffle, db=made.db, options=options) as loader:
        for _ in range(2):
            seen = []
            for batch in loader:
                data, offsets = batch["data"].tobytes(), batch["offsets"].tolist()
                values = [data[first:stop] for first, stop in pairwise(offsets)]
                assert values == [expected[i] for i in batch.ids.tolist()]
                seen += batch.ids.tolist()
            orders.append(seen)
        found = loader.stats()["knobs"]
        assert found["ring_bytes"]["reason"] == "at random"
    assert len(set(said["ring_bytes"])) > 2
    pinned = pario.Options(**{"inflight": 4, "ring_bytes": 1 << 40, **SMALL})
    with pario.Loader(made.path, 3, shuffle=shuffle, db=made.db, options=pinned) as loader:
        assert orders == [[i for batch in loader for i in batch.ids.tolist()] for _ in range(2)]


def test_batches_decoded_ahead_are_the_same(dataset, said) -> None:
    made = dataset("variable_sizes")
    expected = [value for _, value in made.truth]
    with pario.Loader(
        made.path, 3, lambda value: len(value), db=made.db, options=pario.Options(decode_threads=(1, 6), **SMALL)
    ) as loader:
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
    pytest.importorskip("prometheus_client")
    options = pario.Options(metrics_file=str(tmp_path / "x.prom"), read_bytes=8192, **SMALL)
    with (
        caplog.at_level(logging.DEBUG, "pario"),
        pario.Loader(caffe_datum.path, 16, options=options) as loader,
    ):
        for _ in loader:
            pass
        report = loader.report()
    text = str(report)
    assert "\n  ring_bytes is " in text
    assert "read_bytes is" not in text  # pinned
    assert "\n  readers_per_node is 1: fixed: " in text
    assert report.ranks[0].knobs["read_bytes"] == {
        "value": 8192, "reason": "set by the user", "least": 8192, "most": 8192, "pinned": True
    }  # fmt: skip
    metrics = (tmp_path / "x.prom").read_text()
    for name in ("inflight", "ring_bytes", "read_bytes", "readers_per_node"):
        assert f'name="{name}"' in metrics
    assert any(line.getMessage().startswith("bytes of the ring in use: ") for line in caplog.records)


def test_a_loop_that_is_slow_uses_little_of_the_ring(caffe_datum) -> None:
    """Groups are begun only when the loop needs them: of 6 slots those after the first two stay untouched."""
    options = pario.Options(**{"ring_bytes": 64 << 10, **SMALL, "slots": 6})
    with pario.Loader(caffe_datum.path, 4, options=options) as loader:
        for _ in range(2):
            for _ in loader:
                pass
        data = loader._supply.context.slots.data
        assert data[0].any()
        assert not data[2:].any()


def test_memory_of_slots_that_are_not_used_goes_back(caffe_datum) -> None:
    options = pario.Options(**{**SMALL, "slots": 6})
    with pario.Loader(caffe_datum.path, 4, options=options) as loader:
        data = loader._supply.context.slots.data
        data[5] = 7  # as if it had been used once
        loader._life.reader.file.knobs.filling.knob.limit(64 << 10, "a test")
        for _ in range(2):
            for _ in loader:
                pass
        groups = loader.stats()["groups"]
    assert groups > 2 * 2 * 6
    assert not data[5].any()
