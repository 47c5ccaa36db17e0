"""The choice between a sweep over a cold file and single records: numbers in, choice out."""

from __future__ import annotations

import pytest

from pario.plan.sweep import Figures, choose, no_room

#: 168 MB of 3 KB records on a disk of 1.2 GB/s that gives 50,000 records/s at random
SMALL = Figures(168_000_000, 40_960, 20e-6, 1 / 1.2e9)


def test_small_records_of_a_whole_epoch_are_swept() -> None:
    choice = choose(SMALL)
    assert choice.sweep
    assert "140.0 ms" in choice.reason
    assert "40,960 records at random 819.2 ms" in choice.reason


@pytest.mark.parametrize(
    "change",
    [
        {"records": 1000},  # the end of an epoch, after a resume
        {"records": 40_960 // 8},  # the share of one node of eight
        {"byte_s": 1 / 100e6},  # a disk whose long reads are not faster
        {"record_s": 3e-6},  # a device for which random reads cost nothing more
        {"file_bytes": 168_000_000 * 8},  # a selection of every eighth record
    ],
)
def test_a_sweep_must_repay_itself(change: dict) -> None:
    assert not choose(SMALL._replace(**change)).sweep


@pytest.mark.parametrize(("record_s", "sweeps"), [(100.0, False), (200.0, False), (201.0, True)])
def test_the_loop_and_the_sweep_share_the_disk(record_s: float, sweeps: bool) -> None:
    assert choose(Figures(1000, 10, record_s, 1.0)).sweep is sweeps


@pytest.mark.parametrize(("room", "fits"), [(168_000_000, True), (167_999_999, False), (-5, False)])
def test_the_whole_file_must_fit(room: int, fits: bool) -> None:
    choice = no_room(168_000_000, room)
    assert (choice is None) is fits
    if choice is not None:
        assert not choice.sweep
        assert "do not fit beside the batches" in choice.reason
